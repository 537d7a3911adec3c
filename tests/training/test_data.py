import json

import pytest
import torch
from transformers import AutoTokenizer

from attnzoo.evaluation.models import embedded_model_path
from attnzoo.training.data import (
    IGNORE_INDEX,
    DataError,
    pack,
    read_documents,
    split_documents,
    with_repeats,
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded_model_path())


def test_read_documents_of_every_format(tmp_path):
    import datasets

    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x", "n": 1}\n{"text": "y", "n": 2}\n')
    datasets.Dataset.from_dict({"text": ["p", "q"]}).to_parquet(tmp_path / "c.parquet")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").write_bytes(b"\xff\xfe")
    assert read_documents([tmp_path]) == ["x", "y", "p", "q", "one\ntwo\n"]
    (tmp_path / "d.jsonl").write_text('{"body": "z"}\n')
    assert read_documents([tmp_path / "d.jsonl"], "body") == ["z"]


def test_local_files_are_read_without_requests_to_the_hub(tmp_path, monkeypatch):
    import datasets.load

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    requests = []
    monkeypatch.setattr(datasets.load, "get_session", lambda: requests.append("session"))
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.jsonl").write_text('{"text": "y"}\n')
    assert read_documents([tmp_path]) == ["x", "y"]
    assert not requests
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS  # the user's setting is kept


def test_invalid_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder '.*absent'"):
        read_documents([tmp_path / "absent"])
    with pytest.raises(DataError, match="contains no file"):
        read_documents([tmp_path])
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match="There is no text in"):
        read_documents([tmp_path / "empty.txt"])
    (tmp_path / "b.txt").write_bytes(b"abc\xff\xfe")
    with pytest.raises(DataError, match=r"b\.txt' is not UTF-8 text \(byte 3"):
        read_documents([tmp_path / "b.txt"])
    (tmp_path / "c.jsonl").write_text('{"body": "z", "n": 1}\n')
    with pytest.raises(DataError, match=r"no text field 'text' \(its text fields: body\)"):
        read_documents([tmp_path / "c.jsonl"])
    (tmp_path / "d.jsonl").write_text("{not json")
    with pytest.raises(DataError, match=r"d\.jsonl' cannot be read as json"):
        read_documents([tmp_path / "d.jsonl"])


def test_held_out_documents_do_not_depend_on_their_order():
    documents = [f"text number {n}" for n in range(60)]
    train, held_out = split_documents(documents)
    assert len(held_out) == 3
    assert sorted(train + held_out) == sorted(documents)
    assert set(split_documents(documents[::-1])[1]) == set(held_out)
    assert split_documents(["0123456789"]) == (["012345678"], ["9"])
    assert split_documents(["0123456789"] * 2) == (["012345678"], ["9"])


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


def test_names_of_files_are_not_patterns(tmp_path):
    texts = {"a[1].txt": "one", "a1.txt": "two", "s*.txt": "three", "st.txt": "four"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    folder = tmp_path / "x[y]"
    folder.mkdir()
    (folder / "c[2].jsonl").write_text('{"text": "five"}')
    assert sorted(read_documents([tmp_path])) == sorted([*texts.values(), "five"])
    assert read_documents([tmp_path / "s*.txt"]) == ["three"]
    (tmp_path / "a::b.txt").write_text("six")
    with pytest.raises(DataError, match="has '::' in its name; rename it"):
        read_documents([tmp_path])


def test_linked_folders_are_read_once(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one")
    data = tmp_path / "data"
    data.mkdir()
    (data / "b.txt").write_text("two")
    (data / "link").symlink_to(tmp_path / "texts")
    (data / "loop").symlink_to(data)
    (data / "same").symlink_to(tmp_path / "texts")
    assert sorted(read_documents([data])) == ["one", "two"]
