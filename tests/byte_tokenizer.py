"""The embedded model's tokenizer as a tokenizer.json, which all model classes load."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from attnzoo.evaluation.models import embedded_model_path


def as_tokenizer_json(tokenizer):
    """Return a tokenizer of the tokenizers library with the tokens of a ByT5 tokenizer.

    ByT5's is Python code. After `</s>` in a text, it drops a space and adds no second end token;
    this one does not.
    """
    added = tokenizer.added_tokens_decoder
    first = tokenizer.convert_tokens_to_ids("\x00")
    names = {str(x): number for number, x in added.items()}
    names |= {character: first + byte for byte, character in bytes_to_unicode().items()}
    made = Tokenizer(models.BPE(vocab=names, merges=[]))
    made.add_special_tokens([AddedToken(str(x), special=True) for x in added.values()])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    end = tokenizer.eos_token
    made.post_processor = processors.TemplateProcessing(
        single=f"$A {end}",
        pair=f"$A {end} $B {end}",
        special_tokens=[(end, names[end])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, pad_token=tokenizer.pad_token, unk_token="<unk>"
    )


def save_byte_tokenizer(folder):
    """Write the tokenizer to a folder, in place of another one."""
    for file in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (folder / file).unlink(missing_ok=True)
    as_tokenizer_json(AutoTokenizer.from_pretrained(embedded_model_path())).save_pretrained(folder)
