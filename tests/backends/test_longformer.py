"""The longformer backend: options, state, projections, and swapped transformers models."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import transformers as hf
from torch.testing import assert_close
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

import attnzoo
from attnzoo.backends.longformer import GlobalMask, LongformerBackend, LongformerConfig
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.hf.seam import output_cache
from attnzoo.ops.longformer.api import longformer_attention
from attnzoo.ops.longformer.decode import STEP_TOKENS
from attnzoo.registry import build_backend
from attnzoo.testing import RULES, check_backend, check_generation
from tests import helpers
from tests.helpers import HKV, D, H, hidden_states, qkv, redrawn, tiny_llama

build = partial(helpers.build, "longformer", noise=0.3)


def inputs(length, batch=2):
    """Return q, k and v, and the hidden states by name."""
    return qkv(length, batch=batch), {"hidden_states": hidden_states(length, batch=batch)}


PROJECTED = {"window": 6, "global_positions": [0, 9], "global_projections": True}


CONFIGS = [
    ({"window": 20}, None),
    pytest.param(
        {"window": [6, 20, 6, 1], "dilation": [1, 1, 3, 2], "impl": "reference"},
        [torch.float64],
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        {"window": 9, "dilation": 2, "num_global": 2},
        [torch.float64],
        marks=pytest.mark.exhaustive,
    ),
    ({"window": 7, "global_positions": [0, 30], "global_projections": True}, [torch.float32]),
]


@pytest.mark.parametrize(("options", "dtypes"), CONFIGS, ids=str)
def test_it_conforms(options, dtypes):
    config = LongformerConfig.from_options("longformer", options)
    # global tokens that see values of their own have no matrix of weights, which is refused
    rules = [r.name for r in RULES if r.name != "weights" or not config.global_projections]
    given = {} if dtypes is None else {"dtypes": dtypes}
    report = check_backend(LongformerBackend, config=config, rules=rules, **given)
    assert {"padding", "decoding", "packing", "state_size"} <= set(report.passed)


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"LongformerConfig\.window must be at least 1.*got 0"),
        ({"window": [4, -2]}, r"LongformerConfig\.window must be at least 1.*\[4, -2\]"),
        ({"window": 2.5}, r"LongformerConfig\.window must be int or a list of int, got 2\.5"),
        ({"window": True}, r"LongformerConfig\.window must be int"),
        ({"dilation": 0}, r"LongformerConfig\.dilation must be at least 1.*got 0"),
        ({"num_global": -1}, r"LongformerConfig\.num_global must be at least 0 tokens, got -1"),
        (
            {"global_positions": [3, -4]},
            r"positions must be at least 0 .*, got -4",
        ),
        ({"impl": "triton"}, "'flex' or 'torch' or 'reference', got 'triton'"),
        ({"windows": 3}, "Did you mean 'window'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        attnzoo.AttentionSpec("longformer", **options)


@pytest.mark.parametrize("name", ["window", "dilation"])
def test_a_list_has_one_number_for_each_head(name):
    with pytest.raises(ConfigError, match=rf"layer\.attn.*{name} is a list of 3.*has 4 heads"):
        build(**{name: [2, 3, 4]})


def test_unsupported_calls_are_refused():
    x, hidden = inputs(9)
    backend = build(window=4)
    with pytest.raises(UnsupportedError, match="without a causal mask"):
        backend(*x, mask=AttentionMask(), return_state=True)
    with pytest.raises(UnsupportedError, match="8 query heads are given"):
        backend(x[0].repeat(1, 2, 1, 1), *x[1:])
    with pytest.raises(UnsupportedError, match=r"impl='flex' cannot .*: the tensors are on cpu"):
        build(window=4, impl="flex")(*x)
    state = backend(*x, return_state=True).state
    with pytest.raises(UnsupportedError, match="dropout is given with a state"):
        backend(*x, state=state, dropout=0.1)
    projected = build(**PROJECTED)
    with pytest.raises(UnsupportedError, match=r"hidden_states have shape \(2, 9, 11\)"):
        projected(*x, hidden_states=hidden["hidden_states"][..., 1:])
    with pytest.raises(UnsupportedError, match="no one matrix of weights"):
        projected(*x, **hidden, return_weights=True)
    no_size = Geometry(num_heads=H, num_key_heads=HKV, head_dim=D)
    with pytest.raises(UnsupportedError, match="hidden size is unknown"):
        build_backend("longformer", PROJECTED, no_size)


def test_the_window_of_the_model_applies_unless_it_would_hide_global_tokens():
    x, _ = inputs(30)
    mask = AttentionMask(causal=True, window=(3, 0))
    assert_close(build(window=9)(*x, mask=mask).out, build(window=4)(*x).out)
    with pytest.raises(UnsupportedError, match="sliding window"):
        build(window=9, num_global=1)(*x, mask=mask)


def test_the_choice_is_recorded():
    x, _ = inputs(9)
    backend = build(window=4)
    state = backend(*x, return_state=True).state
    assert backend.ran == ("cpp", "compiled for this CPU")
    backend(*(t[:, :, :1] for t in x), state=state)
    assert backend.ran == ("torch", "a decoding step is dense over the state")
    named = build(window=4, impl="reference")
    named(*x)
    assert named.ran == ("reference", "named in the options")


def test_dropout_drops_and_is_unbiased():
    x, _ = inputs(12, batch=1)
    backend, draws = build(window=4, num_global=1), 800
    outs = backend(*(t.expand(draws, -1, -1, -1) for t in x), dropout=0.3).out
    assert not torch.equal(outs[0], outs[1])
    error = (outs.mean(0) - backend(*x).out[0]).abs()
    assert (error / (outs.std(0) / draws**0.5 + 1e-9)).max() < 6


# -- global tokens -------------------------------------------------------------------------------


def test_global_tokens_count_from_the_first_real_one():
    x, _ = inputs(14)
    real = torch.ones(2, 14, dtype=torch.bool)
    real[0, :3] = real[1, 2:5] = False
    backend = build(window=2, num_global=1, global_positions=[3], causal=False)
    found = backend(*x, mask=AttentionMask(padding=real)).out
    where = torch.zeros_like(real)
    where[0, [3, 6]] = where[1, [0, 6]] = True
    mask = AttentionMask(padding=real)
    assert_close(found, longformer_attention(*x, window=2, mask=mask, global_tokens=where).out)


def test_global_tokens_of_the_mask_replace_those_of_the_options():
    x, _ = inputs(14)
    ids = torch.zeros(2, 14, dtype=torch.long)
    where = ids.bool()
    where[0, [2, 11]] = True
    backend = build(window=2, num_global=3, causal=False)
    found = backend(*x, mask=GlobalMask(global_tokens=where)).out
    assert_close(found, longformer_attention(*x, window=2, global_tokens=where).out)
    with pytest.raises(UnsupportedError, match=r"torch\.int64 of shape \(2, 14\) \(torch\.bool"):
        backend(*x, mask=GlobalMask(global_tokens=where.long()))
    with pytest.raises(UnsupportedError, match="together with packed rows"):
        backend(*x, mask=GlobalMask(global_tokens=where, segment_ids=ids))
    with pytest.raises(UnsupportedError, match="together with a state"):
        build(window=2)(*x, mask=GlobalMask(causal=True, global_tokens=where), return_state=True)


def test_projections_start_as_copies():
    x, hidden = inputs(20)
    projected = build(**PROJECTED)
    plain = build(**{**PROJECTED, "global_projections": False})(*x).out
    assert not torch.allclose(projected(*x, **hidden).out, plain)
    projected.reset_parameters()
    assert_close(projected(*x, **hidden).out, plain)


def test_projections_have_a_gradient_even_without_global_tokens():
    """Distributed training waits for the gradients of every process."""
    x, hidden = inputs(6)
    backend = build(window=3, global_projections=True)
    backend(*x, **hidden).out.sum().backward()
    assert all((extra.grad == 0).all() for extra in backend.parameters())
    backend = build(window=3, global_positions=[50], global_projections=True)
    backend(*x, **hidden).out.sum().backward()
    assert all((extra.grad == 0).all() for extra in backend.parameters())


def test_projections_can_be_those_of_transformers():
    """The sum of the layer's and the learned projection can be any projection."""
    size, length = 32, 48
    config = hf.LongformerConfig(
        hidden_size=size, num_attention_heads=H, attention_window=[8], num_hidden_layers=1
    )
    layer = LongformerSelfAttention(config, 0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    geometry = Geometry(num_heads=H, num_key_heads=H, head_dim=8, hidden_size=size, causal=False)
    backend = build_backend("longformer", {"window": 4, "global_projections": True}, geometry)
    for name in ("query", "key", "value"):
        mine = getattr(backend.global_projections, name)
        own, apart = getattr(layer, name), getattr(layer, f"{name}_global")
        mine.weight.data = apart.weight.data - own.weight.data
        if name != "key":  # one vector added to all keys changes nothing
            mine.bias.data = apart.bias.data - own.bias.data
    hidden = torch.randn(2, length, size)
    real = torch.ones(2, length, dtype=torch.bool)
    where = torch.zeros_like(real)
    real[1, 40:], where[0, [0, 30]], where[1, 20] = False, True, True
    theirs = layer(
        hidden,
        attention_mask=torch.where(real, 0.0, -10000.0) + 10000.0 * where,
        is_index_masked=~real,
        is_index_global_attn=where,
        is_global_attn=True,
    )[0]
    maps = (layer.query, layer.key, layer.value)
    x = [m(hidden).view(2, length, H, 8).transpose(1, 2) for m in maps]
    mask = GlobalMask(padding=real, global_tokens=where)
    ours = backend(*x, mask=mask, hidden_states=hidden).out.transpose(1, 2).flatten(2)
    assert (ours - theirs).abs().max() <= 1e-5


# -- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"window": [1, 5, 2, 3], "dilation": [1, 2, 4, 1], "num_global": 2},
        {"window": 4, "global_positions": [3, 13]},
        PROJECTED,
    ],
    ids=["window", "heads", "positions", "projected"],
)
def test_the_state_has_a_fixed_size_and_takes_many_new_tokens(options):
    length = STEP_TOKENS + 40  # more than one step of new tokens
    x, hidden = inputs(length)
    backend = build(**options)
    whole = backend(*x, **hidden).out
    cuts = (0, 1, 2, 12, 15, length)
    state, outs, sizes = None, [], set()
    for start, stop in pairwise(cuts):
        part = [t[:, :, start:stop] for t in x]
        states = hidden["hidden_states"][:, start:stop]
        output = backend(*part, state=state, hidden_states=states, return_state=True)
        state = output.state
        outs.append(output.out)
        sizes.add(sum(t.nbytes for t in state))
    assert_close(torch.cat(outs, 2), whole)
    assert len(sizes) == 1
    reach = backend.config.window if isinstance(backend.config.window, int) else 9
    assert state.k.shape[2] == reach - 1
    assert state.seen.tolist() == [length] * 2


