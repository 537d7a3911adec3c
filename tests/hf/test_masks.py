"""The mask object: how it is read and moved, and that no quadratic tensor is built."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.attention import packing
from attnzoo.hf.attention.call import attention
from attnzoo.hf.attention.packing import Packing, add_packing
from attnzoo.hf.masks import ModelMask, make_mask, read_mask
from attnzoo.hf.seam import cache_argument, output_cache
from attnzoo.ops.softmax.api import softmax_attention
from tests.helpers import MODEL_SIZES

EXACT = ["softmax", "flash"]
ALL = ["flash", "linear", "gated_linear", "reformer"]


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that an operation returns, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.seen.add(tuple(x.shape))
        return out

    def quadratic(self, length: int) -> bool:
        return any(shape.count(length) > 1 for shape in self.seen)


# -- nothing quadratic ---------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("backend", ["linear", "gated_linear", "softmax"])
def test_linear_backends_never_build_a_square(backend, padded, llama):
    length = 61
    model = llama()
    options = {} if backend == "softmax" else {"chunk_size": 16}
    attnzoo.swap(model, backend, **options)
    ids = torch.randint(3, 99, (2, length))
    given: dict[str, Any] = {}
    if padded:
        given["attention_mask"] = torch.ones(2, length, dtype=torch.long)
        given["attention_mask"][1, :9] = 0
    with Shapes() as shapes:
        model(ids, labels=ids, **given).loss.backward()
        model.generate(ids, max_new_tokens=2, **given)
    assert shapes.quadratic(length) == (backend == "softmax")


# -- gradient checkpointing ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", ALL)
def test_gradient_checkpointing(backend, reentrant, llama, ids, padding):
    gradients = []
    for checkpointing in (False, True):
        model = llama().train()
        attnzoo.swap(model, backend)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        mask = padding("left")
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(g.abs().max() > 0 for name, g in gradients[0].items() if "gate" not in name)
    assert_close(gradients[1], gradients[0])


# -- packed rows ---------------------------------------------------------------------------------

LENGTHS = (4, 1, 7)


@pytest.fixture
def packed():
    ids = torch.randint(3, 99, (2, sum(LENGTHS)))
    places = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    return ids, places


def apart(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(x, use_cache=False).logits for x in ids.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("backend", EXACT)
def test_packed_rows_with_a_sliding_window(backend, redraw, packed):
    config = hf.MistralConfig(
        **MODEL_SIZES,
        num_key_value_heads=2,
        sliding_window=3,
    )
    model = redraw(hf.MistralForCausalLM(config))
    ids, places = packed
    with torch.no_grad():
        expected = apart(model, ids)
        attnzoo.swap(model, backend)
        found = model(ids, position_ids=places, use_cache=False).logits
    assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_unsupported_cumulative_lengths(llama, ids, padding):
    model = llama()
    attnzoo.swap(model, "flash")
    bounds = torch.tensor([0, 5, 12])
    with pytest.raises(UnsupportedError, match=r"3 rows .* attention mask is given too"):
        model(ids, attention_mask=padding("left"), cu_seq_lens_q=bounds)
    cache = output_cache(model(ids[:1]))
    with pytest.raises(UnsupportedError, match="1 queries and 13 keys"):
        model(ids[:1, :1], **cache_argument(cache), cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    plain = attnzoo.AttentionMask(causal=True)
    packed_mask = add_packing(plain, Packing(cu_seq_lens_k=bounds), (1, 12, 12))
    assert packed_mask.segment_ids.tolist() == [[0] * 5 + [1] * 7]
    with pytest.raises(UnsupportedError, match=r"cu_seq_lens_q has the shape \(1, 3\)"):
        add_packing(plain, Packing(cu_seq_lens_q=bounds[None]), (1, 12, 12))


@pytest.fixture
def seq_idx():
    return torch.repeat_interleave(torch.tensor([5, 3, 5]), torch.tensor(LENGTHS)).expand(2, -1)


def test_sequence_indices_beside_padding():
    real = torch.tensor([[1, 1, 1, 1, 0, 0]]).bool()
    mask = attnzoo.AttentionMask(causal=True, padding=real)
    seq_idx = torch.tensor([[0, 0, 1, 1, -1, -1]])
    found = add_packing(mask, Packing(seq_idx), (1, 6, 6))
    assert found.segment_ids.tolist() == [[0, 0, 1, 1, 2, 2]]
    assert found.padding is real
    one = add_packing(mask, Packing(torch.zeros(1, 6)), (1, 6, 6))
    assert one.segment_ids is None


@pytest.mark.parametrize("backend", ["flash", "linear"])
def test_packing_arguments_that_disagree(backend, llama, packed, seq_idx):
    model = llama()
    attnzoo.swap(model, backend)
    ids, places = packed
    other = torch.arange(12).expand(2, -1) // 6
    for given, match in (
        ({"position_ids": places, "seq_idx": other}, "seq_idx and of position_ids differ"),
        ({"position_ids": places[:1], "cu_seq_lens_q": torch.tensor([0, 6, 12])}, "cu_seq_lens_q"),
    ):
        rows = len(given["position_ids"])
        with pytest.raises(UnsupportedError, match=match):
            model(ids[:rows], use_cache=False, **given)
    lengths = torch.tensor([0, *LENGTHS]).cumsum(0)
    with pytest.raises(UnsupportedError, match="of cu_seq_lens_q and of seq_idx differ"):
        model(ids[:1], use_cache=False, seq_idx=seq_idx[:1], cu_seq_lens_q=lengths[::3])
    with pytest.raises(UnsupportedError, match=r"seq_idx has the shape \(2, 11\)"):
        model(ids, use_cache=False, seq_idx=seq_idx[:, 1:])
    cache = output_cache(model(ids[:1]))
    with pytest.raises(UnsupportedError, match=r"14 keys|from a state"):
        model(ids[:1, :2], **cache_argument(cache), seq_idx=torch.tensor([[0, 1]]))


def test_packing_is_compared_once_per_mask(packed, seq_idx, monkeypatch, llama):
    model = llama()
    attnzoo.swap(model, "flash")
    compare, compared = packing._segment_ids, []
    monkeypatch.setattr(packing, "_segment_ids", lambda *a: compared.append(a) or compare(*a))
    ids, places = packed
    model(ids, position_ids=places, seq_idx=seq_idx, use_cache=False)
    assert len(compared) == 1
    assert len(model.model.layers) > 1


def test_compiled_packing_of_other_numbers_of_sequences(llama):
    model = attnzoo.swap(llama(num_hidden_layers=1), "flash")
    torch._dynamo.reset()
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    ids = torch.arange(12)[None] + 5

    def run(cut, places):
        lengths = torch.tensor(cut)
        torch._dynamo.mark_dynamic(lengths, 0)  # one graph for all
        given = {"cu_seq_lens_q": lengths, "use_cache": False}
        return compiled(ids, position_ids=places, **given).last_hidden_state

    with torch.no_grad():
        for cut in ([0, 5, 12], [0, 3, 4, 9, 12]):
            lengths = torch.tensor(cut)
            places = torch.cat([torch.arange(n) for n in lengths.diff()])[None]
            parts = ids.tensor_split(lengths[1:-1], 1)
            expected = torch.cat([model.model(x).last_hidden_state for x in parts], 1)
            assert_close(run(cut, places), expected, atol=1e-4, rtol=1e-4)
        with pytest.raises(RuntimeError, match=r"packed sequences of .*, position_ids differ"):
            run([0, 3, 12], places)


@pytest.mark.parametrize("lengths", [[3, 12], [0, 7, 5, 12], [0, 5, 13]])
def test_lengths_that_are_not_cumulative(lengths, llama):
    model = llama()
    attnzoo.swap(model, "flash")
    with pytest.raises(UnsupportedError, match="cumulative lengths begin with 0, do not decrease"):
        model(torch.arange(12)[None], cu_seq_lens_k=torch.tensor(lengths))


# -- custom masks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd_mask():
    """Causal, with a hole that no window or padding describes; [3, 1, 12, 12]."""
    seen = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    seen[1, :, 6:, 2:4] = False
    return seen


@pytest.mark.parametrize("backend", EXACT)
def test_bool_mask_of_four_dimensions(backend, llama, ids, odd_mask):
    model = llama()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(ids, attention_mask=odd_mask).logits
        attnzoo.swap(model, backend)
        found = model(ids, attention_mask=odd_mask).logits
        plain = model(ids).logits
    assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (plain - expected).abs().max() > 1e-2


@pytest.mark.parametrize("backend", EXACT)
def test_additive_mask_of_four_dimensions(backend, llama, ids, odd_mask):
    model = llama()
    bias = torch.randn(3, 4, 12, 12).masked_fill(~odd_mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(ids, attention_mask=bias).logits
        attnzoo.swap(model, backend)
        found = model(ids, attention_mask=bias).logits
    assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["linear", "gated_linear"])
def test_linear_backends_refuse_masks_of_four_dimensions(backend, llama, ids, odd_mask):
    model = llama()
    attnzoo.swap(model, backend)
    for cached in (True, False):
        with pytest.raises(UnsupportedError, match=rf"layers\.0.*'{backend}'") as error:
            model(ids, attention_mask=odd_mask, use_cache=cached)
        assert "an arbitrary 4-D tensor" in str(error.value)
    with pytest.raises(UnsupportedError, match="additive bias"):
        model(ids, attention_mask=odd_mask.float(), use_cache=False)


def test_masks_of_other_dimensions_are_refused(llama, ids):
    model = llama()
    attnzoo.swap(model, "flash")
    with pytest.raises(UnsupportedError, match=r"Tensor of shape \(3, 12, 12\)"):
        attnzoo.hf.attention.call.attention(
            model.model.layers[0].self_attn,
            *torch.randn(3, 3, 4, 12, 8),
            torch.ones(3, 12, 12),
        )


# -- transformers' mask functions ----------------------------------------------------------------


def after_four(batch, head, q, kv):
    return kv < 4


def made(config: Any, kind: str, ids: Tensor, **given: Any) -> Any:
    """Make a mask as a model does, with the implementation that the config names."""
    maker = getattr(masking_utils, f"create_{kind}_mask")
    arguments = {"attention_mask": None, **cache_argument(None), **given}
    return maker(config, torch.zeros(*ids.shape, 8), **arguments)


PACKED = {"position_ids": torch.tensor([[*range(5), *range(7)]])}
KNOWN = [
    ("causal", {}),
    ("causal", PACKED),
    ("sliding_window_causal", {}),
    ("sliding_window_causal", PACKED),
    ("bidirectional", {}),
    ("bidirectional_sliding_window", {}),
]
BLOCKS = torch.tensor([[0, 0, 0, -1, -1, -1, -1, 1, 1, -1, -1, -1]]).expand(3, -1)
UNKNOWN = [
    ("causal", {"or_mask_function": after_four}),  # a bidirectional prefix
    ("causal", {"and_mask_function": after_four}),
    ("causal", {"block_sequence_ids": BLOCKS}),
    ("causal", {"or_mask_function": after_four, **PACKED}),
    ("sliding_window_causal", {"or_mask_function": after_four}),
    ("bidirectional", {"and_mask_function": after_four}),
    ("chunked_causal", {}),
]


@pytest.fixture
def mask_config(llama_config):
    config = llama_config(sliding_window=3, attention_chunk_size=5)
    config._attn_implementation = "attnzoo"
    return config


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("kind", "given"), KNOWN + UNKNOWN)
def test_masks_are_read_as_sdpa_builds_them(kind, given, padded, mask_config, ids, padding):
    if padded:  # transformers then does not look for packing
        given = {**given, "attention_mask": padding("left")}
    mask = made(mask_config, kind, ids, **given)
    assert isinstance(mask, ModelMask)
    mask_config._attn_implementation = "sdpa"
    expected = made(mask_config, kind, ids, **given)
    found = mask.dense(*mask.shape[2:], ids.device)
    every = torch.ones(mask.shape, dtype=torch.bool)
    if expected is None:  # sdpa leaves the plain ones out
        expected = every.tril() if "causal" in kind else every
    assert torch.equal((found if found is not None else every) & every, expected & every)


def test_masks_are_read_alike_in_a_compiled_graph(mask_config, ids):
    """A union that is counted as causal would lose the blocks of images and prefixes."""
    torch._dynamo.reset()
    known, unknown = KNOWN[1:6:2], [UNKNOWN[0], *UNKNOWN[2:4]]

    def read(ids: Tensor) -> list[tuple[Tensor, bool]]:
        masks = []
        for kind, given in known + unknown:
            given = {**PACKED, **given} if kind == "causal" else given  # traced in any case
            mask = made(mask_config, kind, ids, **given)
            found = mask.dense(*mask.shape[2:], ids.device)
            every = torch.ones(mask.shape, dtype=torch.bool)
            masks.append(((found if found is not None else every) & every, mask.function is None))
        return masks

    found = torch.compile(read, backend="eager", fullgraph=True)(ids)
    for (mask, _), (expected, _) in zip(found, read(ids), strict=True):
        assert torch.equal(mask, expected)
    assert [is_known for _, is_known in found] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(("kind", "given"), UNKNOWN[:3])
def test_unknown_masks_are_exact_or_refused(kind, given, llama, mask_config, ids):
    model = llama()
    mask = made(mask_config, kind, ids, **given)
    mask_config._attn_implementation = "eager"
    with torch.no_grad():
        expected = model(ids, attention_mask=made(mask_config, kind, ids, **given)).logits
        plain = model(ids).logits
        for backend in EXACT:
            attnzoo.swap(model, backend)
            found = model(ids, attention_mask=mask).logits
            assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (plain - expected).abs().max() > 1e-2
    for backend in ("linear", "gated_linear"):
        attnzoo.swap(model, backend)
        for cached in (True, False):
            with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn.*unknown function"):
                model(ids, attention_mask=mask, use_cache=cached)


@pytest.mark.parametrize("backend", ["softmax", "flash", "linear"])
def test_decoder_used_as_an_encoder(backend, llama, ids, padding):
    model = llama(is_causal=False)
    mask = padding("right")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[0]
        attnzoo.swap(model, backend)
        found = model(ids, attention_mask=mask, use_cache=False).logits[0]
        changed = model(ids.flip(1), attention_mask=mask, use_cache=False).logits[0]
    if backend != "linear":
        assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (changed.flip(0) - found).abs().max() > 1e-2


# -- the object itself ---------------------------------------------------------------------------


def test_counter_of_a_static_cache_is_read_when_the_mask_is_made():
    counter = torch.tensor(4)
    masks = [
        make_mask(
            batch_size=1,
            q_length=1,
            kv_length=8,
            q_offset=counter,
            mask_function=function,
            device=torch.device("cpu"),
        )
        for function in (
            masking_utils.causal_mask_function,
            masking_utils.or_masks(masking_utils.causal_mask_function, after_four),
        )
    ]
    counter += 3  # as the first layer's update does, before any backend reads it
    for mask in masks:
        assert mask.dense(1, 8, counter.device).flatten().tolist() == [True] * 5 + [False] * 3


def test_mask_moves_between_devices(ids, padding, mask_config):
    given = {"attention_mask": padding("left"), "or_mask_function": after_four}
    mask = made(mask_config, "causal", ids, **given).to("meta")
    assert mask.padding.device.type == "meta"
    assert mask.function().device.type == "meta"


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask[:, :, :2, 1:],
        lambda mask: 1 + mask,
        lambda mask: mask * 2,
        lambda mask: mask == 0,
        lambda mask: mask < 0,
        lambda mask: torch.cat([mask, mask], -1),
        lambda mask: torch.where(mask == 0, mask, 3.0),
        lambda mask: torch.ones(2, 1, 4, 4) + mask,
        lambda mask: mask.repeat(1, 3, 1, 1),
        lambda mask: mask.size(),
        lambda mask: mask.dtype,
        lambda mask: [float(row.sum()) for row in mask],
    ],
)
def test_models_that_compute_with_their_mask_get_the_eager_one(use):
    padding = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    sizes: dict[str, Any] = {"batch_size": 2, "q_length": 4, "kv_length": 4}
    mask = make_mask(**sizes, attention_mask=padding, dtype=torch.float32)
    found, expected = use(mask), use(masking_utils.eager_mask(**sizes, attention_mask=padding))
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected
    assert not hasattr(mask, "no_such_thing")


def test_a_model_mask_keeps_its_dtype_where_it_is_built():
    mask = make_mask(batch_size=1, q_length=3, kv_length=3, dtype=torch.bfloat16)
    assert mask.additive().dtype == torch.bfloat16
    assert float(mask[0, 0, 0, 1]) == torch.finfo(torch.bfloat16).min


def test_an_indexers_selection_is_honoured_by_exact_backends_and_refused_by_others(llama):
    model = llama()
    module = model.model.layers[0].self_attn
    q, kv = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    mask = make_mask(batch_size=2, q_length=3, kv_length=3)
    chosen = torch.tensor([[0, 2], [0, 1], [0, 2]]).expand(2, 3, 2).int()
    attnzoo.swap(model, "softmax")
    out, _ = attention(module, q, kv, kv, mask, indices=chosen)
    torch.testing.assert_close(out[:, 0, 0], kv[:, 0, 0])  # it attends to key 0 only
    seen = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    right = softmax_attention(q, kv, kv, mask=seen[None, None]).out
    torch.testing.assert_close(out, right.transpose(1, 2))
    attnzoo.swap(model, "linear")
    with pytest.raises(UnsupportedError, match="sparse indexer's selection"):
        attention(module, q, kv, kv, mask, indices=chosen)


@pytest.mark.parametrize(
    ("sizes", "window", "expected"),
    [((4, 4), None, 10), ((1, 4), None, 4), ((4, 4), 2, 7), ((1, 4), 2, 2)],
)
def test_layers_without_a_mask(sizes, window, expected):
    mask, bias = read_mask(None, causal=True, window=window, q_length=sizes[0], kv_length=sizes[1])
    assert bias is None
    assert int(mask.dense(*sizes, torch.device("cpu")).sum()) == expected


def test_positions_of_queries_are_required():
    with pytest.raises(UnsupportedError, match="3 queries, 9 keys and no mask"):
        read_mask(None, causal=True, window=None, q_length=3, kv_length=9)
    mask, _ = read_mask(None, causal=False, window=None, q_length=3, kv_length=9)
    assert mask.dense(3, 9, torch.device("cpu")) is None


@pytest.mark.parametrize("backend", EXACT)
def test_outputs_at_padding_are_those_of_sdpa(backend):
    """SigLIP reads the last position of its text, which may be padding."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    config = hf.SiglipTextConfig(**sizes, num_hidden_layers=2, vocab_size=99)
    model = hf.SiglipTextModel(config).eval()
    ids, mask = torch.randint(3, 99, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, -3:] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).pooler_output
        attnzoo.swap(model, backend)
        assert_close(model(ids, attention_mask=mask).pooler_output, expected)
