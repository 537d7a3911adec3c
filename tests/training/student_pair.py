"""A teacher and its student of a stock class with recurrent layers, in folders."""

import torch
import transformers as hf

from attnzoo.evaluation.models import embedded_model_path
from attnzoo.hf.stock.convert import convert_files


def write_pair(place, layers, recurrent):
    """Write a random Qwen 3 to ``teacher`` and its student to ``student``.

    Args:
        place: Folder of both.
        layers: Number of layers.
        recurrent: The student's recurrent layers, as of ``attnzoo convert --recurrent``.
    """
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    teacher = hf.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(3)
    teacher.save_pretrained(place / "teacher")
    hf.AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(place / "teacher")
    convert_files(place / "teacher", "qwen3_5_text", place / "student", recurrent=recurrent)


def load(folder):
    """Load a model in float32, in evaluation mode."""
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
