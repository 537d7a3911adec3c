"""Negative controls: the sweep reports a backend that ignores an argument as different."""

from dataclasses import replace

import pytest
import torch

import attnzoo.backends.softmax
from tools.family_sweep.build import NotBuiltError, build_family, make_model
from tools.family_sweep.check import check
from tools.family_sweep.controls import distance, insensitive_parts
from tools.family_sweep.sweep import check_in, new_worker


def spoiled(**changes):
    """Return softmax attention that replaces some of its arguments."""
    right = attnzoo.backends.softmax.softmax_attention

    def wrong(q, k, v, **given):
        return right(q, k, v, **{**given, **changes})

    return wrong


@pytest.mark.parametrize(
    ("model_type", "ignored", "seen_in"),
    [
        ("gpt_oss", "sinks", "plain"),
        ("gemma2", "softcap", "plain"),
        ("t5", "bias", "plain"),
        ("granite", "scale", "plain"),
        ("llama", "mask", "plain"),
        ("bert", "mask", "left padding"),
    ],
)
def test_what_is_ignored_shows(model_type, ignored, seen_in, monkeypatch):
    family = build_family(model_type)
    assert check(family, "softmax").outcome == "equal"
    wrong = spoiled(**{ignored: None})
    monkeypatch.setattr(attnzoo.backends.softmax, "softmax_attention", wrong)
    outcome = check(family, "softmax")
    assert outcome.outcome == "different"
    assert outcome.reason.startswith(seen_in)


def test_an_ignored_window_shows(monkeypatch):
    family = build_family("mistral")
    right = attnzoo.backends.softmax.SoftmaxBackend.compute

    def blind(self, inputs):
        return right(self, inputs._replace(mask=replace(inputs.mask, window=None)))

    monkeypatch.setattr(attnzoo.backends.softmax.SoftmaxBackend, "compute", blind)
    assert check(family, "softmax").outcome == "different"


def test_a_crash_is_no_refusal(monkeypatch):
    def crash(*args, **kwargs):
        raise TypeError("a mistake of ours")

    family = build_family("llama")
    monkeypatch.setattr(attnzoo.backends.softmax, "softmax_attention", crash)
    assert check(family, "softmax").outcome == "failed"


def test_a_layer_that_nobody_would_miss_is_named():
    """With values of zeros, attention adds nothing, whatever it weighs."""
    family = build_family("llama")
    with torch.no_grad():
        family.model.model.layers[1].self_attn.v_proj.weight.zero_()
    family.expected = {key: family.probes[0].plain() for key in [(0, "plain")]}
    assert insensitive_parts(family) == ["layer model.layers.1.self_attn"]


def test_distance():
    x = torch.tensor([1.0, torch.nan, 3.0])
    assert distance([x], [x]) == 0
    assert distance([x], [x.nan_to_num(0)]) == float("inf")
    assert distance([x[:2]], [x]) == float("inf")
    assert distance([torch.tensor([4.0])], [torch.tensor([3.0])]) == pytest.approx(0.25)


def test_what_is_not_built_says_why():
    with pytest.raises(NotBuiltError, match="timm"):
        make_model("timm_backbone", 1.0)
    assert make_model("mamba", 1.0) is None  # it has no attention


@pytest.mark.exhaustive
def test_a_worker_process_is_replaced_after_a_crash():
    worker = new_worker()
    try:
        assert check_in(worker, "no such type", ["softmax"])["outcome"] == "not built"
        entry = check_in(worker, "gpt2", ["softmax"])
        assert entry["backends"]["softmax"]["outcome"] == "equal"
    finally:
        worker.close()
