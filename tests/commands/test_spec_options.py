"""The syntax of --attention and --layers, and the argument that names a model."""

from pathlib import Path

import pytest
import typer

from attnzoo import AttentionSpec
from attnzoo.commands.option_docs import backend_docs
from attnzoo.commands.options import model_folder, parse_size, spec_of, specs_of
from attnzoo.errors import ConfigError, SpecError
from attnzoo.registry import available_backends


def test_layers_take_options():
    expected = AttentionSpec(
        "longformer", window=[4, 8], layers={"0-1": {"backend": "flash", "options": {"window": 4}}}
    )
    assert spec_of("longformer:window=[4, 8]", ["0-1=flash:window=4"]) == expected
    expected = AttentionSpec("linear", else_={"backend": "flash", "options": {"window": 4}})
    assert spec_of("linear", else_="flash:window=4") == expected


def test_several_attentions():
    names = ["linear:window=8", "flash,softmax"]
    found = specs_of(names, lambda names: [AttentionSpec(name) for name in names])
    assert found == [
        AttentionSpec("linear", window=8), AttentionSpec("flash"), AttentionSpec("softmax")
    ]  # fmt: skip
    assert specs_of(["flash", "linear,all"], lambda names: []) is None
    with pytest.raises(SpecError, match=r"linear,delta:window=32 mixes names and options"):
        specs_of(["linear,delta:window=32"], lambda names: [])
    with pytest.raises(SpecError, match="names no backend"):
        specs_of([","], lambda names: [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linear:window",), "--attention takes NAME:OPTION=VALUE,.*; got 'window'"),
        (("linear:window=4,window=8",), "--attention takes .*; got 'window' twice"),
        (("linear:window=",), "--attention takes .*; got 'window='"),
        (("linear", ["flash"]), "--layers takes LAYERS=NAME"),
        (("linear", ["0=flash:window"]), "layers.'0'. takes"),
    ],
)
def test_incomplete_options_are_refused(arguments, message):
    with pytest.raises(SpecError, match=message):
        spec_of(*arguments)


@pytest.mark.parametrize("name", available_backends())
def test_every_option_is_explained(name):
    docs = backend_docs(name)
    texts = docs["descriptions"]
    missing = [option for option, text in texts.items() if not text]
    assert not missing, f"document these in Attributes of the config of {name}: {missing}"
    summaries = [
        docs["config"],
        *(x for values in docs["choices"].values() for x in values.values()),
    ]
    assert all("arXiv:" in text for text in summaries), summaries
    assert not any("`" in text or "\\" in text for text in [*summaries, *texts.values()])


def test_a_folder_is_itself(tmp_path):
    assert model_folder(str(tmp_path)) == tmp_path
    assert model_folder("no such folder") == Path("no such folder")


def test_an_id_of_the_hub_is_a_folder(tmp_path, monkeypatch):
    """In the Hub's cache, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--model" / "snapshots" / "a"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a")
    assert model_folder("org/model") == snapshot


def test_an_unknown_id_is_refused():
    with pytest.raises(typer.BadParameter, match=r"org/missing' is no folder, and no model"):
        model_folder("org/missing")


def test_sizes():
    given = ("10", "64KiB", "1.5 MiB", "16k", "2GiB")
    assert [parse_size(x, "--x") for x in given] == [10, 2**16, 3 * 2**19, 2**14, 2**31]
    for wrong in ("", "MiB", "-1", "0", "3 apples", "1e3"):
        with pytest.raises(ConfigError, match="--cache-bytes must be a size such as 1MiB"):
            parse_size(wrong, "--cache-bytes")
