import json
import random

import pytest
import torch
from transformers import AutoTokenizer

from attnzoo.evaluation.models import embedded_model_path
from attnzoo.evaluation.rows import IGNORE_INDEX
from attnzoo.training import data
from attnzoo.training.data import pack, with_repeats
from attnzoo.training.documents import DataError, read_documents, split_documents


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded_model_path())


def test_positions_of_packed_rows_restart_in_each_document(tokenizer):
    rows = pack(["abcd", "efghij"], tokenizer, row_length=4, vocab_size=384)
    assert tokenizer.decode(rows.tokens[0]) == "abcd"
    assert rows.positions.tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3]]
    assert rows.tokens[1, 0] == tokenizer.eos_token_id
    assert rows.bytes_per_token == 1.0
    first = rows[1]
    assert first["labels"].tolist() == [
        IGNORE_INDEX,
        IGNORE_INDEX,
        *first["input_ids"][2:].tolist(),
    ]
    assert len(rows) == 3


def test_short_text_and_wrong_tokenizer_are_refused(tokenizer):
    with pytest.raises(DataError, match="has 5 tokens, but a row needs 8"):
        pack(["abcd"], tokenizer, row_length=8, vocab_size=384)
    with pytest.raises(DataError, match=r"token 103, but the model's vocabulary has 50"):
        pack(["abcd"], tokenizer, row_length=4, vocab_size=50)


def test_repeats_in_a_fraction_of_the_rows(tokenizer):
    rows = pack([json.dumps(list(range(9999)))], tokenizer, row_length=512, vocab_size=384)
    some = with_repeats(rows, 0.5)
    changed = (some.tokens != rows.tokens).any(1)
    assert 0.25 < changed.float().mean() < 0.75
    assert torch.equal(some.tokens[~changed], rows.tokens[~changed])
    assert torch.equal(with_repeats(rows, 0.5).tokens, some.tokens)
    assert some.fingerprint != rows.fingerprint
    assert with_repeats(rows, 0.0) is rows


def test_several_repeats_in_a_row(tokenizer):
    """They change the same rows as one repeat, and more tokens of most of them."""
    rows = pack([json.dumps(list(range(9999)))], tokenizer, row_length=512, vocab_size=384)
    once, thrice = (with_repeats(rows, 0.5, per_row=n).tokens != rows.tokens for n in (1, 3))
    assert torch.equal(once.any(1), thrice.any(1))
    more = (thrice.sum(1) > once.sum(1))[once.any(1)]
    assert more.float().mean() > 0.8
    assert thrice.sum() > 1.5 * once.sum()


def plain_rows(documents, tokenizer, row_length):
    """Tokens and positions of rows, token by token."""
    pairs = []
    for text in documents:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        pairs += [(token, place == 0) for place, token in enumerate(ids)]
    rows = []
    for first in range(0, len(pairs) - row_length + 1, row_length):
        position, row = 0, []
        for token, starts in pairs[first : first + row_length]:
            position = 0 if starts else position
            row.append((token, position))
            position += 1
        rows.append(row)
    return torch.tensor(rows)


def test_rows_of_many_documents(tokenizer, monkeypatch):
    """Documents and rows are written in blocks; a block of either may end anywhere."""
    monkeypatch.setattr(data, "DOCUMENTS_AT_ONCE", 7)
    monkeypatch.setattr(data, "ROWS_AT_ONCE", 3)
    generator = random.Random(0)
    documents = ["x" * generator.randrange(1, 60) for _ in range(50)] + ["", "y" * 200]
    rows = pack(documents, tokenizer, row_length=16, vocab_size=384)
    expected = plain_rows(documents, tokenizer, 16)
    assert torch.equal(torch.stack([rows.tokens, rows.positions], 2).long(), expected)


def never(*args, **kwargs):
    raise AssertionError


def test_rows_are_made_once_and_mapped_into_memory(tokenizer, monkeypatch, tmp_path):
    lines = [json.dumps({"text": f"{i} made once " * 9}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    documents, _ = split_documents(read_documents([tmp_path]))
    first = pack(documents, tokenizer, row_length=64, vocab_size=384)
    some = with_repeats(first, 1.0)
    monkeypatch.setattr(data, "_write_rows", never)
    monkeypatch.setattr(type(tokenizer), "__call__", never)
    again = pack(documents, tokenizer, row_length=64, vocab_size=384)
    assert torch.equal(again.tokens, first.tokens)
    assert again[1]["input_ids"].dtype == again[1]["labels"].dtype == torch.long
    assert some is first  # too short
    again.tokens[0] = 0  # a copy of this process
    assert not torch.equal(again.tokens, first.tokens)


def test_a_write_that_fails_leaves_no_rows(tokenizer, monkeypatch):
    def fail(documents, end, row_length, folder):
        (folder / "tokens.npy").write_bytes(b"half")
        raise OSError("no space left")

    text = ["never written at first " * 9]
    with monkeypatch.context() as patch:
        patch.setattr(data, "_write_rows", fail)
        with pytest.raises(OSError, match="no space"):
            pack(text, tokenizer, row_length=32, vocab_size=384)
    assert len(pack(text, tokenizer, row_length=32, vocab_size=384)) == 6
