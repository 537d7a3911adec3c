"""The linformer backend: shared projections, refusals, models, the linformer package."""

import copy
from functools import partial

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.backends.linformer import LinformerBackend, LinformerConfig
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.registry import build_backend
from attnzoo.testing import RULES, check_backend, check_generation
from tests import helpers
from tests.helpers import MODEL_SIZES, D, H, redrawn, tiny_llama

qkv = partial(helpers.qkv, heads=(H, H), sizes=(D, D))
WHY = "linformer is not installed; it is in the extra 'dev'"


def geometry(**changes):
    sizes = {"num_heads": H, "num_key_heads": H, "head_dim": D, "causal": False, "max_length": 32}
    return Geometry(**{**sizes, "name": "layer.attn", **changes})


def build_linformer(dtype=torch.float64, place=None, **options):
    return build_backend("linformer", options, place or geometry()).to(dtype)


# -- projections ---------------------------------------------------------------------------------

MATRICES = {"none": 16, "headwise": 4, "kv": 2, "layerwise": 1}


@pytest.mark.parametrize(("sharing", "count"), MATRICES.items())
def test_number_of_matrices_in_two_layers_with_four_heads(sharing, count):
    model = bert()
    attnzoo.swap(model, "linformer", sharing=sharing, num_rows=3)
    extras = [x for n, x in model.named_parameters() if "attnzoo" in n]
    assert all(x.shape[1:] == (64, 3) for x in extras)
    assert sum(len(x) for x in extras) == count


@pytest.mark.parametrize("sharing", MATRICES)
def test_keys_and_values_have_separate_rows_unless_shared(sharing):
    backend = build_linformer(sharing=sharing, pooling=False)
    keys, values = backend.rows(torch.empty(0))
    assert (keys is values) == (sharing in ("kv", "layerwise"))
    if keys is not values:
        assert not torch.equal(keys, values)


def test_layers_share_the_rows_of_the_first():
    one, two, other = (build_linformer(sharing="layerwise", num_rows=4) for _ in range(3))
    longer = build_linformer(None, geometry(max_length=48), sharing="layerwise", num_rows=4)
    for number, backend in enumerate((two, longer, other), 1):
        backend.share_with([one, two, longer][:number])
    assert not list(two.parameters())
    assert not two.state_dict()
    assert len(list(longer.parameters())) == 1  # another shape
    inputs = qkv(9)
    with torch.no_grad():
        one.key_rows.normal_()
    for backend in (two, other):
        assert torch.equal(backend(*inputs).out, one(*inputs).out)
    two(*inputs).out.sum().backward()
    assert one.key_rows.grad.abs().max() > 0


def test_shared_rows_stay_shared_in_a_copy():
    model = bert()
    attnzoo.swap(model, "linformer", sharing="layerwise", num_rows=3)
    model = copy.deepcopy(model)
    first, second = (layer.attention.self.attnzoo for layer in model.encoder.layer)
    assert second.rows(torch.empty(0))[0] is first.key_rows


def test_a_layer_is_not_copied_without_the_owner_of_its_rows():
    """PEFT's modules_to_save would train one copy of the rows per layer and save one of them."""
    one, two = (build_linformer(sharing="layerwise", num_rows=4) for _ in range(2))
    assert copy.deepcopy(two).key_rows is not two.key_rows
    two.share_with([one])
    with pytest.raises(UnsupportedError, match=r"those of layer\.attn .* set sharing='kv'"):
        copy.deepcopy(two)
    _, copied = copy.deepcopy(torch.nn.ModuleList([one, two]))
    inputs = qkv(9)
    assert torch.equal(copied(*inputs).out, two(*inputs).out)


@pytest.mark.parametrize("pooling", [True, False])
def test_initial_rows_leave_the_global_generator_unchanged(pooling):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, two = build_linformer(pooling=pooling), build_linformer(pooling=pooling)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.key_rows, two.key_rows)
    other = build_linformer(None, geometry(layer=1), pooling=pooling)
    assert torch.equal(one.key_rows, other.key_rows.double()) == pooling
    assert bool(one.key_rows.any()) != pooling


