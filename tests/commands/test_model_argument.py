"""The argument of commands that names a model."""

from pathlib import Path

import pytest

from attnzoo.commands.options import argument_of, model_folder
from attnzoo.errors import SpecError
from attnzoo.evaluation import models
from attnzoo.evaluation.models import embedded_model_path, is_embedded


def test_the_embedded_model_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_folder("embedded") == embedded_model_path()
    assert model_folder("embedded-long") == embedded_model_path("embedded-long")
    assert is_embedded(str(embedded_model_path()))
    assert model_folder("embedded-other") == Path("embedded-other")  # which is not there
    assert not is_embedded("embedded-other")
    for name in ("embedded", "embedded-long", "folder"):
        assert argument_of(model_folder(name)) == name
    (tmp_path / "embedded").mkdir()
    assert argument_of(embedded_model_path()) == str(embedded_model_path())


def test_a_model_that_is_not_installed_is_refused_with_its_place(tmp_path, monkeypatch):
    folders = {**models._EMBEDDED_FOLDERS, "embedded-long": tmp_path / "site-packages" / "none"}
    monkeypatch.setattr(models, "_EMBEDDED_FOLDERS", folders)
    with pytest.raises(SpecError, match="benchmarks/tiny-llama-long in the repository"):
        model_folder("embedded-long")
    assert argument_of(embedded_model_path()) == "embedded"
    assert argument_of(tmp_path) == str(tmp_path)


@pytest.mark.parametrize("name", ["embedded", "./embedded"])
def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "embedded"
    folder.mkdir()
    assert model_folder(name) == folder
    assert not is_embedded(str(model_folder(name)))


@pytest.mark.parametrize("name", ["./nope", "../nope", "./a.b", "nope"])
def test_a_path_is_no_id_of_the_hub(name):
    assert model_folder(name) == Path(name)
