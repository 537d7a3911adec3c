"""Documents and examples: what is read, held out, tokenized and packed."""

import hashlib
import json
import random
from itertools import accumulate

import datasets
import pytest
import torch
import transformers as hf

from attnzoo.errors import ConfigError
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.evaluation.rows import IGNORE_INDEX
from attnzoo.training import data
from attnzoo.training.arguments import token_count
from attnzoo.training.data import (
    DataError,
    RowOptions,
    load_documents,
    load_rows,
    pack,
    split_documents,
    with_repeats,
)


@pytest.fixture(scope="module")
def tokenizer():
    return hf.AutoTokenizer.from_pretrained(embedded_model_path())


def documents_of(*given):
    return datasets.Dataset.from_list([{"text": x, "digest": digest(x)} for x in given])


def digest(text):
    return hashlib.sha256(text.encode()).digest()


def texts(paths, **options):
    return list(load_documents(paths, RowOptions(**options), None)["text"])


def test_every_format_is_read(tmp_path, monkeypatch):
    """Also folders of saved data sets; what is hidden and what is blank is left out."""
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    written = {"sub/a.txt": "one\ntwo\n", ".hidden": "no", "empty.py": "", "blank.md": " \n"}
    written["b.jsonl"] = '{"text": "x", "n": 1}\n{"text": "y", "n": 2}\n'
    for name, text in written.items():
        (folder / name).write_text(text)
    datasets.Dataset.from_dict({"text": ["p", " ", "q"]}).to_parquet(folder / "c.parquet")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"\xff\xfe")
    assert texts([folder]) == ["x", "y", "p", "q", "one\ntwo\n"]
    made = datasets.Dataset.from_dict({"body": ["x", " ", "y"], "n": [1, 2, 3]})
    made.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=made.select([2]), test=made).save_to_disk(tmp_path / "dict")
    paths = [tmp_path / "dict", tmp_path / "saved"]
    assert texts(paths, dataset_text_field="body") == ["y", "x", "y"]


@pytest.mark.parametrize("streaming", [True, False])
def test_data_sets_of_the_hub_are_read(monkeypatch, tokenizer, streaming):
    asked = []

    class Builder:
        hash = "revision"

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.Dataset.from_dict({"text": ["p" * 20] * 3})

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, config: Builder())
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options = RowOptions(max_tokens=50 if streaming else None)
    found = load_documents(["owner/name:config", "owner/name"], options, tokenizer)
    assert len(found) == (3 if streaming else 6)
    expected = {"split": "train", "streaming": streaming}
    assert asked == [(("owner/name", x), expected) for x in ("config", None)][: 2 - streaming]


def test_local_files_are_read_without_requests_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    requests = []
    monkeypatch.setattr(datasets.load, "get_session", lambda: requests.append("session"))
    (tmp_path / "a.txt").write_text("without requests")
    (tmp_path / "b.jsonl").write_text('{"text": "y"}\n')
    assert texts([tmp_path]) == ["without requests", "y"]
    assert not requests


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent", None, r"no file or folder '.*absent'"),
        ("owner/no-such-data-set", None, "no such data set of the Hub"),
        ("blank.txt", b" \n", "There is no text in"),
        ("latin.txt", b"abc\xff\xfe", r"latin\.txt' cannot be read: .*0xff in position 3"),
        ("c.jsonl", b'{"body": "z", "n": 1}', r"lacks a text in field 'text'; its fields: body, n"),
        ("d.jsonl", b"{not json", r"d\.jsonl' cannot be read"),
        ("e.parquet", b"PAR1", r"e\.parquet' cannot be read"),
        ("a::b.txt", b"six", "its name has '::'"),
    ],
)
def test_invalid_sources_are_refused(tmp_path, name, content, message):
    path = name if content is None and "/" in name else tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts([path])
    if name.endswith((".jsonl", "latin.txt")):  # a folder's error names the file
        (tmp_path / "a.jsonl").write_text('{"text": "before"}')
        with pytest.raises(DataError, match=message):
            texts([tmp_path])


def test_names_of_files_are_not_patterns(tmp_path):
    written = {"a[1].txt": "one", "a1.txt": "two", "s*.txt": "three"}
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    assert sorted(texts([tmp_path])) == sorted(written.values())
    assert texts([tmp_path / "s*.txt"]) == ["three"]


def test_a_file_that_changes_is_read_again(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}')
    reads, read = [], data._sources
    monkeypatch.setattr(data, "_sources", lambda *given: reads.append(given) or read(*given))
    assert texts([file]) == texts([file]) == ["one"]
    assert len(reads) == 1
    file.write_text('{"text": "other"}')
    assert texts([file]) == ["other"]
    assert len(reads) == 2


