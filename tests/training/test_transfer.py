import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import SpecError
from attnzoo.training.transfer import Transfer, extras, relative_error, swapped_layers
from tests.helpers import MODEL_SIZES

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
OPTIONS = {"feature_map": "hedgehog", "window": 4}


@pytest.mark.parametrize("target", ["output", "attention"])
def test_model_runs_softmax_inside_transfer(model, target):
    exact = model(IDS).logits
    attnzoo.swap(model, "linear", **OPTIONS)
    swapped = model(IDS).logits
    with Transfer(model, target=target):
        torch.testing.assert_close(model(IDS).logits, exact, atol=1e-5, rtol=1e-4)
    assert torch.equal(model(IDS).logits, swapped)
    assert not torch.allclose(swapped, exact, atol=1e-3)


def padded(side):
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    return mask if side == "left" else mask.flip(1)


def run_transfer(model, mask, monkeypatch):
    """Return the errors of a forward pass, and each backend's inputs and own output."""
    seen = {}
    kind = type(next(iter(swapped_layers(model).values())))
    forward = kind.forward

    def keep(backend, *args, **kwargs):
        output = forward(backend, *args, **kwargs)
        seen[backend.geometry.name] = (args, kwargs, output.out)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", keep)
        with Transfer(model) as transfer:  # inputs of later layers come from softmax
            model(IDS, attention_mask=mask)
            return dict(transfer.errors), seen


@pytest.mark.parametrize("side", ["left", "right"])
def test_error_of_each_layer(model, side, monkeypatch):
    """Computed in float64 from the layers' inputs, without padding."""
    mask = padded(side)
    attnzoo.swap(model, "linear", **OPTIONS)
    found, seen = run_transfer(model, mask, monkeypatch)
    assert set(found) == set(seen)
    for name, (args, kwargs, out) in seen.items():
        q, k, v = (x.double() for x in args)
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        see = torch.ones(24, 24, dtype=torch.bool).tril() & mask.bool()[:, None, None]
        scores = (q @ k.mT * kwargs["scale"]).masked_fill(~see, -torch.inf)
        exact = scores.softmax(-1) @ v
        real = mask.bool()[:, None, :, None].expand_as(out)
        error = (out - exact)[real].square().sum() / exact[real].square().sum()
        torch.testing.assert_close(found[name].double(), error, rtol=1e-4, atol=1e-7)
        assert error > 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_divergence_of_attention_weights(model, side, monkeypatch):
    """The mean over the steps that cover all keys equals the divergence of all weights."""
    mask = padded(side)
    attnzoo.swap(model, "linear", **OPTIONS)
    _, seen = run_transfer(model, mask, monkeypatch)
    stride = -(-24 // seen["model.layers.0.self_attn"][0][2].shape[3])
    assert stride > 1
    found = []
    with Transfer(model, target="attention") as transfer:
        for step in range(stride):
            transfer.step = step
            model(IDS, attention_mask=mask)
            found.append(transfer.errors)
            transfer.errors = {}
    for name, backend in swapped_layers(model).items():
        (q, k, v), kwargs, _ = seen[name]
        ours = backend(q, k, v, **{**kwargs, "return_weights": True}).weights.double()
        see = torch.ones(24, 24, dtype=torch.bool).tril() & mask.bool()[:, None, None]
        scores = q.double() @ k.double().repeat_interleave(2, 1).mT * kwargs["scale"]
        exact = scores.masked_fill(~see, -torch.inf).softmax(-1)
        each = torch.where(see, exact * (exact / ours).log() - exact + ours, 0).sum(-1)
        expected = each[mask.bool()[:, None].expand_as(each)].mean()
        mean = torch.stack([errors[name] for errors in found]).double().mean()
        torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(found[0][name], found[1][name], rtol=1e-3)


def test_gradient_of_a_layer_stays_in_its_extras(model):
    attnzoo.swap(model, "linear", **OPTIONS)
    with Transfer(model) as transfer:
        model(IDS)
        transfer.errors["model.layers.1.self_attn"].backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learned == {name for name in extras(model) if "layers.1." in name}


@pytest.mark.parametrize("target", ["output", "attention"])
def test_loss_decreases(model, target):
    attnzoo.swap(model, "linear", **OPTIONS)
    optimizer = torch.optim.Adam(extras(model).values(), lr=0.03)
    losses = []
    with Transfer(model, target=target) as transfer:
        for step in range(40):
            transfer.step = 2 * step
            model(IDS)
            loss = transfer.loss()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_gradient_checkpointing_has_the_same_gradients(model):
    attnzoo.swap(model, "linear", **OPTIONS)
    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        with Transfer(model) as transfer:
            model(IDS, use_cache=False)
            loss = transfer.loss()
            loss.backward()
            assert not transfer.errors  # the recomputation in the backward pass adds none
        gradients.append([loss.detach(), *(p.grad for p in extras(model).values())])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_transfer_of_some_layers(model):
    attnzoo.swap(model, "linear", **OPTIONS)
    with Transfer(model, layers=["model.layers.0.self_attn"]) as transfer:
        model(IDS)
        assert list(transfer.errors) == ["model.layers.0.self_attn"]


def test_transfer_of_an_encoder():
    config = hf.BertConfig(
        **MODEL_SIZES,
        attention_probs_dropout_prob=0.0,
    )
    model = hf.BertModel(config).eval()
    ids = IDS % 99
    exact = model(ids).last_hidden_state
    attnzoo.swap(model, "linear", feature_map="hedgehog")
    with Transfer(model) as transfer:
        torch.testing.assert_close(model(ids).last_hidden_state, exact, atol=1e-5, rtol=1e-4)
        transfer.loss().backward()
    assert all(p.grad.abs().sum() > 0 for p in extras(model).values())


def test_invalid_arguments_are_refused(model):
    with pytest.raises(SpecError, match="is not swapped"):
        Transfer(model)
    attnzoo.swap(model, "linear")
    with pytest.raises(SpecError, match=r"No layer has parameters .*\(linear\)"):
        Transfer(model)
    attnzoo.swap(model, "linear", **OPTIONS)
    with pytest.raises(SpecError, match="'nowhere' is no swapped layer"):
        Transfer(model, layers=["nowhere"])
    with Transfer(model) as transfer, pytest.raises(SpecError, match="needs a forward pass"):
        transfer.loss()
    attnzoo.swap(model, "gated_linear", gate="matrix")
    with pytest.raises(SpecError, match=r"model.layers.0.self_attn.* use target='output'"):
        Transfer(model, target="attention")


def test_relative_error():
    exact = torch.randn(2, 3, 5, 4)
    assert relative_error(exact, exact, None) == 0
    assert relative_error(0.5 * exact, exact, None).item() == pytest.approx(0.25)
    padding = torch.tensor([[True] * 5, [True, True, False, False, False]])
    mask = AttentionMask(causal=True, padding=padding)
    out = exact.clone()
    out[1, :, 2:] = 1e6
    assert relative_error(out, exact, mask) == 0
