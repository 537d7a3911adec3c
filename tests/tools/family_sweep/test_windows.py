"""Windows of exact backends against dense masks, in families that once were silently different."""

import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import attnzoo
from attnzoo.backends.parts import exact
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.attention import call
from attnzoo.hf.masks import ModelMask
from attnzoo.testing import ConformanceError, check_generation
from tools.family_sweep import record
from tools.family_sweep.check import DIFFERENT, EQUAL, REFUSED
from tools.family_sweep.model_type import build_sensitive_family
from tools.family_sweep.windows import PADDINGS, SPECS, window_outcome

VARIANTS = {
    *(f"{kind} padding" for kind in PADDINGS),
    *(f"steps, {kind} padding" for kind in PADDINGS),
    *("bool 4-D mask", "float 4-D mask", "steps, bool 4-D mask", "steps, float 4-D mask"),
    *("logits_to_keep=1", "generate"),
}
FAMILIES = ["llama", "mistral", "gpt_oss", "gemma3n_text", "gemma4_text"]
NEW = "gemma4_text"  # computes the last tokens only in layers with the keys of others
FEW = {(NEW, "softmax window sinks"), *((x, "flash window") for x in ("llama", "gpt_oss", NEW))}
EXHAUSTIVE = [pytest.mark.exhaustive]
# The stock cache of a sliding window drops keys, which a 4-D mask may show
NOT_IN_STOCK = {"steps, bool 4-D mask", "steps, float 4-D mask"}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def family(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_sensitive_family(model_type)[0]


def skip_unless_sliced(model):
    if not any(hasattr(type(part), seam.SLICES_QUERIES) for part in model.modules()):
        pytest.skip(f"Gemma 4 computes all tokens in transformers {transformers.__version__}")


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        pytest.param(x, name, marks=[] if (x, name) in FEW else EXHAUSTIVE)
        for x in FAMILIES
        for name in SPECS
    ],
)
def test_every_variant_is_equal(model_type, name):
    """Of Gemma 3n and 4, the last two layers have the keys of the first two."""
    found = window_outcome(family(model_type), name)
    assert (found.outcome, found.reason, found.refused) == (EQUAL, "", {})
    assert {*found.checked} == (VARIANTS if model_type == "llama" else VARIANTS - NOT_IN_STOCK)


@pytest.mark.parametrize(
    "model_type", ["gemma3n_text", pytest.param("gemma4_text", marks=EXHAUSTIVE)]
)
def test_the_keys_of_a_layer_that_keeps_all(model_type):
    """The first two layers keep all keys, and the last two, with their keys, a window."""
    model, layers = family(model_type).model, {"2-3": "flash:window=4"}
    check_generation(model, {"backend": "softmax", "layers": layers})
    layers = {"2-3": "flash:window=4,num_sinks=2"}
    with pytest.raises(UnsupportedError, match=r"drops the first tokens, which num_sinks=2 needs"):
        check_generation(model, {"backend": "softmax", "layers": layers})


@pytest.mark.parametrize(
    ("model_type", "variant", "reason"),
    [
        # its bias is made of the values of the call
        ("doge", "generate", r"bias over 1 keys is given, but there are \d+ tokens so far"),
        pytest.param(
            *("deepseek_v32", "generate", r"holds more than keys and values \(update_indexer\)"),
            marks=EXHAUSTIVE,
        ),
        ("deepseek_v4", "bool 4-D mask", r"model passes \d+ keys, which it made itself"),
    ],
)
def test_what_cannot_be_right_is_refused(model_type, variant, reason):
    found = window_outcome(family(model_type), "flash window")
    assert found.outcome != DIFFERENT, found.reason
    assert variant in found.refused
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found.refused[variant])


@pytest.mark.parametrize(
    ("model_type", "name", "reason"),
    [
        ("t5gemma2", "flash window", "queries have no position among the keys"),
        pytest.param(
            *("inkling2", "softmax window sinks", "whose cache drops the first tokens"),
            marks=EXHAUSTIVE,
        ),
    ],
)
def test_what_cannot_be_right_is_refused_by_swap(model_type, name, reason):
    found = window_outcome(family(model_type), name)
    assert found.outcome == REFUSED
    assert reason in found.reason


def count_in_real_tokens_only(monkeypatch):
    """The model's window too, as before."""
    monkeypatch.setattr(exact, "_windows_differ", lambda *_, **__: False)


def lose_the_positions_of_the_last_queries(monkeypatch):
    rows = ModelMask.__getitem__
    monkeypatch.setattr(
        ModelMask, "__getitem__", lambda self, index: replace(rows(self, index), q_offset=0)
    )


def cut_a_bias_to_the_new_keys(monkeypatch):
    monkeypatch.setattr(
        exact, "_columns", lambda bias, positions, _: None if bias is None else bias[..., -1:]
    )


BREAKS = {
    count_in_real_tokens_only: ("mistral", "inside padding"),
    lose_the_positions_of_the_last_queries: ("gemma4_text", "logits_to_keep=1"),
    cut_a_bias_to_the_new_keys: ("llama", "steps, float 4-D mask"),
}


@pytest.mark.parametrize("change", BREAKS, ids=lambda x: x.__name__)
def test_the_comparison_detects_the_fault(change, monkeypatch):
    model_type, variant = BREAKS[change]
    if variant == "logits_to_keep=1":
        skip_unless_sliced(family(model_type).model)
    change(monkeypatch)
    found = window_outcome(family(model_type), "flash window")
    assert found.outcome == DIFFERENT
    assert variant in found.reason


def test_a_state_before_keys_that_contain_it_is_detected(monkeypatch):
    run = call.run_with_state

    def without_keys_of_others(backend, layer, query, key, value, mask, options):
        if layer.update_pending:
            layer.update(key, value)
        return run(backend, layer, query, key, value, mask, options)

    monkeypatch.setattr("attnzoo.hf.attention.call.run_with_state", without_keys_of_others)
    monkeypatch.setattr(call, "_refuse_count", lambda *_: None)
    with pytest.raises(ConformanceError):
        test_the_keys_of_a_layer_that_keeps_all("gemma3n_text")


def test_the_record_agrees():
    if transformers.__version__ not in record.versions():
        pytest.skip(f"there is no record of transformers {transformers.__version__}")
    types = record.read(transformers.__version__)["types"]
    for model_type in FAMILIES:
        for name in SPECS:
            assert types[model_type]["windows"][name]["outcome"] == EQUAL


@pytest.mark.parametrize(
    ("model_type", "backend"),
    [
        pytest.param(
            x, name, marks=[] if x == NEW and name in ("linear", "block_sparse") else EXHAUSTIVE
        )
        for x in ("gemma3n_text", NEW)
        for name in ("linear", "performer", "block_sparse", "longformer:window=4")
    ],
)
def test_other_backends_with_the_keys_of_another_layer(model_type, backend):
    """Gemma 4 computes the last tokens only in these layers."""
    check_generation(family(model_type).model, {"backend": backend, "else": "softmax"})


def test_gates_need_the_tokens_that_gemma_4_leaves_out():
    model = family("gemma4_text").model
    skip_unless_sliced(model)
    with pytest.raises(UnsupportedError, match=r"only the last tokens in this layer"):
        attnzoo.swap(model, "gated_linear")
    check_generation(family("gemma3n_text").model, {"backend": "gated_linear", "else": "softmax"})
