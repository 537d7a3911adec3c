"""The embedded model's tokenizer as a tokenizer.json, which all model classes load."""

from transformers import AutoTokenizer

from attnzoo.evaluation.models import embedded_model_path
from benchmarks.byte_tokenizer import as_tokenizer_json


def save_byte_tokenizer(folder):
    """Write the tokenizer to a folder, in place of another one."""
    for file in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (folder / file).unlink(missing_ok=True)
    as_tokenizer_json(AutoTokenizer.from_pretrained(embedded_model_path())).save_pretrained(folder)