def test_default_rows():
    assert build_linformer(None, geometry(max_length=2048)).key_rows.shape == (1, 2048, 256)
    assert build_linformer(None, geometry(max_length=100)).key_rows.shape == (1, 100, 100)
    assert build_linformer(None, geometry(causal=True), block=128).key_rows.shape == (1, 128, 16)
    assert build_linformer(None, geometry(causal=True), block=3).key_rows.shape == (1, 3, 1)
    assert build_linformer(max_length=50).key_rows.shape[1] == 50


def test_grouped_heads_have_rows_per_key_head():
    backend = build_linformer(None, geometry(num_key_heads=2), sharing="none", num_rows=5)
    assert backend.key_rows.shape == (2, 32, 5)
    assert backend(*(x.float() for x in qkv(7, heads=(H, 2)))).out.shape == (2, H, 7, D)


@pytest.mark.parametrize("length", [3, 9])
def test_rows_always_get_a_gradient(length):
    """Distributed training needs a gradient also before a block is finished."""
    backend = build_linformer(place=geometry(causal=True), block=8, num_rows=2)
    backend(*qkv(length)).out.sum().backward()
    assert all((x.grad != 0).any() == (length > 8) for x in backend.parameters())


# -- against the linformer package ---------------------------------------------------------------


@pytest.mark.parametrize("length", [20, 13])  # the longest, and one that slices the projections
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("context", [None, 9])
def test_equal_to_the_linformer_package(length, shared, context):
    """The package applies the same two projections, without biases."""
    package = pytest.importorskip("linformer", reason=WHY)
    options = {"seq_len": 20, "k": 6, "heads": H, "share_kv": shared}
    theirs = package.LinformerSelfAttention(H * D, **options).double()
    place = geometry(cross_attention=context is not None)
    sharing = "kv" if shared else "headwise"
    ours = build_linformer(place=place, max_length=20, num_rows=6, pooling=False, sharing=sharing)
    with torch.no_grad():
        ours.key_rows.copy_(theirs.proj_k)
        if not shared:
            ours.value_rows.copy_(theirs.proj_v)
    x = torch.randn(2, length, H * D, dtype=torch.float64, requires_grad=True)
    other = x if context is None else torch.randn(2, context, H * D, dtype=torch.float64)
    k = theirs.to_k(other)
    v = k if shared else theirs.to_v(other)
    q, k, v = (y.view(2, -1, H, D).transpose(1, 2) for y in (theirs.to_q(x), k, v))
    out = theirs.to_out(ours(q, k, v).out.transpose(1, 2).flatten(2))
    expected = theirs(x, context=None if context is None else other)
    assert_close(out, expected)
    up = torch.randn_like(out)
    found, right = (torch.autograd.grad((y * up).sum(), x)[0] for y in (out, expected))
    assert_close(found, right)


# -- refused layers and inputs -------------------------------------------------------------------


def test_causal_layers_without_blocks_are_refused():
    with pytest.raises(UnsupportedError, match=r"layer is causal, .* \(set block=256"):
        build_linformer(place=geometry(causal=True))


def test_layers_without_a_maximum_length_are_refused():
    with pytest.raises(UnsupportedError, match=r"define a maximum length.* \(set max_length\)"):
        build_linformer(place=geometry(max_length=None))
    build_linformer(place=geometry(max_length=None), max_length=9)
    build_linformer(place=geometry(max_length=None, causal=True), block=9)


def test_maximum_length_applies_to_each_packed_sequence():
    backend, (q, k, v) = build_linformer(), qkv(40)
    with pytest.raises(UnsupportedError, match=r"40 keys are given, .* 32 \(set max_length"):
        backend(q, k, v)
    ids = (torch.arange(40) >= 15).long().expand(2, -1)
    out = backend(q, k, v, mask=AttentionMask(segment_ids=ids)).out
    assert_close(out[:, :, :15], backend(*(x[:, :, :15] for x in (q, k, v))).out)
    ids = (torch.arange(40) >= 35).long().expand(2, -1)
    with pytest.raises(UnsupportedError, match=r"up to 32 tokens, got 35"):
        backend(q, k, v, mask=AttentionMask(segment_ids=ids))


