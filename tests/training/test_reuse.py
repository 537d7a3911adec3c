"""Reuse of transferred layers."""

import json

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.evaluation.rows import Rows
from attnzoo.registry import build_backend
from attnzoo.training.plan import make_plan, read_transferred
from attnzoo.training.planner import SwapPlanner
from attnzoo.training.recover import recover
from tests.training.short_runs import arguments

OPTIONS = {"feature_map": "hedgehog", "window": 4}


def config(out, **changes):
    return arguments(out, **{"transfer_steps": 3, "max_steps": 0, **changes})


@pytest.fixture(scope="module")
def transferred(saved, text, spec, tmp_path_factory):
    """A run of transfer in all layers."""
    out = tmp_path_factory.mktemp("transferred") / "out"
    recover(saved, spec, [text], config(out))
    return out


def extras_of(folder, layer):
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    return model.model.layers[layer].self_attn.attnzoo.state_dict()


def test_layers_in_common_are_reused(saved, text, transferred, tmp_path, attnzoo_command):
    """Layer 0 is taken as it is, layer 1 has other options and is trained."""
    out = tmp_path / "out"
    attnzoo_command(
        *("recover", saved, "--data", text, "--output-dir", out),
        *(
            "--transfer-from",
            transferred,
            "--attention",
            "gated_linear:feature_map=hedgehog,window=4",
        ),
        *("--layers", "1=gated_linear:feature_map=hedgehog,window=6"),
        *("--max-length", 32, "--per-device-train-batch-size", 4, "--transfer-steps", 2),
        *("--max-steps", 0),
    )
    assert [*json.loads((out / "recovery.json").read_text())["losses"]] == ["transfer"]
    expected, found = extras_of(transferred, 0), extras_of(out, 0)
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    expected, found = extras_of(transferred, 1), extras_of(out, 1)
    assert not all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.exhaustive
def test_a_plan_needs_no_transfer(saved, text, spec, transferred, tmp_path):
    """The raw swap is still measured without it; distillation goes on from it and resumes."""
    plan = attnzoo.AttentionSpec("gated_linear", layers={"1": "flash"}, **OPTIONS)
    options = config(tmp_path / "whole", transfer_from=str(transferred), max_steps=3)
    whole = recover(saved, plan, [text], options)
    assert [*whole["losses"]] == ["distil"]
    raw = recover(saved, plan, [text], config(tmp_path / "raw", transfer_steps=0))
    assert whole["lines"]["raw swap"] == raw["lines"]["raw swap"] == raw["lines"]["result"]


def test_what_cannot_be_reused_is_refused(saved, text, spec, transferred, tmp_path):
    other = attnzoo.AttentionSpec("gated_linear", feature_map="hedgehog", window=8)
    args = config(tmp_path / "a", transfer_from=str(transferred))
    with pytest.raises(SpecError, match="has the backend and the options of this swap"):
        recover(saved, other, [text], args)
    changed = hf.AutoModelForCausalLM.from_pretrained(transferred)
    with torch.no_grad():
        changed.model.norm.weight.add_(1)
    changed.save_pretrained(tmp_path / "changed")
    options = config(tmp_path / "b", transfer_from=str(tmp_path / "changed"))
    with pytest.raises(SpecError, match="has other weights than the model"):
        recover(saved, spec, [text], options)


@torch.no_grad()
def test_a_plan_ranks_layers_after_transfer(saved, transferred, tmp_path):
    """The KL of each layer is that of the trained layers in the run's folder, in float64."""
    rows = torch.randint(3, 300, (4, 40), generator=torch.Generator().manual_seed(2))
    far = hf.AutoModelForCausalLM.from_pretrained(transferred, dtype=torch.float32)
    for name, parameter in far.named_parameters():
        if ".attnzoo." in name:  # as a long transfer would leave them
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    far.save_pretrained(tmp_path)
    found = read_transferred(tmp_path)
    raw = hf.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    exact = raw(rows).logits.double().log_softmax(-1)
    planner = SwapPlanner(raw, Rows.of_documents(rows), found)
    for measure in planner.measure([0, 1], [found.name]):
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        layer = model.model.layers[1 - measure["layer"]].self_attn
        layer.attnzoo = build_backend("softmax", {}, layer.attnzoo.geometry)
        logits = model(rows, use_cache=False).logits.double().log_softmax(-1)
        expected = float((exact.exp() * (exact - logits)).sum(-1).mean())
        assert measure["alone"][found.name] == pytest.approx(expected, rel=1e-3)
    raw_kl = SwapPlanner(raw, Rows.of_documents(rows)).divergence({0: found.name})
    assert (
        abs(raw_kl - planner.divergence({0: found.name})) > 2e-3 * raw_kl
    )  # beyond the tolerance above


def test_plan_from_a_run_by_the_command(
    saved, text, transferred, tmp_path, attnzoo_command, capsys
):
    out = tmp_path / "plan.json"
    attnzoo_command(
        *("plan", saved, "--data", text, "--output-file", out, "--from", transferred, "--rows", 2),
        *("--candidate", "longformer:window=16", "--max-length", 64, "--keep-softmax", 0),
    )
    plan = json.loads(out.read_text())
    assert plan["candidates"][0]["name"].startswith("gated_linear:")
    assert plan["transfer_from"] == str(transferred)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"--transfer-from {transferred}" in shown


def test_untrained_layers_are_not_compared_with_trained_ones(saved, transferred, text, tmp_path):
    rows = torch.randint(3, 300, (2, 40))
    found = read_transferred(transferred)
    with pytest.raises(SpecError, match="'delta:window=4' has parameters that are not trained"):
        make_plan(saved, Rows.of_documents(rows), ["delta:window=4"], transferred=found)
    with pytest.raises(SpecError, match="has other weights than the model"):
        make_plan(saved, Rows.of_documents(rows), [], transferred=found._replace(weights="0"))
    part = tmp_path / "part"
    spec = attnzoo.AttentionSpec("gated_linear", layers={"1": "flash"}, **OPTIONS)
    recover(saved, spec, [text], config(part, transfer_steps=0))
    with pytest.raises(SpecError, match="does not have one attention with parameters in all"):
        read_transferred(part)


def test_layers_as_a_swap_starts_are_not_taken_as_trained(saved, text, spec, tmp_path):
    """Also in weights of 16 bits, to which the folder rounds what the swap adds."""
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        model = hf.AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
        attnzoo.swap(model, spec).save_pretrained(folder)
        with pytest.raises(SpecError, match="are as a swap starts, not trained"):
            read_transferred(folder)
    args = config(tmp_path / "out", transfer_from=str(tmp_path / "torch.float32"))
    with pytest.raises(SpecError, match="are as a swap starts, not trained"):
        recover(saved, spec, [text], args)