def test_the_mask_of_one_new_token_may_leave_causality_out():
    x, _ = inputs(12)
    backend = build(window=4)
    state = backend(*(t[:, :, :11] for t in x), return_state=True).state
    step = backend(*(t[:, :, 11:] for t in x), mask=AttentionMask(), state=state)
    assert_close(step.out, backend(*x).out[:, :, 11:])


@pytest.mark.parametrize("options", [{"window": 4}, {"window": 4, "num_global": 2}], ids=str)
def test_padding_after_a_state_gives_zeros_and_is_not_counted(options):
    x, _ = inputs(12)
    backend, real = build(**options), torch.ones(2, 12, dtype=torch.bool)
    real[0, 7:9] = False
    whole = backend(*x, mask=AttentionMask(causal=True, padding=real), return_state=True)
    first = backend(*(t[:, :, :6] for t in x), return_state=True)
    mask = AttentionMask(causal=True, padding=real[:, 6:])
    rest = backend(*(t[:, :, 6:] for t in x), mask=mask, state=first.state, return_state=True)
    assert_close(torch.cat([first.out, rest.out], 2), whole.out)
    for ours, expected in zip(rest.state, whole.state, strict=True):
        assert_close(ours, expected)


def test_the_state_owns_its_storage():
    """A view would keep the whole prompt in memory."""
    x, _ = inputs(100)
    state = build(window=5, num_global=1)(*x, return_state=True).state
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in state)


