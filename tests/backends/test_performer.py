"""The performer backend: against a dense formula and performer-pytorch."""

import math
from functools import partial

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.backends import performer
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError
from attnzoo.registry import build_backend
from attnzoo.testing import check_backend, check_generation
from tests import helpers
from tests.helpers import HKV, MODEL_SIZES, D, H, qkv

M = 24  # random features
SKIP_REASON = "performer-pytorch is not installed; it is in the extra 'dev'"


build = partial(helpers.build, "performer", num_features=M)


def phi(x, backend):
    projection = backend.projection.double()
    x = x.double() / D**0.25
    return (x @ projection.T - x.square().sum(-1, keepdim=True) / 2).exp()


def dense(backend, q, k, v, seen=None):
    """Compute dense attention in float64; ``seen`` is broadcastable to [B, H, T, S]."""
    k, v = (x.double().repeat_interleave(H // HKV, 1) for x in (k, v))
    weights = phi(q, backend) @ phi(k, backend).mT
    if seen is not None:
        weights = weights * seen
    return weights / weights.sum(-1, keepdim=True) @ v


def lower(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


# -- against a dense formula ---------------------------------------------------------------------

VARIANTS = [{}, {"impl": "reference"}]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("length", [1, 31, 130])  # within a chunk, and more than two
def test_causal_matches_the_dense_formula(options, length):
    backend = build(**options)
    q, k, v = qkv(length)
    out = backend(q, k, v).out
    assert_close(out, dense(backend, q, k, v, lower(length)))


def test_blocks_do_not_change_the_result(monkeypatch):
    q, k, v = (x.requires_grad_() for x in qkv(600))
    backend, padding = build(), torch.ones(2, 600, dtype=torch.bool)
    padding[0, :300] = padding[1, 555] = False
    mask = AttentionMask(causal=True, padding=padding)
    found = []
    for block_features in (performer.BLOCK_FEATURES, 1):  # one block, and blocks of 256 tokens
        monkeypatch.setattr(performer, "BLOCK_FEATURES", block_features)
        output = backend(q, k, v, mask=mask, return_state=True)
        gradients = torch.autograd.grad(output.out.square().sum(), (q, k, v))
        found.append((output.out, *output.state, *gradients))
    for one, blocks in zip(*found, strict=True):
        assert_close(one, blocks)


def test_gradients_of_blocks_are_concatenated_once(monkeypatch):
    """The gradient of a slice has the length of the sequence, so slices would take O(T^2)."""
    monkeypatch.setattr(performer, "BLOCK_FEATURES", 1)
    inputs = [x.requires_grad_() for x in qkv(700)]
    stack, seen = [build()(*inputs).out.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [parent for parent, _ in node.next_functions]
    kinds = [node.name() for node in seen]
    assert kinds.count("SplitBackward0") == 3
    assert "SliceBackward0" not in kinds


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize(("length", "keys"), [(31, 31), (7, 40), (40, 7)])
def test_bidirectional_matches_the_dense_formula(options, length, keys):
    backend = build(causal=False, cross_attention=length != keys, **options)
    q, k, v = qkv(length, keys)
    mask = AttentionMask(padding=torch.rand(2, keys) > 0.3)
    found, expected = (
        backend(q, k, v, mask=mask).out,
        dense(backend, q, k, v, mask.padding[:, None, None]),
    )
    if length == keys:  # padding among the queries too
        found, expected = (x.transpose(1, 2)[mask.padding] for x in (found, expected))
    assert_close(found, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [10, 1e3])
def test_huge_inputs_stay_finite(causal, size):
    backend = build(torch.float32, causal=causal)
    leaves = [x.requires_grad_() for x in qkv(100, dtype=torch.float32)]
    q, k, v = leaves
    out = backend(size * q, size * k, v).out
    out.square().sum().backward()
    assert all(torch.isfinite(x).all() for x in (out, *(leaf.grad for leaf in leaves)))
    low, high = v.amin(), v.amax()
    assert low <= out.min()
    assert out.max() <= high


@pytest.mark.parametrize(("size", "length"), [(64, 200), (256, 130)])
def test_large_keys_get_accurate_weights_in_float32(size, length):
    """At a squared length of 200 after scaling, features are about exp(-100)."""
    geometry = Geometry(num_heads=1, num_key_heads=1, head_dim=size)
    backend = build_backend("performer", {"num_features": 64}, geometry)
    q, k, v = torch.randn(3, 1, 1, 20, size)
    k *= math.sqrt(length * size**0.5) / k.norm(dim=-1, keepdim=True)
    exact = backend.double()(q.double(), k.double(), v.double()).out
    assert_close(backend.float()(q, k, v).out.double(), exact, atol=1e-3, rtol=1e-3)
    assert exact[..., -1, :].abs().max() > 0.1


@pytest.mark.parametrize("scale", [0.5, 0.02])
def test_the_scale_is_applied_as_in_softmax(scale):
    """With many features, the output is close to softmax attention."""
    backend = build(causal=False, num_features=40_000)
    q, k, v = (0.5 * x for x in qkv(9))
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    exact = (scale * q @ k.mT).softmax(-1) @ v
    out = backend(q, k[:, ::2], v[:, ::2], scale=scale).out
    assert (out - exact).abs().max() < 0.05


# -- against performer-pytorch -------------------------------------------------------------------


def fast_attention(backend, **options):
    pytest.importorskip("performer_pytorch", reason=SKIP_REASON)
    from performer_pytorch.performer_pytorch import FastAttention

    theirs = FastAttention(D, nb_features=M, **options).double()
    theirs.projection_matrix.copy_(backend.projection)
    return theirs


def test_equals_fast_attention_without_its_floor(monkeypatch):
    backend = build(causal=False)
    theirs = fast_attention(backend)
    module = pytest.importorskip("performer_pytorch.performer_pytorch", reason=SKIP_REASON)
    plain = module.softmax_kernel
    monkeypatch.setattr(module, "softmax_kernel", lambda *a, **o: plain(*a, **{**o, "eps": 0.0}))
    q, k, v = qkv(50)
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    assert_close(backend(q, k[:, ::2], v[:, ::2]).out, theirs(q, k, v))


def test_equals_causal_attention_of_performer_pytorch(monkeypatch):
    """FastAttention divides keys by the largest of all, even later ones; the factor cancels."""
    backend = build()
    theirs = fast_attention(backend, causal=True)
    module = pytest.importorskip("performer_pytorch.performer_pytorch", reason=SKIP_REASON)
    plain = module.softmax_kernel
    monkeypatch.setattr(module, "softmax_kernel", lambda *a, **o: plain(*a, **{**o, "eps": 0.0}))
    q, k, v = (0.3 * x for x in qkv(50))  # small, so that 1e-6 has little effect
    expected = theirs(q, *(x.repeat_interleave(H // HKV, 1) for x in (k, v)))
    assert_close(backend(q, k, v).out, expected, atol=2e-3, rtol=2e-3)


# -- the projection ------------------------------------------------------------------------------


def test_each_layer_and_seed_has_its_own_projection():
    torch.manual_seed(1)
    drawn = build().projection
    torch.manual_seed(2)
    assert torch.equal(build().projection, drawn)
    assert not torch.equal(build(layer=1).projection, drawn)
    assert not torch.equal(build(seed=1).projection, drawn)


def test_training_draws_the_projection_again_between_steps():
    backend, other = build(seed=5), build(seed=5)
    first = backend.projection.clone()
    backend.redraw(3)
    other.redraw(3)
    assert torch.equal(backend.projection, other.projection)
    assert not torch.isin(backend.projection, first).any()
    q, k, v = qkv(31)
    assert_close(backend(q, k, v).out, dense(backend, q, k, v, lower(31)))
    backend.redraw(0)
    assert torch.equal(backend.projection, first)


# -- conformance and options ---------------------------------------------------------------------


def test_conformance():
    config = performer.PerformerConfig(num_features=16, chunk_size=16)
    check_backend(performer.PerformerBackend, config=config)


@pytest.mark.parametrize("causal", [True, False])
def test_compiles_without_a_graph_break(causal):
    backend = build(torch.float32, causal=causal)
    inputs = qkv(70, dtype=torch.float32)
    compiled = torch.compile(backend, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs).out, backend(*inputs).out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_features": 0}, "num_features must be at least 1"),
        ({"num_features": 2.5}, "num_features must be int"),
        ({"chunk_size": -1}, "chunk_size must be at least 1"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"feature": 3}, "Did you mean 'num_features'"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        attnzoo.AttentionSpec("performer", **options)


def test_any_number_of_features_equals_the_dense_formula():
    q, k, v = qkv(9)
    for features in (1, 3, 8, 100):
        backend = build(num_features=features)
        assert_close(backend(q, k, v).out, dense(backend, q, k, v, lower(9)))


# -- inside transformers -------------------------------------------------------------------------

SIZES = {
    **MODEL_SIZES,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def llama(**options):
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=2, eos_token_id=None, bos_token_id=1)
    config.attnzoo = attnzoo.AttentionSpec("performer", num_features=16, **options).to_dict()
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="attnzoo").eval()
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 99, (3, 12), generator=torch.Generator().manual_seed(1))


LEFT = (torch.arange(12) >= 12 - torch.tensor([12, 7, 1])[:, None]).long()


def test_generation_equals_one_pass():
    check_generation(llama())


def test_saved_models_keep_their_projections(ids, tmp_path):
    model = llama(seed=3)
    backends = [layer.self_attn.attnzoo for layer in model.model.layers]
    assert not torch.equal(backends[0].projection, backends[1].projection)
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    again = [layer.self_attn.attnzoo for layer in loaded.model.layers]
    assert all(
        torch.equal(a.projection, b.projection) for a, b in zip(backends, again, strict=True)
    )
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_projections_missing_from_a_checkpoint_are_drawn(tmp_path):
    model = llama()
    expected = {n: x.clone() for n, x in model.state_dict().items() if "attnzoo" in n}
    attnzoo.restore(model)
    model.save_pretrained(tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    config.attnzoo = attnzoo.AttentionSpec("performer", num_features=16).to_dict()
    loaded = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, attn_implementation="attnzoo"
    )
    found = {n: x for n, x in loaded.state_dict().items() if "attnzoo" in n}
    assert found.keys() == expected.keys()
    assert len(found) == 2
    assert all(torch.equal(x, expected[n]) for n, x in found.items())


def bert():
    torch.manual_seed(3)
    config = hf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return hf.AutoModel.from_config(config, attn_implementation="eager").eval()


def test_an_encoder_with_many_features_is_close_to_softmax(ids):
    mask = LEFT.flip(1)
    model = bert()
    with torch.no_grad():
        exact = model(ids, attention_mask=mask).last_hidden_state
        attnzoo.swap(model, "performer", num_features=20_000)
        found = model(ids, attention_mask=mask).last_hidden_state
        attnzoo.restore(model)
        assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, exact)
    assert (found - exact)[mask.bool()].abs().max() < 0.02
    assert not torch.equal(found, exact)


def test_cross_attention_ignores_padding_in_generation(ids):
    torch.manual_seed(3)
    config = hf.BartConfig(
        vocab_size=99,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        init_std=0.3,
    )
    model = hf.BartForConditionalGeneration(config).eval()
    attnzoo.swap(model, "performer", num_features=16)
    options = {"attention_mask": LEFT.flip(1), "num_beams": 2, "max_new_tokens": 6}
    cached = model.generate(ids, **options)
    assert torch.equal(cached, model.generate(ids, **options, use_cache=False))
    clean = ids.masked_fill(options["attention_mask"] == 0, 50)
    assert torch.equal(cached, model.generate(clean, **options))
