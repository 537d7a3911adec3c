"""Entropy of heads over the steps of a run."""

import pytest
import torch
from transformers import BertConfig, BertModel

import attnzoo
from attnzoo.training.head_entropy import HEADS, entropy_plots, head_entropies
from attnzoo.training.json_lines import read_lines
from attnzoo.training.loop import LoopConfig
from attnzoo.training.recover import RecoverConfig, recover
from attnzoo.training.transfer import Transfer


def eager_entropies(model, inputs):
    """Entropies in bits of transformers' own attention weights, by layer and head."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    found = []
    for weights in attentions:
        weights = weights.double().transpose(0, 1)[:, real]  # [H, N, S]
        bits = -(weights * weights.clamp_min(1e-300).log2()).sum(-1)
        found.append(bits.mean(1).tolist())
    return found


def test_original_entropies_are_those_of_eager_attention(model):
    inputs = {"input_ids": torch.randint(3, 300, (2, 24))}
    expected = eager_entropies(model, inputs)
    attnzoo.swap(model, "linear", feature_map="elu+1")
    model.train()
    found = head_entropies(model, inputs, original=True)
    assert model.training
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert torch.tensor(list(found.values())) == pytest.approx(torch.tensor(expected), abs=1e-3)
    # 1 + elu is nearly uniform: about log2 of the number of earlier tokens
    swapped = torch.tensor(list(head_entropies(model, inputs).values()))
    uniform = torch.arange(1.0, 25).log2().mean()
    assert (swapped > 0.7 * uniform).all()
    assert (swapped <= uniform + 1e-3).all()
    assert swapped.mean() > torch.tensor(expected).mean() + 0.1


def test_padding_does_not_count():
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32
    )
    model = BertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    mask = torch.tensor([[1] * 16, [1] * 5 + [0] * 11])
    inputs = {"input_ids": torch.randint(3, 300, (2, 16)), "attention_mask": mask}
    expected = eager_entropies(model, inputs)
    attnzoo.swap(model, "flash")
    for original in (False, True):
        found = head_entropies(model, inputs, original=original)
        assert torch.tensor(list(found.values())) == pytest.approx(torch.tensor(expected), abs=1e-3)


def test_transfer_measures_the_backend_on_softmax_inputs(model, spec):
    inputs = {"input_ids": torch.randint(3, 300, (1, 24))}
    attnzoo.swap(model, spec)
    alone, exact = head_entropies(model, inputs), head_entropies(model, inputs, original=True)
    with Transfer(model) as transfer:
        model(**inputs)
        found = head_entropies(model, inputs)
        assert float(transfer.loss()) > 0
    first, second = found
    assert found[first] == alone[first]  # the same inputs
    assert found[second] != alone[second]
    assert found != exact


def test_layers_without_weights_are_left_out(model):
    attnzoo.swap(model, "gated_linear", gate="matrix", layers={"1": {"backend": "flash"}})
    found = head_entropies(model, {"input_ids": torch.randint(3, 300, (1, 12))})
    assert list(found) == ["model.layers.1.self_attn"]


def config(**options):
    loop = LoopConfig(batch_size=2, checkpoint_every=2, **options)
    return RecoverConfig(row_length=64, transfer_steps=4, distil_steps=2, judged_rows=2, loop=loop)


def test_resumed_run_measures_the_same_heads(saved, text, spec, tmp_path, interrupt):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recover(saved, spec, [text], whole, config(entropy_every=3))
    lines = read_lines(whole / HEADS)
    assert [(line["stage"], line["step"]) for line in lines] == [
        ("softmax", 0),
        *(("transfer", step) for step in (0, 3, 4)),
        *(("distil", step) for step in (0, 2)),
    ]
    assert lines[1]["entropy"] != lines[2]["entropy"]
    assert {len(heads) for line in lines for heads in line["entropy"].values()} == {4}
    assert "Entropy of every head" in (whole / "report.html").read_text()
    for steps, loop in ((4, {"entropy_every": 3}), (5, {})):
        out = tmp_path / f"{parts}{steps}"
        interrupt(steps, recover, saved, spec, [text], out, config(**loop))
        recover(saved, spec, [text], out, config(entropy_every=3), resume=True)
        resumed = read_lines(out / HEADS)
        assert resumed == lines if loop else resumed[-1] == lines[-1]


def test_no_measurements(saved, text, spec, tmp_path):
    recover(saved, spec, [text], tmp_path / "out", config(entropy_every=0))
    assert not (tmp_path / "out" / HEADS).exists()
    assert "Entropy of" not in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(attnzoo.errors.ConfigError, match="entropy_every must be at least 0"):
        config(entropy_every=-1)


def test_a_chart_has_a_line_per_layer():
    lines = [
        {"stage": "softmax", "step": 0, "entropy": {"a": [1.0, 2.0], "b": [3.0]}},
        {"stage": "finetune", "step": 0, "entropy": {"b": [4.0]}},
    ]
    by_layer, by_head = entropy_plots(lines)
    drawn = [list(line.get_ydata()) for line in by_layer.figure.axes[0].lines]
    assert drawn == [[1.5], [3.0, 4.0]]
    assert by_head.figure.axes[0].images[0].get_array().shape == (3, 2)
    assert entropy_plots(lines[:1]) == []