# -- models --------------------------------------------------------------------------------------


@pytest.fixture
def llama():
    return tiny_llama(max_position_embeddings=128)


@pytest.mark.parametrize(
    "options",
    [{"window": [3, 5, 2, 3], "dilation": [1, 1, 3, 1], "num_global": 2}, PROJECTED],
    ids=["heads", "projected"],
)
def test_generation_equals_one_pass(llama, options):
    attnzoo.swap(llama, "longformer", **options)
    redrawn(llama)  # the backend's own parameters too
    check_generation(llama, new_tokens=12)
    ids, mask = torch.randint(1, 60, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    static = llama.generate(ids, **given, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, llama.generate(ids, **given, use_cache=False))


def test_the_cache_does_not_grow(llama):
    attnzoo.swap(llama, "longformer", window=5, num_global=1)
    ids, sizes = torch.randint(1, 60, (2, 7)), set()
    for new in (1, 20):
        steps = llama.generate(ids, max_new_tokens=new, return_dict_in_generate=True)
        layers = output_cache(steps).layers
        sizes.add(sum(t.nbytes for layer in layers for t in layer.state))
    assert len(sizes) == 1


def test_a_window_over_all_keys_is_the_model_itself(llama):
    ids = torch.randint(1, 60, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        stock = llama(ids, attention_mask=mask).logits
        attnzoo.swap(llama, "longformer", window=64, num_global=3)
        swapped = llama(ids, attention_mask=mask).logits
    assert_close(swapped[mask.bool()], stock[mask.bool()], atol=1e-4, rtol=1e-4)


def test_bert_is_bidirectional_and_trains():
    config = hf.BertConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = redrawn(hf.BertModel(config))
    ids = torch.randint(1, 60, (2, 20))
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    layers = {"0": {"backend": "longformer", "options": {"window": [1, 2, 3, 30]}}}
    with torch.no_grad():
        stock = model(ids, attention_mask=mask).last_hidden_state
        attnzoo.swap(model, "longformer", window=30, num_global=1)
        wide = model(ids, attention_mask=mask).last_hidden_state
        attnzoo.swap(
            model, "longformer", window=2, layers=layers, global_projections=True, num_global=1
        )
        near = model(ids, attention_mask=mask).last_hidden_state
        alone = model(ids[1:, :13]).last_hidden_state
    real = mask.bool()
    assert_close(wide[real], stock[real], atol=1e-4, rtol=1e-4)
    assert (near - stock)[real].abs().max() > 0.1
    assert_close(near[1:, :13], alone, atol=1e-4, rtol=1e-4)
    model.train()  # with the dropout of attention that its config asks for
    model(ids, attention_mask=mask).last_hidden_state.sum().backward()
    extras = [p for name, p in model.named_parameters() if ".attnzoo." in name]
    assert len(extras) == 5
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().max() > 0 for p in extras)


def test_it_compiles_without_a_graph_break():
    torch._dynamo.reset()
    x, hidden = inputs(20)
    real = torch.ones(2, 20, dtype=torch.bool)
    real[0, 7:9] = False
    backend = build(**PROJECTED)
    compiled = torch.compile(backend, backend="aot_eager", fullgraph=True)
    given = {"mask": AttentionMask(causal=True, padding=real), **hidden, "return_state": True}
    expected, found = backend(*x, **given), compiled(*x, **given)
    assert_close(found.out, expected.out)
    now = {"hidden_states": hidden["hidden_states"][:, :1], "state": expected.state}
    step = [t[:, :, :1] for t in x]
    assert_close(compiled(*step, **now).out, backend(*step, **now).out)
    torch._dynamo.reset()