def test_held_out_documents_do_not_depend_on_their_order():
    given = [f"text number {n}" for n in range(60)] + ["text number 7"] * 3

    def split(given):
        return tuple(list(part["text"]) for part in split_documents(documents_of(*given)))

    train, held_out = split(given)
    ranked = sorted(given, key=digest)
    assert held_out == [text for text in given if text in set(ranked[:3])]
    assert train == [text for text in given if text not in set(ranked[:3])]
    assert set(split(given[::-1])[1]) == set(held_out)
    assert split(["0123456789"]) == split(["0123456789"] * 2) == (["012345678"], ["9"])


@pytest.mark.parametrize(
    ("text", "count"), [("300M", 300_000_000), ("1.5k", 1500), ("2b", 2 * 10**9), (7, 7)]
)
def test_units_of_tokens_are_decimal(text, count):
    assert token_count(text) == count
    for wrong in ("0", "0.4", "many", "3 MiB", "-1"):
        with pytest.raises(ConfigError, match="max_tokens must be a number of tokens"):
            token_count(wrong)


def plain_rows(documents, tokenizer, length):
    """Tokens and positions of rows, token by token."""
    pairs = []
    for text in documents:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        pairs += [(token, place == 0) for place, token in enumerate(ids)]
    rows = []
    for first in range(0, len(pairs) - length + 1, length):
        position, row = 0, []
        for token, starts in pairs[first : first + length]:
            position = 0 if starts else position
            row.append((token, position))
            position += 1
        rows.append(row)
    return torch.tensor(rows)


def test_rows_of_many_documents(tokenizer):
    generator = random.Random(0)
    documents = ["x" * generator.randrange(1, 60) for _ in range(1050)] + ["", "y" * 203, "z"]
    rows = pack(documents_of(*documents), tokenizer, 16)
    expected = plain_rows(documents, tokenizer, 16)
    assert torch.equal(torch.stack([rows.tokens, rows.positions], 2).long(), expected)
    assert rows.bytes_per_token == 1.0
    ends = [0, *accumulate(len(x) + 1 for x in documents)]
    assert ends[-2] >= rows.tokens.numel()  # the last document is dropped
    assert rows.starts.tolist() == [x for x in ends if x < rows.tokens.numel()]
    first = rows[1]
    starts = expected[1, :, 1] == 0
    assert torch.equal(first["labels"] == IGNORE_INDEX, starts)


def test_tokens_are_made_once(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(f'{{"text": "{n} made once"}}' for n in range(40)))
    found = []
    for _ in range(2):
        tokenizer = hf.AutoTokenizer.from_pretrained(embedded_model_path())
        documents, _ = split_documents(load_documents([file], RowOptions(), None))
        found.append(pack(documents, tokenizer, 32).fingerprint)
        monkeypatch.setattr(data, "_ids", None)
    assert found[0] == found[1]


def test_short_text_and_a_wrong_tokenizer_are_refused(saved, tmp_path):
    (tmp_path / "a.txt").write_text("abcd" * 30)
    with pytest.raises(DataError, match="has 109 tokens, but one row needs 500"):
        load_rows(saved, [tmp_path / "a.txt"], RowOptions(max_length=500))
    with pytest.raises(DataError, match=r"token 103, but the model's vocabulary has 50"):
        data.check_vocabulary(103, 50)


def test_repeats_in_a_fraction_of_the_rows(tokenizer):
    """Several in a row change the same rows, and more tokens of most of them."""
    rows = pack(documents_of(json.dumps(list(range(9999)))), tokenizer, 512)
    some = with_repeats(rows, 0.5)
    once, thrice = (with_repeats(rows, 0.5, per_row=n).tokens != rows.tokens for n in (1, 3))
    changed = once.any(1)
    assert torch.equal(some.tokens != rows.tokens, once)
    assert 0.25 < changed.float().mean() < 0.75
    assert torch.equal(changed, thrice.any(1))
    assert (thrice.sum(1) > once.sum(1))[changed].float().mean() > 0.8
    assert thrice.sum() > 1.5 * once.sum()
    assert with_repeats(rows, 0.0) is rows


def test_examples_are_read(tmp_path):
    """As JSON, which has its fields in one order."""
    (tmp_path / "a.jsonl").write_text('{"n": 1, "prompt": "x", "completion": "y"}')
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    (tmp_path / "c.jsonl").write_text('{"text": "x", "prompt": "y"}')

    def read(name):
        return load_documents([tmp_path / name], RowOptions(), None, examples=True)["text"][0]

    assert read("a.jsonl") == '{"completion": "y", "prompt": "x"}'
    assert json.loads(read("b.jsonl"))["messages"][0]["role"] == "user"
    with pytest.raises(
        DataError,
        match=r"lacks 'prompt' and 'completion', .* fields: prompt, text|"
        r"lacks 'prompt' and 'completion', .* fields: text, prompt",
    ):
        read("c.jsonl")
    one = documents_of("an example")
    with pytest.raises(DataError, match="One example cannot be both"):
        split_documents(one, cut=False)
