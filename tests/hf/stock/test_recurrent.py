"""Students of stock classes: full layers bit for bit, recurrent layers against our delta rule."""

import copy
import inspect
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from transformers.models.qwen3_5 import modeling_qwen3_5

import attnzoo
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf.models.speed_up import RULES
from attnzoo.hf.stock import recurrent
from attnzoo.hf.stock.convert import convert_files
from attnzoo.ops.delta.api import delta_attention
from tests.hf.stock.test_convert import (
    SOME,
    TOKENS,
    generate_elsewhere,
    logits,
    model_of,
    run,
    save,
)

CLASS = "qwen3_5_text"


@pytest.fixture(autouse=True)
def torch_functions(monkeypatch):
    """Let stock layers run torch's functions where flash-linear-attention is installed."""
    for rule in RULES:
        if hasattr(modeling_qwen3_5, rule):
            function = inspect.unwrap(getattr(modeling_qwen3_5, rule))
            monkeypatch.setattr(modeling_qwen3_5, rule, function)


def test_full_layers_move_bit_for_bit():
    model = model_of("qwen3", attention_bias=True)
    student = attnzoo.convert(model, CLASS)
    assert student.config.layer_types == ["full_attention"] * 3
    assert torch.equal(logits(student), logits(model))


def delta_rule(layer, hidden):
    """Return the output of a recurrent layer in float64, by our reference of the delta rule."""
    w = {name: x.double() for name, x in layer.state_dict().items()}
    hidden = hidden.double()
    length = hidden.shape[1]
    mixed = F.pad(hidden @ w["in_proj_qkv.weight"].T, (0, 0, 3, 0))
    taps = w["conv1d.weight"][:, 0]
    mixed = F.silu(sum(mixed[:, i : i + length] * taps[:, i] for i in range(4)))
    heads = layer.num_v_heads
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in mixed.split(sizes, 2))
    beta, rate = (hidden @ w[f"in_proj_{x}.weight"].T for x in "ba")
    log_decay = -w["A_log"].exp() * F.softplus(rate + w["dt_bias"])
    options = {"scale": q.shape[3] ** -0.5, "normalize_qk": True, "impl": "reference"}
    found = delta_attention(
        *(q, k, v, beta.sigmoid().transpose(1, 2)),
        log_decay=log_decay.transpose(1, 2),
        **options,
    )
    out = found.out.transpose(1, 2)
    out = out * (out.square().mean(3, keepdim=True) + layer.layer_norm_epsilon).rsqrt()
    gate = F.silu((hidden @ w["in_proj_z.weight"].T).unflatten(2, (heads, -1)))
    return (out * w["norm.weight"] * gate).flatten(2) @ w["out_proj.weight"].T


def test_recurrent_layers_compute_our_delta_rule():
    student = attnzoo.convert(model_of("qwen3"), CLASS, recurrent="1-2")
    assert student.config.layer_types == ["full_attention", *["linear_attention"] * 2]
    expected = logits(student)
    errors = []
    for layer in recurrent.recurrent_layers(student).values():

        def hook(layer, args, kwargs, output):
            exact = delta_rule(layer, kwargs["hidden_states"])
            errors.append((output - exact).abs().max().item() / exact.abs().max().item())
            return exact.to(output.dtype)

        layer.register_forward_hook(hook, with_kwargs=True)
    found = logits(student)
    assert len(errors) == 2
    assert max(errors) < 5e-5
    assert (found - expected).abs().max() < 5e-5 * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_softmax_layers_of_a_student_are_those_of_the_model():
    """With softmax's outputs in place of those of the recurrent layers, logits are equal."""
    model = model_of("qwen3")
    student = attnzoo.convert(model, CLASS, recurrent="0,2")
    inputs = recurrent.measure_layers(model, [0, 2], TOKENS)
    with recurrent.replaced_outputs(student, inputs):
        assert torch.equal(logits(student), logits(model))
    assert not torch.equal(logits(student), logits(model))


