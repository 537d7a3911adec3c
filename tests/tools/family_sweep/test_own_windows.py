"""Backends with a window in families with windows: one family of each kind of window."""

import warnings
from functools import cache

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnzoo.ops.longformer import api
from tools.family_sweep import record
from tools.family_sweep.check import DIFFERENT, EQUAL, IN_PART, REFUSED
from tools.family_sweep.model_type import build_sensitive_family
from tools.family_sweep.own_windows import SPECS, Reference, own_window_outcome, row_probe

# sliding layers only, some of them, with shared keys, chunks, an encoder; what runs of longformer
FAMILIES = {
    "mistral": (EQUAL, REFUSED),
    "gemma3_text": (EQUAL, IN_PART),
    "llama4_text": (IN_PART, IN_PART),
    "modernbert": (EQUAL, IN_PART),
}
NAMES = ["longformer", "longformer global", "block_sparse", "reformer", "delta"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def reference(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        family = build_sensitive_family(model_type)[0]
    return Reference(family, row_probe(family))


@pytest.mark.filterwarnings('ignore:.*the "else" of the spec')
@pytest.mark.parametrize(
    "model_type",
    [
        *("mistral", "modernbert"),
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("llama4_text", "gemma3_text")),
    ],
)
def test_every_variant_is_equal(model_type):
    stock = reference(model_type)
    assert len(stock.rules) == 8, "four paddings, with positions and without"
    found = {name: own_window_outcome(stock, name) for name in NAMES}
    for name, result in found.items():
        assert result.outcome != DIFFERENT, (name, result.reason)
        if result.outcome != REFUSED:
            assert len(result.checked) == len(stock.rules) + len(stock.in_steps)
    outcomes = tuple(found[name].outcome for name in NAMES[:2])
    assert outcomes == FAMILIES[model_type]


def test_the_comparison_detects_a_window_that_skips_padding(monkeypatch):
    """The window of the model counts it, that of the backend does not."""
    monkeypatch.setattr(api, "has_gaps", lambda _: False)
    found = own_window_outcome(reference("mistral"), "longformer")
    assert found.outcome == DIFFERENT
    assert "inside padding, positions: off by" in found.reason


def test_the_record_agrees():
    if transformers.__version__ not in record.versions():
        pytest.skip(f"there is no record of transformers {transformers.__version__}")
    types = record.read(transformers.__version__)["types"]
    for model_type, outcomes in FAMILIES.items():
        found = types[model_type]["own_windows"]
        assert list(found) == list(SPECS)
        assert tuple(found[name]["outcome"] for name in NAMES[:2]) == outcomes