def test_unsupported_masks_and_states_are_refused():
    causal, inputs = AttentionMask(causal=True), qkv(5)
    with pytest.raises(UnsupportedError, match=r"the mask is causal .*is_causal=False.*layers"):
        build_linformer()(*inputs, mask=causal)
    in_blocks = build_linformer(place=geometry(causal=True), block=4)
    with pytest.raises(UnsupportedError, match="the mask is bidirectional"):
        in_blocks(*inputs, mask=AttentionMask())
    with pytest.raises(UnsupportedError, match="a state is requested"):
        build_linformer()(*inputs, return_state=True)
    with pytest.raises(UnsupportedError, match="pass the state"):
        in_blocks(inputs[0][:, :, 4:], *inputs[1:], mask=AttentionMask(causal=True, q_offset=4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_rows": 0}, "num_rows must be at least 1 row, got 0"),
        ({"num_rows": 1.5}, "num_rows must be int"),
        ({"block": 0}, "block must be at least 1 token, got 0"),
        ({"block": -3}, "block must be at least 1 token, got -3"),
        ({"max_length": 0}, "max_length must be at least 1 token, got 0"),
        ({"sharing": "all"}, "sharing must be 'none' or 'headwise' or 'kv' or 'layerwise'"),
        ({"rows": 3}, "Did you mean 'num_rows'"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        attnzoo.AttentionSpec("linformer", **options)


def test_more_rows_or_longer_blocks_than_tokens():
    inputs = qkv(5)
    for pooling in (True, False):
        assert torch.isfinite(build_linformer(num_rows=100, pooling=pooling)(*inputs).out).all()
        place = geometry(causal=True)
        for rows, block in ((100, 2), (100, 100), (1, 1)):
            backend = build_linformer(place=place, num_rows=rows, block=block, pooling=pooling)
            assert torch.isfinite(backend(*inputs).out).all()


# -- the contract --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"num_rows": 2, "block": 64, "sharing": "none"},
        pytest.param(
            {"num_rows": 16, "block": 64, "pooling": False, "sharing": "kv"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"num_rows": 5, "block": 50, "sharing": "layerwise"}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def test_conformance(options):
    if options["sharing"] == "none":  # rows of 8192 tokens take most of the time
        config = LinformerConfig(max_length=300, **options)
        rules = [rule.name for rule in RULES if rule.name != "long_gradients"]
    else:
        config, rules = LinformerConfig(max_length=8192, **options), None
    report = check_backend(LinformerBackend, config=config, rules=rules)
    assert any("bidirectional" in trial for trial in report.trials)
    assert any("causal" in trial for trial in report.trials)
    config = LinformerConfig(max_length=8192, impl="reference", **options)
    rules = ["causality", "decoding", "padding", "padding_gradients", "packing"]
    check_backend(LinformerBackend, config=config, rules=rules, dtypes=[torch.float64])


@pytest.mark.parametrize("causal", [True, False])
def test_compiles_without_graph_breaks(causal):
    backend = build_linformer(torch.float32, geometry(causal=causal), block=6, num_rows=2)
    inputs = [x.float() for x in qkv(30)]
    compiled = torch.compile(backend, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs).out, backend(*inputs).out)


def test_a_state_is_not_compiled():
    """The number of finished blocks, and so the shape of the state, depends on the padding."""
    backend = build_linformer(torch.float32, geometry(causal=True), block=6, num_rows=2)
    compiled = torch.compile(backend, backend="aot_eager")
    with pytest.raises(UnsupportedError, match=r"under torch\.compile .* use_cache=False"):
        compiled(*(x.float() for x in qkv(30)), return_state=True)


# -- inside transformers -------------------------------------------------------------------------

SIZES = {
    **MODEL_SIZES,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LEFT = (torch.arange(12) >= 12 - torch.tensor([12, 7, 1])[:, None]).long()
RIGHT = LEFT.flip(1)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 99, (3, 12), generator=torch.Generator().manual_seed(1))


def bert():
    config = hf.BertConfig(**SIZES)
    return redrawn(hf.AutoModel.from_config(config, attn_implementation="eager"))


def bart():
    config = hf.BartConfig(
        vocab_size=99,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    model = hf.BartForConditionalGeneration._from_config(config, attn_implementation="eager")
    return redrawn(model)


def perturb(model):
    """Add noise to the weights of the projections."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "attnzoo" in name:
                x += 0.1 * torch.randn(x.shape, generator=generator)


@pytest.mark.parametrize("sharing", MATRICES)
def test_one_row_per_token_leaves_an_encoder_unchanged(ids, sharing):
    model = bert()
    with torch.no_grad():
        exact = model(ids, attention_mask=RIGHT).last_hidden_state[RIGHT.bool()]
        attnzoo.swap(model, "linformer", num_rows=12, sharing=sharing)
        found = model(ids, attention_mask=RIGHT).last_hidden_state[RIGHT.bool()]
        assert_close(found, exact, atol=1e-4, rtol=1e-4)
        attnzoo.swap(model, "linformer", num_rows=4, sharing=sharing)
        found = model(ids, attention_mask=RIGHT).last_hidden_state[RIGHT.bool()]
        assert (found - exact).abs().max() > 1e-2


def test_one_row_per_token_leaves_a_decoder_unchanged(ids):
    model = tiny_llama()
    with torch.no_grad():
        exact = model(ids, attention_mask=LEFT).logits[LEFT.bool()]
        attnzoo.swap(model, "linformer", num_rows=5, block=5)
        assert_close(model(ids, attention_mask=LEFT).logits[LEFT.bool()], exact, atol=1e-4, rtol=0)
        attnzoo.swap(model, "linformer", num_rows=2, block=5)
        assert (model(ids, attention_mask=LEFT).logits[LEFT.bool()] - exact).abs().max() > 1e-2


@pytest.mark.parametrize("sharing", ["headwise", "layerwise"])
def test_encoder_decoder_and_cross_attention(ids, sharing):
    model, options = bart(), {"attention_mask": RIGHT, "decoder_input_ids": ids.flip(1)}
    with torch.no_grad():
        exact = model(ids, **options).logits
        attnzoo.swap(model, "linformer", num_rows=64, block=5, sharing=sharing)
        assert_close(model(ids, **options).logits, exact, atol=1e-4, rtol=1e-4)
        attnzoo.swap(model, "linformer", num_rows=3, block=5, sharing=sharing)
        assert (model(ids, **options).logits - exact).abs().max() > 1e-2


def test_a_decoder_is_refused_without_blocks():
    model = tiny_llama()
    with pytest.raises(UnsupportedError, match=r"set block=256: .* \(1 more layers likewise"):
        attnzoo.swap(model, "linformer")


def test_generation_equals_one_pass():
    model = tiny_llama()
    attnzoo.swap(model, "linformer", num_rows=2, block=4, sharing="layerwise")
    perturb(model)
    check_generation(model, new_tokens=9)


def test_beams_of_an_encoder_decoder(ids):
    model = bart()
    attnzoo.swap(model, "linformer", num_rows=2, block=4)
    perturb(model)
    options = {"attention_mask": LEFT, "num_beams": 3, "max_new_tokens": 9}
    cached = model.generate(ids, **options)
    assert torch.equal(cached, model.generate(ids, **options, use_cache=False))


@pytest.mark.parametrize("sharing", ["headwise", "layerwise"])
@pytest.mark.parametrize("make", [tiny_llama, bart])
def test_saving_and_loading(ids, make, sharing, tmp_path):
    model = make()
    attnzoo.swap(model, "linformer", num_rows=2, block=4, sharing=sharing)
    perturb(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    options = {"decoder_input_ids": ids} if make is bart else {}
    with torch.no_grad():
        assert torch.equal(loaded(ids, **options).logits, model(ids, **options).logits)


@pytest.mark.parametrize("pooling", [True, False])
def test_rows_missing_in_a_checkpoint_are_initialised(pooling, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    options = {"num_rows": 2, "block": 4, "pooling": pooling}
    attnzoo.swap(model, "linformer", **options)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    config.attnzoo = attnzoo.AttentionSpec("linformer", **options).to_dict()
    loaded = type(model).from_pretrained(tmp_path, config=config, attn_implementation="attnzoo")
    found, expected = loaded.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_dropout_of_the_model_is_applied(ids):
    """BERT drops a tenth of its attention weights in training."""
    model = bert()
    attnzoo.swap(model, "linformer", num_rows=4)
    for layer in model.encoder.layer:
        layer.attention.self.train()  # nothing else drops
    torch.manual_seed(0)
    one, other = (model(ids).last_hidden_state for _ in range(2))
    assert not torch.equal(one, other)
