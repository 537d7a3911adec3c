"""The first documents of large data sets: equal rows, and nothing more is read than is needed."""

from itertools import accumulate

import datasets
import pytest
import transformers as hf

from attnzoo.commands.train_options import token_count
from attnzoo.errors import ConfigError
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.training import streaming
from attnzoo.training.documents import DataError, read_documents
from attnzoo.training.loading import load_rows
from attnzoo.training.streaming import stream_documents
from attnzoo.training.train_config import TrainConfig

TEXTS = [f"document {n} " * (n % 7 + 1) for n in range(900)]
EVERYTHING = 10**9


@pytest.fixture(scope="module")
def tokenizer():
    return hf.AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of shards, as a data set of the Hub has them; tests only read it."""
    path = tmp_path_factory.mktemp("data") / "shards"
    path.mkdir()
    for shard in range(3):
        part = datasets.Dataset.from_dict({"text": TEXTS[300 * shard : 300 * (shard + 1)]})
        part.to_parquet(path / f"part-{shard}.parquet")
    return path


def config(**options):
    return TrainConfig(row_length=64, repeat_share=0.0, **options)


def fingerprints(saved, data, **options):
    return [rows.fingerprint for rows in load_rows(saved, data, "text", config(**options))]


def test_rows_of_a_stream_are_those_of_the_whole(saved, folder, tmp_path, tokenizer):
    """Also where a budget ends it: then they are those of the documents up to there."""
    assert fingerprints(saved, [folder], max_tokens=EVERYTHING) == fingerprints(saved, [folder])
    budget = 20_000
    sizes = accumulate(len(ids) for ids in tokenizer(TEXTS, add_special_tokens=False)["input_ids"])
    count = next(n for n, size in enumerate(sizes, 1) if size >= budget)
    datasets.Dataset.from_dict({"text": TEXTS[:count]}).to_parquet(tmp_path / "first.parquet")
    found = fingerprints(saved, [folder], max_tokens=budget)
    assert found == fingerprints(saved, [tmp_path / "first.parquet"])
    assert found != fingerprints(saved, [folder])


@pytest.mark.parametrize("kind", ["hub", "saved", "file"])
def test_every_source_is_streamed_in_the_order_of_the_whole(
    folder, tmp_path, tokenizer, monkeypatch, kind
):
    (tmp_path / "a.txt").write_text("a file")
    source = {"hub": "owner/name:config", "file": str(folder / "part-1.parquet")}.get(kind)
    expected = ["a file", *(TEXTS[300:600] if kind == "file" else TEXTS)]
    if kind == "saved":
        source = str(tmp_path / "saved")
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(source)
    elif kind == "hub":
        monkeypatch.setattr(
            streaming, "_hub_builder", lambda path: datasets.load_dataset_builder(str(folder))
        )
    # files come before data sets, wherever they are given
    given = [source, tmp_path / "a.txt"] if kind != "file" else [tmp_path / "a.txt", source]
    assert list(stream_documents(given, "text", tokenizer, EVERYTHING)["text"]) == expected
    if kind != "hub":
        assert list(read_documents(given)["text"]) == expected


def test_nothing_is_read_after_the_budget_and_nothing_twice(folder, tokenizer, monkeypatch):
    read, rows_in = [], streaming.rows_in

    def spy(path):
        for row in rows_in(path):
            read.append(path.name)
            yield row

    monkeypatch.setattr(streaming, "rows_in", spy)
    found = stream_documents([folder], "text", tokenizer, 5_000)
    assert sum(len(ids) for ids in found["input_ids"][:-1]) < 5_000
    assert sum(len(ids) for ids in found["input_ids"]) >= 5_000
    assert set(read) == {"part-0.parquet"}
    assert len(read) <= len(found) + streaming.AT_ONCE
    read.clear()
    assert stream_documents([folder], "text", tokenizer, 5_000)._fingerprint == found._fingerprint
    assert not read


def test_a_mixture_begins_as_the_whole_one_does(tmp_path, tokenizer):
    for name in "ab":
        lines = (f'{{"text": "{name}{i}"}}\n' for i in range(400))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = [f"{tmp_path}/a.jsonl:3", f"{tmp_path}/b.jsonl:1"]
    found = list(stream_documents(sources, "text", tokenizer, 1_000)["text"])
    assert len(found) > 200
    assert found == list(read_documents(sources)["text"])[: len(found)]


def test_a_connection_that_breaks_leaves_nothing(folder, tokenizer, monkeypatch):
    class Builder:
        hash = "revision"
        breaks = True

        def as_streaming_dataset(self, split):
            yield from ({"text": text} for text in TEXTS[:500])
            if self.breaks:
                raise ConnectionError("no route to host")

    monkeypatch.setattr(streaming, "_hub_builder", lambda path: Builder())
    with pytest.raises(DataError, match=r"'owner/name' stopped: no route to host.*run the command"):
        stream_documents(["owner/name"], "text", tokenizer, EVERYTHING)
    Builder.breaks = False
    assert len(stream_documents(["owner/name"], "text", tokenizer, EVERYTHING)) == 500


def test_invalid_sources_are_refused(tmp_path, tokenizer):
    with pytest.raises(DataError, match="no data set of the Hub by this name"):
        stream_documents(["owner/no-such-data-set"], "text", tokenizer, 10)
    with pytest.raises(DataError, match="There is no file or folder"):
        stream_documents([tmp_path / "absent.txt"], "text", tokenizer, 10)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(DataError, match="There is no text in"):
        stream_documents([tmp_path / "blank.txt"], "text", tokenizer, 10)
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match="name the field with --column"):
        stream_documents([tmp_path / "a.jsonl"], "text", tokenizer, 10)
    with pytest.raises(ConfigError, match="'completions' reads examples"):
        config(max_tokens=10, train_on="completions")


@pytest.mark.parametrize(
    ("text", "count"), [("300M", 300_000_000), ("1.5k", 1500), ("2b", 2 * 10**9), ("7", 7)]
)
def test_units_of_tokens_are_decimal(text, count):
    assert token_count(text, "--max-tokens") == count


@pytest.mark.parametrize("text", ["0", "0.4", "many", "3 MiB", "-1"])
def test_other_numbers_of_tokens_are_refused(text):
    with pytest.raises(ConfigError, match="--max-tokens must be a number of tokens such as 300M"):
        token_count(text, "--max-tokens")