def test_starting_values():
    """Decays are spread over the heads, SiLU(z) is about 1, and keys have both signs of each."""
    model = model_of("qwen3")
    student = attnzoo.convert(model, CLASS, recurrent="1")
    layer = recurrent.recurrent_layers(student)[1]
    taps = layer.conv1d.weight
    assert torch.equal(taps, F.pad(torch.ones_like(taps[..., :1]), (3, 0)))  # the token itself
    rates = layer.A_log.exp() * F.softplus(layer.dt_bias)
    torch.testing.assert_close(rates[[0, -1]], torch.tensor([1 / 512, 1 / 4]))
    assert (rates.diff() > 0).all()
    tokens = recurrent.sample_tokens(model)
    assert tokens.shape == recurrent.CALIBRATION
    assert torch.equal(tokens, recurrent.sample_tokens(model))
    measured = recurrent.measure_layers(model, [1], tokens)[1]
    with torch.no_grad():
        gate = F.silu(layer.in_proj_z(measured.hidden))
        out = layer(measured.hidden.view(*tokens.shape, -1))
    assert 0.7 < gate.mean() < 1.1
    first, second = layer.in_proj_qkv.weight[:64].view(4, 2, 8, 32).unbind(1)  # queries
    assert torch.equal(first, -second)
    w = model.model.layers[1].self_attn.q_proj.weight.view(4, 8, 32)
    w = w * model.model.layers[1].self_attn.q_norm.weight[:, None]
    torch.testing.assert_close(F.normalize(first, dim=(1, 2)), F.normalize(w, dim=(1, 2)))
    sizes = [x.square().mean().sqrt() for x in (out, measured.out)]
    assert 0.5 < sizes[0] / sizes[1] < 2


REFUSED = {
    "no norms of heads": ("llama", {}, CLASS, "1", "does not hold the weights of llama"),
    "no states": ("qwen3", {}, "qwen3", "1", "no recurrent layers. Classes that have them: qwen3_"),
    "no states, llama": ("llama", {}, "qwen2", "1", "qwen3_5_text has them, but takes qwen3 only"),
    "biases": ("qwen3", {"attention_bias": True}, CLASS, "1", "attention_bias"),
    "another activation": ("qwen3", {"hidden_act": "gelu"}, CLASS, "1", "hidden_act='gelu'"),
    "positions": (
        "qwen3",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        CLASS,
        None,
        "RoPE of type 'linear'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_class_lacks_is_refused(name):
    family, changes, to, layers, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        attnzoo.convert(model_of(family, **changes), to, recurrent=layers)


def test_windows_are_refused_with_the_classes_that_have_them():
    with pytest.raises(UnsupportedError, match=r"no windows\. Classes that can: qwen3, mellum"):
        attnzoo.convert(model_of("qwen3"), CLASS, SOME)


def test_norms_that_lose_bits_are_refused():
    model = model_of("qwen3")
    attnzoo.convert(copy.deepcopy(model).bfloat16(), CLASS)  # from 1/2 on, w - 1 is exact
    model.model.norm.weight.data[0] = 0.0502
    attnzoo.convert(model, CLASS)
    with pytest.raises(UnsupportedError, match=r"too few bits in\s+model.norm.weight; load"):
        attnzoo.convert(model.bfloat16(), CLASS)


@pytest.mark.parametrize(("layers", "message"), [("3", "there are 3"), ("0-2", "at least one")])
def test_layers_that_cannot_be_recurrent(layers, message):
    with pytest.raises(SpecError, match=message):
        recurrent.parse_recurrent(layers, SimpleNamespace(num_hidden_layers=3))


def test_command(tmp_path, monkeypatch, capsys, fresh_python):
    """The student runs where attnzoo cannot be imported, and its card says what it is."""
    source, out = tmp_path / "source", tmp_path / "out"
    save(model_of("qwen3", vocab_size=384), source)
    given = ("convert", source, "--to", CLASS, "--recurrent", "1", "--out", out)
    assert run(monkeypatch, *given) == 0
    assert "full, recurrent, full" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    card = (out / "README.md").read_text()
    assert "**Experimental.**" in card
    assert "| 1 | Gated DeltaNet, a state |" in card
    student = attnzoo.speed_up(hf.AutoModelForCausalLM.from_pretrained(out))
    expected = student.generate(TOKENS, max_new_tokens=8, do_sample=False)
    # fla needs a GPU
    assert generate_elsewhere(fresh_python, out, "attnzoo", "fla") == expected.tolist()


def test_a_folder_of_full_layers_is_no_experiment(tmp_path):
    save(model_of("qwen3", vocab_size=384), tmp_path / "source")
    layers = convert_files(tmp_path / "source", CLASS, tmp_path / "out")
    assert layers == ["full"] * 3
    assert "Experimental" not in (tmp_path / "out" / "README.md").read_text()
