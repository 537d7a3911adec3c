"""The record as a file, and the documentation that is generated from it."""

from pathlib import Path

from attnzoo.families import record
from tools.family_sweep import output

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
