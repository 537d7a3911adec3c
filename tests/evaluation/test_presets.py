"""The rows of demo, compare and tasks, and the candidates of a plan, by default."""

import pytest

from attnzoo import tasks
from attnzoo.compare import cases
from attnzoo.errors import UnknownBackendError
from attnzoo.evaluation.models import spec_label
from attnzoo.evaluation.presets import PRESETS, preset_options
from attnzoo.registry import BUILTIN, get_backend
from attnzoo.training.plan import preset_candidates

USE_CASES = {"short", "long", "bidirectional", "from_scratch", "recovery", "tiny"}
DEMO = [
    *("softmax", "flash", "flash window 32", "flash window 32 num_sinks 4"),
    *("block_sparse top_k 10", "delta window 32"),
    *("gated_linear alibi", "gated_linear", "gated_linear window 32"),
    *("linear", "linear hedgehog", "linear hedgehog window 32"),
    *("linformer block 64", "longformer", "performer", "reformer chunk_size 16"),
]
COMPARE = [
    *("softmax", "flash", "flash window 32", "flash window 32 num_sinks 4"),
    "block_sparse window 64 block_size 32",
    "delta window 32",
    *("gated_linear", "gated_linear window 32"),
    *("linear", "linear hedgehog window 32", "linformer num_rows 8 block 256"),
    *("longformer window 512", "performer num_features 128", "reformer num_hashes 4"),
]
TASKS = [
    *("flash", "reformer num_hashes 4 chunk_size 16 window 8", "longformer window 16"),
    *("linear identity normalize False", "gated_linear identity normalize False retnet"),
    *("gated_linear identity normalize False", "delta", "performer num_features 64"),
]


def labels(specs):
    """Return the labels of built-in backends; plugins may be installed."""
    return [spec_label(spec) for spec in specs if spec.default.backend in BUILTIN]


def test_rows():
    assert labels(cases.default_specs(None, use_case="short")) == DEMO
    assert labels(cases.default_specs(None)) == COMPARE
    assert labels(tasks.default_specs()) == TASKS
    encoder = {"linformer num_rows 256", "longformer window 256"}
    assert set(labels(cases.default_specs(None, causal=False))) - set(COMPARE) == encoder


def test_candidates():
    assert preset_candidates() == [
        "longformer:window=128",
        "gated_linear:feature_map=hedgehog,window=32",
        "delta:feature_map=squared_relu,window=32",
        "reformer:chunk_size=16",
    ]
    assert preset_candidates(["linear"]) == ["linear"]  # no preset for recovery: the defaults
    assert preset_candidates(["block_sparse"]) == ["block_sparse:top_k=10"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_options(name):
    assert name in BUILTIN
    assert set(PRESETS[name]) <= USE_CASES
    for use_case, variants in PRESETS[name].items():
        assert variants, use_case
        for options in variants:
            get_backend(name).config_class.from_options(name, options)


def test_presets_of_another_backend_can_be_added(monkeypatch):
    """As a package adds them; without them, its backend is tried with its defaults."""
    assert preset_options("softmax", "long") == ({},)
    monkeypatch.setitem(PRESETS, "softmax", {"long": ({"window": 32},)})
    assert preset_options("softmax", "long") == ({"window": 32},)
    assert "softmax window 32" in labels(cases.default_specs(None))


def test_the_first_use_case_with_an_entry_is_used():
    assert preset_options("longformer", "bidirectional", "long") == ({"window": 256},)
    assert preset_options("performer", "bidirectional", "long") == ({"num_features": 128},)
    assert preset_options("softmax", "short") == ({},)
    with pytest.raises(UnknownBackendError, match="Did you mean 'linear'"):
        preset_options("linaer", "short")
