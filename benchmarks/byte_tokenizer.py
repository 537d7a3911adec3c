"""The byte tokenizer of the embedded model as a ``tokenizer.json``.

ByT5's tokenizer is Python code, which transformers does not load beside every model class. This one
has the same tokens for text without special tokens, and classes of the tokenizers library load it.
After `</s>` in a text, ByT5 drops a space and adds no second end token; this one does not.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


def as_tokenizer_json(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the tokenizers library with the tokens of a ByT5 tokenizer."""
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
