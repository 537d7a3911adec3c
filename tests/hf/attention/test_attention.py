"""The attention function: attention weights on request; supported and refused arguments."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.attention.call import attention, pass_hidden_states
from attnzoo.hf.masks import make_mask
from attnzoo.hf.seam import cache_argument, output_cache
from tests.helpers import MODEL_SIZES

SIZES: dict[str, Any] = {**MODEL_SIZES, "max_position_embeddings": 64}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "bert": lambda: hf.BertModel(hf.BertConfig(**SIZES, pad_token_id=0)),
}
BACKENDS = ["softmax", "flash", "linear", "gated_linear", "reformer", "block_sparse"]


@pytest.fixture(params=MODELS)
def model(request, redraw):
    return redraw(MODELS[request.param]())


class Values:
    """Records the values and the output of every attention call."""

    def __init__(self, monkeypatch: Any) -> None:
        self.calls: list[tuple[Any, Any]] = []
        interface = hf.AttentionInterface._global_mapping
        original = interface["attnzoo"]

        def spy(module, query, key, value, mask, **given):
            output = original(module, query, key, value, mask, **given)
            self.calls.append((value, output[0]))
            return output

        monkeypatch.setitem(interface, "attnzoo", spy)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_equal_those_that_layers_apply(backend, model, ids, padding, monkeypatch):
    if backend == "gated_linear" and isinstance(model, hf.BertModel):
        with pytest.raises(UnsupportedError, match="bidirectional"):
            attnzoo.swap(model, backend)
        return
    attnzoo.swap(model, backend)
    seen, mask = Values(monkeypatch), padding("right")
    with torch.no_grad():
        output = model(ids, attention_mask=mask, output_attentions=True)
    assert len(output.attentions) == len(seen.calls) == 2
    for weights, (value, out) in zip(output.attentions, seen.calls, strict=True):
        assert weights.shape == (3, 4, 12, 12)
        value = value.repeat_interleave(4 // value.shape[1], 1)
        real = mask.bool()
        found = (weights @ value).transpose(1, 2)
        assert_close(found[real], out[real], atol=1e-5, rtol=1e-5)
        rows = weights.sum(-1).transpose(1, 2)[real]
        assert_close(rows, torch.ones_like(rows), atol=1e-5, rtol=1e-5)
        assert not weights[:, :, :, 11][1:].any()  # padding gets no weight


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_exact_weights_equal_eager(backend, model, ids, padding):
    model.set_attn_implementation("eager")
    mask = padding("right")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, output_attentions=True).attentions
        attnzoo.swap(model, backend)
        found = model(ids, attention_mask=mask, output_attentions=True).attentions
    real = mask.bool()
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours.transpose(1, 2)[real], theirs.transpose(1, 2)[real])


@pytest.mark.parametrize("backend", ["softmax", "linear"])
def test_no_weights_unless_requested(backend, llama, ids):
    model = llama()
    attnzoo.swap(model, backend)
    assert model(ids, use_cache=False).attentions is None
    layer, q = model.model.layers[0].self_attn, torch.randn(1, 4, 5, 8)
    given = (layer, q, q[:, :2], q[:, :2], None)
    assert attention(*given)[1] is None
    assert attention(*given, output_attentions=True)[1] is not None


def test_unnormalised_rows_do_not_sum_to_one(llama, ids):
    model = llama()
    attnzoo.swap(model, "linear", normalize=False)
    weights = model(ids, output_attentions=True).attentions[0]
    assert (weights.sum(-1) - 1).abs().max() > 0.1


def test_weights_of_a_prompt_but_not_of_a_state(llama, ids):
    model = llama()
    attnzoo.swap(model, "linear")
    output = model(ids, output_attentions=True, use_cache=True)
    assert output.attentions[1].shape == (3, 4, 12, 12)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn.*use_cache=False"):
        model(ids[:, :1], **cache_argument(output_cache(output)), output_attentions=True)


# -- arguments ----------------------------------------------------------------------------------


@pytest.fixture
def layer(llama):
    model = llama()
    attnzoo.swap(model, "flash")
    return model.model.layers[1].self_attn


def test_unknown_arguments_are_refused_by_name(layer):
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn: .*'flash'.*'indexer'"):
        attention(layer, q, q, q, None, indexer=torch.ones(1))
    attention(layer, q, q, q, None, indexer=None, cache_position=torch.arange(5))


def test_unknown_arguments_of_a_model_reach_it(llama, ids):
    model = llama()
    attnzoo.swap(model, "flash")
    with pytest.raises(UnsupportedError, match="'temperature'"):
        model(ids, temperature=2.0)


def test_layer_without_a_backend_raises(llama):
    model = llama()
    attnzoo.swap(model, "flash")
    layer = model.model.layers[0].self_attn
    attnzoo.restore(model)
    with pytest.raises(UnsupportedError, match=r"LlamaAttention .* no backend"):
        attention(layer, *torch.randn(3, 1, 4, 5, 8), None)


@pytest.mark.parametrize("backend", ["flash", "linear"])
def test_autocast(backend, llama, ids, padding):
    model = llama()
    mask = padding("left")
    real = mask.bool()

    def run() -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(ids, attention_mask=mask).logits[real].float()

    with torch.no_grad():
        plain = run()
        exact = model(ids, attention_mask=mask).logits[real]
        attnzoo.swap(model, backend)
        found = run()
        wide = model(ids, attention_mask=mask).logits[real]
    assert found.isfinite().all()
    assert (found - wide).abs().mean() <= 2 * (plain - exact).abs().mean()


def test_cross_attention(redraw, ids):
    config = hf.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    model = redraw(hf.BertModel(config))
    encoded = torch.randn(3, 5, 32)
    with pytest.raises(UnsupportedError, match=r"crossattention.*'gated_linear'.*cross-attention"):
        attnzoo.swap(model, "gated_linear")
    with torch.no_grad():
        expected = model(ids, encoder_hidden_states=encoded).last_hidden_state
        attnzoo.swap(model, "flash")
        found = model(ids, encoder_hidden_states=encoded).last_hidden_state
    assert_close(found, expected, atol=1e-4, rtol=1e-4)
    attnzoo.swap(model, "gated_linear", else_="flash")
    kinds = {name: m.attnzoo.name for name, m in model.named_modules() if hasattr(m, "attnzoo")}
    assert all((kind == "flash") == ("cross" in name) for name, kind in kinds.items())
    with torch.no_grad():
        one = model(ids, encoder_hidden_states=encoded, use_cache=False).last_hidden_state
        first = model(ids[:, :7], encoder_hidden_states=encoded, use_cache=True)
        rest = model(
            ids[:, 7:],
            encoder_hidden_states=encoded,
            **cache_argument(output_cache(first)),
            use_cache=True,
        )
    two = torch.cat([first.last_hidden_state, rest.last_hidden_state], 1)
    assert_close(two, one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("exact", ["softmax", "flash"])
def test_sinks_per_query_are_part_of_the_softmax(exact, llama):
    """Inkling computes a sink's logit from each token; other models have one logit per head."""
    model = llama()
    attnzoo.swap(model, exact)
    layer, q, kv = model.model.layers[0].self_attn, torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    sinks = torch.randn(2, 4, 5, 1)
    mask = make_mask(batch_size=2, q_length=5, kv_length=5)
    out, _ = attention(layer, q, kv, kv, mask, sinks=sinks, scaling=1.0)
    keys = kv.repeat_interleave(2, 1)
    scores = (q @ keys.transpose(2, 3)).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out, (weights @ keys).transpose(1, 2))


