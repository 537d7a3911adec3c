"""Documents and examples: what is read, held out, tokenized and packed."""

import copy
import hashlib
import json
import random
from itertools import accumulate

import datasets
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

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
    pack_examples,
    split_documents,
    tokenize_example,
    with_repeats,
)

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} </end>{% endgeneration %}{% else %}{{ m.content }} </end>{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
CHAT = [
    {"role": "user", "content": "two plus two"},
    {"role": "assistant", "content": "is four"},
    {"role": "user", "content": "and three"},
    {"role": "assistant", "content": "is seven"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return hf.AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="module")
def chat_tokenizer():
    words = [
        "<unk>",
        "<user>",
        "<assistant>",
        "</end>",
        "two",
        "plus",
        "is",
        "four",
        "and",
        "three",
        "seven",
    ]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</end>", chat_template=TEMPLATE
    )


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
    written = {"a[1].txt": "one", "a1.txt": "two", "s*.txt": "three", "x:2": "four"}
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    assert sorted(texts([tmp_path])) == sorted(written.values())
    assert texts([tmp_path / "s*.txt"]) == ["three"]
    assert texts([tmp_path / "x:2"]) == ["four"]  # no weight


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


def test_sources_are_mixed_by_their_weights(tmp_path, tokenizer):
    """In the same order every time, without a second copy of a document, also in a stream."""
    for name in "ab":
        lines = (f'{{"text": "{name}{i}", "{name}": 1}}\n' for i in range(400))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = [f"{tmp_path}/a.jsonl:3", f"{tmp_path}/b.jsonl:1"]
    found = texts(sources)
    assert len(set(found)) == len(found)
    of_a = [x for x in found if x[0] == "a"]
    assert of_a == [f"a{i}" for i in range(400)]  # until it has no more, in its own order
    share = len(of_a) / len(found)
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / len(found)) ** 0.5
    first = load_documents(sources, RowOptions(max_tokens="1k"), tokenizer)
    sizes = accumulate(len(tokenizer(x, add_special_tokens=False)["input_ids"]) for x in found)
    count = next(n for n, size in enumerate(sizes, 1) if size >= 1000)
    assert list(first["text"]) == found[:count]
    for weights in ([":0.5", ""], [":0.5"], [":0", ":1"]):
        given = [f"{tmp_path}/{name}.jsonl{x}" for name, x in zip("ab", weights, strict=False)]
        with pytest.raises(DataError, match="each with a weight above 0"):
            texts(given)


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


def test_messages_of_the_assistant_have_labels(chat_tokenizer):
    """The mask is the one that transformers computes from a template with ``generation``."""
    found = tokenize_example({"messages": CHAT}, chat_tokenizer)
    ids, labels = found["input_ids"], found["labels"]
    answers = chat_tokenizer("is four </end> is seven </end>", add_special_tokens=False)
    assert [x for x in labels if x != IGNORE_INDEX] == answers["input_ids"]
    assert all(x in (IGNORE_INDEX, y) for x, y in zip(labels, ids, strict=True))
    parts = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    last = ids.index(chat_tokenizer.convert_tokens_to_ids("seven")) - 1  # "is seven </end>"
    expected = [IGNORE_INDEX] * last + ids[last:]
    assert tokenize_example(parts, chat_tokenizer) == {"input_ids": ids, "labels": expected}


def test_prompts_and_completions_as_strings(tokenizer, chat_tokenizer):
    """A token that merges the end of a prompt with the completion is predicted too."""
    found = tokenize_example({"prompt": "ab", "completion": "cd"}, tokenizer)
    a = ord("a") + 3  # ByT5's bytes begin at 3, and 1 is its end token
    assert found == {
        "input_ids": [a, a + 1, a + 2, a + 3, 1],
        "labels": [IGNORE_INDEX, IGNORE_INDEX, a + 2, a + 3, 1],
    }
    found = tokenize_example({"prompt": "two pl", "completion": "us is"}, chat_tokenizer)
    ids = chat_tokenizer("two plus is </end>", add_special_tokens=False)["input_ids"]
    assert found == {"input_ids": ids, "labels": [IGNORE_INDEX, *ids[1:]]}


def test_what_marks_no_answer_is_refused(tokenizer, chat_tokenizer, tmp_path):
    with pytest.raises(DataError, match="tokenizer has no chat template"):
        tokenize_example({"messages": CHAT}, tokenizer)
    plain = copy.deepcopy(chat_tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    with pytest.raises(DataError, match=r"no \{% generation %\} around the assistant's messages"):
        tokenize_example({"messages": CHAT}, plain)
    examples = documents_of(json.dumps({"messages": CHAT[:1]}))
    with pytest.raises(DataError, match="in which the assistant answers"):
        pack_examples(examples, chat_tokenizer, 64)
    (tmp_path / "a.jsonl").write_text('{"text": "x", "prompt": "y"}')
    with pytest.raises(
        DataError, match=r"lacks 'prompt' and 'completion', .* fields: text, prompt"
    ):
        texts([tmp_path / "a.jsonl"], completion_only_loss=True)


def test_rows_hold_whole_examples(tokenizer):
    pairs = [("a", "b" * 9), ("cc", "dd"), ("e", "f")]
    lines = (json.dumps({"prompt": p, "completion": c}) for p, c in pairs)
    rows = pack_examples(examples := documents_of(*lines), tokenizer, 10)
    first, second = (tokenizer.decode(row) for row in rows.tokens)
    assert first == "a" + "b" * 9  # cut: its end token is left out
    assert second.startswith("ccdd</s>ef</s>")
    assert rows.positions[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    labels = rows[1]["labels"]
    assert (labels != IGNORE_INDEX).tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 0, 0]
    assert rows.ends.tolist() == [10, 8]
    assert rows.shortened == 1
    assert len(rows.stream) == 18
    assert rows.bytes_per_token == 12 / 14  # ends have no bytes
    with pytest.raises(DataError, match="No example has a completion to train on within 1 tokens"):
        pack_examples(examples, tokenizer, 1)


def test_examples_are_loaded(saved, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(f'{{"prompt": "{n}: ", "completion": "ab"}}' for n in range(60)))
    options = RowOptions(completion_only_loss=True, max_length=32, repeat_share=None)
    train, held_out = load_rows(saved, [file], options)
    assert (train.labels != IGNORE_INDEX).sum() == 57 * 3
    assert (held_out.labels != IGNORE_INDEX).sum() == 3 * 3
    file.write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(DataError, match="One example cannot be both"):
        load_rows(saved, [file], options)
