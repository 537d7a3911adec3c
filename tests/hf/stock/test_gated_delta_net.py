"""Students of stock classes: full layers bit for bit, recurrent layers against formulas."""

import copy
import json
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import attnzoo
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf.stock import gated_delta_net
from attnzoo.hf.stock.classes import other_config
from attnzoo.hf.stock.convert import convert_files
from attnzoo.ops.delta.api import delta_attention
from tests.byte_tokenizer import save_byte_tokenizer
from tests.helpers import add_noise, run_torch_functions
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
    run_torch_functions(monkeypatch, CLASS)


@pytest.mark.parametrize("tied", [True, False])
def test_full_layers_move_bit_for_bit(tied):
    model = model_of("qwen3", attention_bias=True, tie_word_embeddings=tied)
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


@pytest.mark.parametrize("fast", [False, True])
def test_recurrent_layers_compute_the_formula_of_their_class(fast):
    student = attnzoo.convert(model_of("qwen3"), CLASS, recurrent="1-2")
    assert student.config.layer_types == ["full_attention", *["linear_attention"] * 2]
    layers = gated_delta_net.recurrent_layers(student).values()
    for layer in layers:
        add_noise(layer, 0.1)  # many starting values are 0
    expected = logits(attnzoo.speed_up(student) if fast else student)
    errors = []

    def hook(layer, args, kwargs, output):
        exact = delta_rule(layer, kwargs["hidden_states"])
        errors.append((output - exact).abs().max().item() / exact.abs().max().item())
        return exact.to(output.dtype)

    for layer in layers:
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
    inputs = gated_delta_net.measure_layers(model, [0, 2], TOKENS)
    with gated_delta_net.replaced_outputs(student, inputs):
        assert torch.equal(logits(student), logits(model))
    assert not torch.equal(logits(student), logits(model))


def test_a_student_whose_full_layers_differ_is_refused(monkeypatch):
    weights = gated_delta_net.softmax_weights

    def halved(state, source):
        found = weights(state, source)
        return {name: x / 2 if "down_proj" in name else x for name, x in found.items()}

    monkeypatch.setattr(gated_delta_net, "softmax_weights", halved)
    with pytest.raises(UnsupportedError, match="computes other logits"):
        attnzoo.convert(model_of("qwen3"), CLASS, recurrent="1")


class Start(NamedTuple):
    """An attention layer, that of the student with its starting values, and what they get."""

    own: torch.nn.Module
    layer: torch.nn.Module
    hidden: torch.Tensor  # [N, M]
    heads: torch.Tensor  # the outputs of the heads of softmax, [N, H, D]
    out: torch.Tensor  # [B, T, M]


@cache
def start():
    """Return layer 1 of a model and of its student, measured by hooks of this file."""
    model = model_of("qwen3")
    student = attnzoo.convert(model, CLASS, recurrent="1")
    own, seen = model.model.layers[1].self_attn, {}
    own.register_forward_hook(
        lambda layer, args, kwargs, out: seen.update(hidden=kwargs["hidden_states"], out=out[0]),
        with_kwargs=True,
    )
    own.o_proj.register_forward_pre_hook(lambda layer, args: seen.update(heads=args[0]))
    with torch.no_grad():
        model(gated_delta_net.sample_tokens(model))
    hidden, heads = seen["hidden"].flatten(0, 1), seen["heads"].reshape(-1, 4, 8)
    return Start(own, gated_delta_net.recurrent_layers(student)[1], hidden, heads, seen["out"])


