"""The record as a file, and the documentation that is generated from it."""

from pathlib import Path

from tools.family_sweep import output, record
from tools.family_sweep.__main__ import merge

ROOT = Path(__file__).resolve().parents[3]


def test_page_and_readme_agree_with_the_record():
    found = record.read()
    hint = "run: python -c 'from tools.family_sweep.output import write_pages; write_pages()'"
    assert (ROOT / "docs" / "families.md").read_text("utf-8") == output.page(found), hint
    readme = (ROOT / "README.md").read_text("utf-8")
    assert output.update_readme(readme, found) == readme, hint
    assert record.summary(found) in readme


def test_a_written_record_is_read_back(tmp_path, monkeypatch):
    found = record.read()
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(output, "FOLDER", tmp_path)
    output.write_record(found)
    assert record.read() == found
    assert record.versions() == [found["transformers"]]


def test_an_update_replaces_the_backends_that_were_checked():
    old = {"outcome": "checked", "backends": {"linear": {"outcome": "runs"}}}
    new = {"outcome": "checked", "backends": {"delta": {"outcome": "refused"}}}
    recorded = {"transformers": "5.0.0", "types": {"a": old, "b": {"outcome": "not built"}}}
    merged = merge(recorded, {"types": {"a": new, "b": new}})
    assert list(merged["types"]["a"]["backends"]) == ["linear", "delta"]
    assert merged["types"]["b"] == new
    assert merged["transformers"] == "5.0.0"
    assert recorded["types"]["a"] == old
