"""Sequences of one row and slots of a pool of states, as engines pass them, against single rows."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.contract import backend
from attnzoo.contract.backend import AttentionBackend, register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, LinearState
from attnzoo.errors import UnsupportedError
from attnzoo.registry import get_backend

H, HKV, D, E, M = 4, 2, 8, 6, 12
LENGTHS = 5, 1, 9, 3
CASES = {
    "linear": ("linear", {}),
    "positions": ("linear", {"feature_map": "cosine", "max_length": 64}),
    "learned map": ("linear", {"feature_map": "hedgehog"}),
    "hybrid": ("linear", {"window": 4, "num_sinks": 2}),
    "retnet": ("gated_linear", {"gate": "retnet"}),
    "gla": ("gated_linear", {"gate": "gla"}),
    "gated hybrid": ("gated_linear", {"gate": "gla", "window": 4}),
    "mlstm": ("gated_linear", {"gate": "mlstm", "feature_map": "identity"}),
    "rwkv6": ("gated_linear", {"gate": "rwkv6"}),
    "matrix": ("gated_linear", {"gate": "matrix"}),
    "performer": ("performer", {"num_features": 16}),
    "performer hybrid": ("performer", {"num_features": 16, "window": 4}),
    "delta": ("delta", {}),
    "delta convolution": ("delta", {"short_convolution": 3, "output_gate": True}),
    "delta hybrid": ("delta", {"window": 4, "num_sinks": 2, "short_convolution": 3}),
}


def build(name):
    kind, options = CASES[name]
    cls = get_backend(kind)
    geometry = Geometry(
        num_heads=H, num_key_heads=HKV, head_dim=D, value_dim=E, hidden_size=M, causal=True
    )
    layer = cls(cls.config_class(**options), geometry).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def make(tokens, dtype=torch.float32):
    q, x = torch.randn(1, H, tokens, D), torch.randn(1, tokens, M)
    k, v = torch.randn(1, HKV, tokens, D), torch.randn(1, HKV, tokens, E)
    return [y.to(dtype) for y in (q, k, v, x)]


def run(layer, inputs, **options):
    q, k, v, x = inputs
    return layer(q, k, v, hidden_states=x, return_state=True, **options)


def pool_of(states, slots, size):
    """Return a pool with states at slots, NaN in others and between its states."""
    tensors = []
    for parts in zip(*states, strict=True):
        shape = parts[0].shape[1:]
        numbers = shape.numel()
        empty = -(2**40) if not parts[0].is_floating_point() else torch.nan
        memory = torch.full((size, numbers + 5), empty, dtype=parts[0].dtype)
        pool = memory[:, :numbers].view(size, *shape)
        for slot, part in zip(slots, parts, strict=True):
            pool[slot] = part[0]
        tensors.append(pool)
    return type(states[0])(*tensors)


def refuse_another_pool(pool, slots, output):
    """Stand in for ``keep_pool``: the op must have written the pool itself."""
    assert all(new is old for new, old in zip(output.state, pool, strict=True))
    return output


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_each_sequence_equals_a_row_of_its_own(name, dtype, monkeypatch):
    monkeypatch.setattr(backend, "keep_pool", refuse_another_pool)
    layer = build(name)
    first, second, third = ([make(n, dtype) for n in LENGTHS] for _ in range(3))
    sequences = Sequences.from_cu_seqlens(torch.tensor([0, *LENGTHS]).cumsum(0))
    row = [torch.cat(parts, 2 if i < 3 else 1) for i, parts in enumerate(zip(*first, strict=True))]
    found = run(layer, row, sequences=sequences)
    rows = [run(layer, x) for x in first]
    tight = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    assert_close(found.out, torch.cat([x.out for x in rows], 2), **tight)
    row = [torch.cat(parts, 2 if i < 3 else 1) for i, parts in enumerate(zip(*second, strict=True))]
    found = run(layer, row, sequences=sequences, state=found.state)
    rows = [run(layer, x, state=old.state) for x, old in zip(second, rows, strict=True)]
    assert_close(found.out, torch.cat([x.out for x in rows], 2), **tight)

    # one token of each after that, from slots of a pool
    tokens = [[y[:, :, -1:] for y in x[:3]] + [x[3][:, -1:]] for x in third]
    slots, size = [6, 2, 7, 3], 9
    pool = pool_of([x.state for x in rows], slots, size)
    before = [x.clone() for x in pool]
    batch = [torch.cat(parts) for parts in zip(*tokens, strict=True)]
    batch = [torch.cat([x, torch.full_like(x[:1], torch.nan)]) for x in batch]
    given = torch.tensor([*slots, -1])
    after = run(layer, batch, state=pool, slots=given, reuse_state=True)
    rows = [run(layer, x, state=old.state) for x, old in zip(tokens, rows, strict=True)]
    assert_close(after.out[:-1], torch.cat([x.out for x in rows]), **tight)
    others = [i for i in range(size) if i not in slots]
    for i, (ours, own) in enumerate(zip(pool, after.state, strict=True)):
        assert own is ours
        assert_close(ours[slots], torch.cat([x.state[i] for x in rows]), rtol=1e-4, atol=1e-5)
        assert_close(ours[others], before[i][others], equal_nan=True, rtol=0, atol=0)


@torch.no_grad()
def test_a_backend_that_returns_a_new_pool_has_its_rows_written():
    @register("test_new_pool")
    class NewPool(AttentionBackend):
        """Returns copies; the state counts tokens."""

        capabilities = Capabilities(sequences=True, recurrent=True, zero_state=True)

        def attend(self, inputs):
            new = LinearState(*(x.clone() for x in inputs.state))
            new.kv[inputs.slots] += 1
            return AttentionOutput(inputs.v, new)

    layer = NewPool(BackendConfig(), Geometry(num_heads=1, num_key_heads=1, head_dim=2))
    pool = LinearState(torch.zeros(3, 1), torch.zeros(3, 1))
    x = torch.zeros(2, 1, 1, 2)
    options = {"state": pool, "slots": torch.tensor([2, 0]), "return_state": True}
    assert layer(x, x, x, **options).state.kv is not pool.kv
    assert not pool.kv.any()
    assert layer(x, x, x, reuse_state=True, **options).state.kv is pool.kv
    assert pool.kv.tolist() == [[1], [0], [1]]


@torch.no_grad()
def test_calls_that_do_not_fit_are_refused():
    layer, x = build("linear"), make(4)
    sequences = Sequences.from_cu_seqlens(torch.tensor([0, 1, 4]))
    mask = AttentionMask(causal=True, padding=torch.ones(1, 4, dtype=torch.bool))
    for options, words in (
        ({"mask": mask}, "together with padding"),
        ({"slots": torch.tensor([0])}, "together with both"),
        ({"return_weights": True}, "run them as rows"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            run(layer, x, sequences=sequences, **options)
    with pytest.raises(UnsupportedError, match="rows of a pool of states"):
        run(layer, make(1), slots=torch.tensor([0]))
    with pytest.raises(UnsupportedError, match="there are no tokens"):
        run(layer, make(0), sequences=sequences)
    flash = get_backend("flash")
    exact = flash(flash.config_class(), layer.geometry)
    with pytest.raises(UnsupportedError, match="rows of a batch, not sequences"):
        exact(*x[:3], sequences=sequences)


PACKED = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
REAL = torch.tensor([[True] * 9, [False] * 3 + [True] * 6])
MASKS = {
    "packed": AttentionMask(causal=True, segment_ids=PACKED),
    "packed and padded": AttentionMask(causal=True, segment_ids=PACKED, padding=REAL),
    "padded": AttentionMask(causal=True, padding=REAL),
}


def pairs():
    q, k, v, x = (torch.cat([a, b]) for a, b in zip(make(9), make(9), strict=True))
    return [torch.stack([y, 2 * y]) for y in (q, k, v, x)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "packed and padded") for name in CASES), *(("linear", kind) for kind in MASKS)],
)
def test_vmap_over_rows_of_several_sequences(name, kind):
    layer, inputs = build(name), pairs()

    def call(*given):
        output = run(layer, given, mask=MASKS[kind])
        return (output.out * REAL[:, None, :, None], *output.state)

    with torch.no_grad():
        expected = [torch.stack(x) for x in zip(*map(call, *inputs), strict=True)]
        found = torch.vmap(call)(*inputs)
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["gla", "matrix", "delta", "hybrid"])
def test_vmap_over_borders_of_sequences_is_refused(name):
    layer = build(name)

    def call(q, k, v, x, ids):
        return run(layer, (q, k, v, x), mask=AttentionMask(causal=True, segment_ids=ids)).out

    with pytest.raises(UnsupportedError, match=r"torch\.vmap with a mapped mask \(segment_ids\)"):
        torch.vmap(call)(*pairs(), torch.stack([PACKED, PACKED.flip(0)]))