def test_two_attention_calls_per_forward_have_no_state():
    config = hf.DiffLlamaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
    )
    model = hf.DiffLlamaForCausalLM(config).eval()
    attnzoo.swap(model, "linear")
    ids = torch.randint(3, 99, (1, 6))
    assert model(ids, use_cache=False).logits.isfinite().all()
    with pytest.raises(UnsupportedError, match="calls its attention more than once"):
        model(ids, use_cache=True)


def test_heads_that_tensor_parallelism_splits_are_refused(llama, monkeypatch):
    """By this reason, and not by the number of heads, which the user has not given."""
    layer = attnzoo.swap(llama(num_key_value_heads=2), "flash").model.layers[0].self_attn
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    q, k = torch.zeros(1, 2, 3, 8), torch.zeros(1, 1, 3, 8)
    with pytest.raises(UnsupportedError, match=r"2 of the layer's 4 heads: tensor parallelism"):
        attention(layer, q, k, k, None)


def test_hidden_states_are_passed_to_another_attention_function(monkeypatch, ids):
    """As engines need them that run the modules with an attention function of their own."""
    found = []

    def other(module, query, key, value, mask, *, hidden_states_of_layer, **given):
        found.append(hidden_states_of_layer)
        return value.transpose(1, 2), None

    monkeypatch.setitem(hf.AttentionInterface._global_mapping, "other", other)
    model = MODELS["bert"]().eval()
    model.config._attn_implementation = "other"
    layers = [x.attention.self for x in model.encoder.layer]
    expected = []
    for layer in layers:
        pass_hidden_states(layer, "hidden_states_of_layer")
        layer.register_forward_hook(lambda _, args, __: expected.append(args[0]))
    model(ids)
    assert len(found) == len(layers)
    assert all(x is y for x, y in zip(found, expected, strict=True))


def test_a_module_that_passes_no_arguments_on_is_refused():
    with pytest.raises(UnsupportedError, match="Linear passes no further arguments"):
        pass_hidden_states(torch.nn.Linear(2, 2), "hidden_states")
