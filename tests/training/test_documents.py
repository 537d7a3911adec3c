"""Documents of files, folders and data sets, and the split into training and held-out ones."""

import hashlib

import datasets
import pytest

from attnzoo.training import documents
from attnzoo.training.documents import DataError, read_documents, split_documents


def texts(*arguments):
    return list(read_documents(*arguments)["text"])


def test_read_documents_of_every_format(tmp_path):
    import datasets

    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x", "n": 1}\n{"text": "y", "n": 2}\n')
    datasets.Dataset.from_dict({"text": ["p", "q"]}).to_parquet(tmp_path / "c.parquet")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").write_bytes(b"\xff\xfe")
    assert texts([tmp_path]) == ["x", "y", "p", "q", "one\ntwo\n"]
    (tmp_path / "d.jsonl").write_text('{"body": "z"}\n')
    assert texts([tmp_path / "d.jsonl"], "body") == ["z"]


def test_local_files_are_read_without_requests_to_the_hub(tmp_path, monkeypatch):
    import datasets.load

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    requests = []
    monkeypatch.setattr(datasets.load, "get_session", lambda: requests.append("session"))
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.jsonl").write_text('{"text": "y"}\n')
    assert texts([tmp_path]) == ["x", "y"]
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


def test_names_of_files_are_not_patterns(tmp_path):
    written = {"a[1].txt": "one", "a1.txt": "two", "s*.txt": "three", "st.txt": "four"}
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    folder = tmp_path / "x[y]"
    folder.mkdir()
    (folder / "c[2].jsonl").write_text('{"text": "five"}')
    assert sorted(texts([tmp_path])) == sorted([*written.values(), "five"])
    assert texts([tmp_path / "s*.txt"]) == ["three"]
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
    assert sorted(texts([data])) == ["one", "two"]


def test_empty_files_beside_others_are_left_out(tmp_path):
    for name, text in (("__init__.py", ""), ("a.txt", "one"), ("z.txt", "\n")):
        (tmp_path / name).write_text(text)
    assert texts([tmp_path]) == ["one"]


def test_data_sets_are_read(tmp_path, monkeypatch):
    made = datasets.Dataset.from_dict({"body": ["x", " ", "y"], "n": [1, 2, 3]})
    made.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=made.select([2]), test=made).save_to_disk(tmp_path / "dict")
    assert texts([tmp_path / "saved"], "body") == ["x", "y"]
    assert texts([tmp_path / "dict", tmp_path / "saved"], "body") == ["y", "x", "y"]
    with pytest.raises(DataError, match=r"saved' has no text field 'text' .*: body"):
        texts([tmp_path / "saved"])
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return made

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts(["owner/name:config", "owner/name"], "body") == ["x", "y"] * 2
    assert asked == [(("owner/name", config), {"split": "train"}) for config in ("config", None)]


@pytest.mark.parametrize("name", ["owner/no-such-data-set", "owner/name:config"])
def test_an_unknown_data_set_is_refused(name):
    with pytest.raises(DataError, match=f"no file or folder '{name}', and no data set of the Hub"):
        read_documents([name])


def test_a_file_that_changes_is_read_again(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}')
    assert texts([file]) == ["one"]
    reads, read = [], documents.rows_in
    monkeypatch.setattr(documents, "rows_in", lambda path: reads.append(path) or read(path))
    assert texts([file]) == ["one"]
    assert not reads
    file.write_text('{"text": "other"}')
    assert texts([file]) == ["other"]
    assert reads == [file]


def split(given):
    entries = [documents.entry_of(text) for text in given]
    made = datasets.Dataset.from_list(entries, features=documents.text_features())
    return tuple(list(part["text"]) for part in split_documents(made))


def test_held_out_documents_do_not_depend_on_their_order():
    given = [f"text number {n}" for n in range(60)] + ["text number 7"] * 3
    train, held_out = split(given)
    ranked = sorted(given, key=lambda text: hashlib.sha256(text.encode()).digest())
    assert held_out == [text for text in given if text in set(ranked[:3])]
    assert train == [text for text in given if text not in set(ranked[:3])]
    assert set(split(given[::-1])[1]) == set(held_out)
    assert split(["0123456789"]) == (["012345678"], ["9"])
    assert split(["0123456789"] * 2) == (["012345678"], ["9"])


def test_sources_are_mixed_by_their_weights(tmp_path):
    """In the same order every time, without a second copy of a document."""
    for name, count in (("a", 400), ("b", 400)):
        lines = (f'{{"text": "{name}{i}"}}\n' for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = [f"{tmp_path}/a.jsonl:3", f"{tmp_path}/b.jsonl:1"]
    found = texts(sources)
    assert found == texts(sources)
    assert len(set(found)) == len(found)
    of_a = [x for x in found if x[0] == "a"]
    assert of_a == [f"a{i}" for i in range(400)]  # until it has no more, in its own order
    share = len(of_a) / len(found)
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / len(found)) ** 0.5
    train, held_out = split_documents(read_documents(sources))
    assert len(train) + len(held_out) == len(found)


def test_a_path_that_looks_weighted_is_a_path(tmp_path):
    (tmp_path / "x:2").write_text("one")
    assert texts([tmp_path / "x:2"]) == ["one"]


@pytest.mark.parametrize("weights", [[":0.5", ""], [":0.5"], [":0", ":1"]])
def test_invalid_mixtures_are_refused(tmp_path, weights):
    paths = []
    for number, weight in enumerate(weights):
        (tmp_path / f"{number}.txt").write_text("x")
        paths.append(f"{tmp_path}/{number}.txt{weight}")
    with pytest.raises(DataError, match="each with a weight above 0, got"):
        read_documents(paths)