def assert_heads(found, own, part, hidden):
    """Assert that two outputs for each head are a head's projection, but for the size.

    Args:
        found: ``[N, 4, D]``.
        own: The attention layer.
        part: ``"q"``, ``"k"`` or ``"v"``.
        hidden: ``[N, M]``.
    """
    w = getattr(own, f"{part}_proj").weight.view(-1, 8, 32)
    norm = getattr(own, f"{part}_norm", None)  # values have none
    w = w if norm is None else w * norm.weight[:, None]
    w = w.repeat_interleave(4 // len(w), 0)  # of grouped queries
    expected = F.normalize(torch.einsum("hdm,nm->nhd", w, hidden), dim=(0, 2))
    torch.testing.assert_close(F.normalize(found, dim=(0, 2)), expected)


def test_starting_values_of_gated_delta_net():
    """Keys and queries have both signs of each head, values are small and the same in both."""
    at = start()
    layer = at.layer
    taps = layer.conv1d.weight
    assert torch.equal(taps, F.pad(torch.ones_like(taps[..., :1]), (3, 0)))  # the token itself
    with torch.no_grad():
        q, k, v = layer.in_proj_qkv(at.hidden).unflatten(1, (3, 4, 2, 8)).unbind(1)
    for part, found, size, sign in (("q", q, 1.0, -1), ("k", k, 1.0, -1), ("v", v, 0.3, 1)):
        first, second = found.unbind(2)
        assert torch.equal(first, sign * second), part
        torch.testing.assert_close(first.square().mean((0, 2)).sqrt(), torch.full((4,), size))
        assert_heads(first, at.own, part, at.hidden)
    assert not layer.in_proj_b.weight.any()  # write strength 1/2
    assert not layer.in_proj_a.weight.any()  # decays are the same for all tokens
    assert torch.equal(layer.norm.weight, torch.ones(8))


def test_decays_and_gates_of_starting_values():
    """Decays are a geometric series; gates are constant, as far as a projection can be."""
    at = start()
    rates = at.layer.A_log.exp() * F.softplus(at.layer.dt_bias)
    ends = torch.tensor([1 / 512, 1 / 4]).log()
    torch.testing.assert_close(rates.log(), torch.linspace(*ends, 8))
    with torch.no_grad():
        z = at.layer.in_proj_z(at.hidden)
    assert 0.7 < F.silu(z).mean() < 1.1
    x = at.hidden.double()
    target = torch.full((len(x), 1), 1.278465, dtype=x.dtype)  # SiLU of it is 1
    best = x @ torch.linalg.lstsq(x, target).solution
    errors = [(y.double() - target).square().mean() for y in (z, best)]
    assert errors[0] < 1.005 * errors[1]


def test_the_outputs_of_starting_values_have_the_size_of_softmax():
    """Each of two heads has half of the root mean square of its head's outputs."""
    at = start()
    sizes = at.heads.square().mean((0, 2)).sqrt()
    assert sizes.max() > 1.05 * sizes.min()
    expected = at.own.o_proj.weight.view(32, 4, 8) * sizes[:, None] / 2
    first, second = at.layer.out_proj.weight.unflatten(1, (4, 2, 8)).unbind(2)
    torch.testing.assert_close(first, expected)
    assert torch.equal(second, first)
    with torch.no_grad():
        out = at.layer(at.hidden.view(*at.out.shape[:2], -1))
    sizes = [x.square().mean().sqrt() for x in (out, at.out)]
    assert 0.5 < sizes[0] / sizes[1] < 2


def test_sizes_are_measured_on_text_that_the_model_samples():
    """The mean logarithm of the probabilities of samples is minus the mean entropy."""
    model = model_of("llama")
    tokens = gated_delta_net.sample_tokens(model)
    assert tokens.shape == gated_delta_net.CALIBRATION
    assert torch.equal(tokens, gated_delta_net.sample_tokens(model))
    with torch.no_grad():
        chances = model(tokens[:, :-1]).logits.log_softmax(-1)
    excess = chances.gather(2, tokens[:, 1:, None])[..., 0] - (chances.exp() * chances).sum(-1)
    assert excess.mean().abs() < 4 * excess.std() / excess.numel() ** 0.5


@pytest.mark.parametrize(
    ("layers", "interval"), [([1], None), ([1, 2], None), ([0, 2], 2), ([0, 1], 3), ([], 1)]
)
def test_the_period_of_full_layers_is_written_where_there_is_one(layers, interval):
    """llama.cpp reads it in place of the list of layers, and all engines read the sections."""
    config = other_config(model_of("qwen3").config, CLASS, layers).to_dict()
    assert config.get("full_attention_interval") == interval
    assert sum(config["rope_parameters"]["mrope_section"]) == 8 // 2


REFUSED = {
    "no norms of heads": ("llama", {}, CLASS, "1", "weights of llama. Classes that can: llama, mi"),
    "no states": (
        "qwen3",
        {},
        "qwen3",
        "1",
        "no recurrent layers. qwen3_5_text has them, but takes",
    ),
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
        gated_delta_net.parse_recurrent(layers, SimpleNamespace(num_hidden_layers=3))


def test_command(tmp_path, monkeypatch, capsys, fresh_python):
    """The student runs where attnzoo cannot be imported, and its card says what it is."""
    source, out = tmp_path / "source", tmp_path / "out"
    save(model_of("qwen3", vocab_size=384), source)
    save_byte_tokenizer(source)
    given = ("convert", source, "--to", CLASS, "--recurrent", "1", "--output-dir", out)
    assert run(monkeypatch, *given) == 0
    assert "full, recurrent, full" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    card = (out / "README.md").read_text()
    assert "**Experimental.**" in card
    assert "| 1 | Gated DeltaNet, a state |" in card
    assert "convert --to mellum`" in card
    student = attnzoo.speed_up(hf.AutoModelForCausalLM.from_pretrained(out))
    expected = student.generate(TOKENS, max_new_tokens=8, do_sample=False)
    # fla needs a GPU
    assert generate_elsewhere(fresh_python, out, "attnzoo", "fla") == expected.tolist()


def test_a_folder_of_full_layers_is_no_experiment(tmp_path):
    save(model_of("qwen3", vocab_size=384), tmp_path / "source")
    save_byte_tokenizer(tmp_path / "source")
    layers = convert_files(tmp_path / "source", CLASS, tmp_path / "out")
    assert layers == ["full"] * 3
    assert "Experimental" not in (tmp_path / "out" / "README.md").read_text()
