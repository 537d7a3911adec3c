"""Reuse of transferred layers."""

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.recover import RecoverConfig, recover

OPTIONS = {"feature_map": "hedgehog", "window": 4}


def config(**changes):
    loop = LoopConfig(batch_size=4, checkpoint_every=2)
    options = {"transfer_steps": 3, "distil_steps": 0, "row_length": 32, "judged_rows": 2}
    return RecoverConfig(**{**options, **changes}, loop=loop)


@pytest.fixture(scope="module")
def transferred(saved, text, spec, tmp_path_factory):
    """A run of transfer in all layers."""
    out = tmp_path_factory.mktemp("transferred") / "out"
    recover(saved, spec, [text], out, config())
    return out


def extras_of(folder, layer):
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    return model.model.layers[layer].self_attn.attnzoo.state_dict()


def test_layers_in_common_are_reused(saved, text, transferred, tmp_path, attnzoo_command):
    """Layer 0 is taken as it is, layer 1 has other options and is trained."""
    out = tmp_path / "out"
    attnzoo_command(
        *("recover", saved, "--data", text, "--out", out, "--transfer-from", transferred),
        *("--attention", "gated_linear:feature_map=hedgehog,window=4"),
        *("--layers", "1=gated_linear:feature_map=hedgehog,window=6"),
        *("--length", 32, "--batch", 4, "--transfer-steps", 2, "--distil-steps", 0),
    )
    assert [line["stage"] for line in read_losses(out)] == ["transfer", "transfer"]
    expected, found = extras_of(transferred, 0), extras_of(out, 0)
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    expected, found = extras_of(transferred, 1), extras_of(out, 1)
    assert not all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.exhaustive
def test_a_plan_needs_no_transfer(saved, text, spec, transferred, tmp_path, interrupt):
    """The raw swap is still measured without it; distillation goes on from it and resumes."""
    plan = attnzoo.AttentionSpec("gated_linear", layers={"1": "flash"}, **OPTIONS)
    options = config(transfer_from=str(transferred), distil_steps=3)
    whole = recover(saved, plan, [text], tmp_path / "whole", options)
    losses = read_losses(tmp_path / "whole")
    assert [line["stage"] for line in losses] == ["distil"] * 3
    raw = recover(saved, plan, [text], tmp_path / "raw", config(transfer_steps=0))
    assert whole["lines"]["raw swap"] == raw["lines"]["raw swap"] == raw["lines"]["result"]
    interrupt(3, recover, saved, plan, [text], tmp_path / "parts", options)
    parts = recover(saved, plan, [text], tmp_path / "parts", options, resume=True)
    assert read_losses(tmp_path / "parts") == losses
    assert parts["lines"] == whole["lines"]


def test_what_cannot_be_reused_is_refused(saved, text, spec, transferred, tmp_path):
    other = attnzoo.AttentionSpec("gated_linear", feature_map="hedgehog", window=8)
    with pytest.raises(SpecError, match="has the backend and the options of this swap"):
        recover(saved, other, [text], tmp_path / "a", config(transfer_from=str(transferred)))
    changed = hf.AutoModelForCausalLM.from_pretrained(transferred)
    with torch.no_grad():
        changed.model.norm.weight.add_(1)
    changed.save_pretrained(tmp_path / "changed")
    options = config(transfer_from=str(tmp_path / "changed"))
    with pytest.raises(SpecError, match="has other weights than the model"):
        recover(saved, spec, [text], tmp_path / "b", options)
