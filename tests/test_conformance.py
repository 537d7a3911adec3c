"""The conformance suite: built-in backends pass it, and each rule catches a broken backend."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig
from attnzoo.contract.states import AttentionOutput
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.registry import get_backend
from attnzoo.testing import RULES, ConformanceError, check_backend

BUILTIN = [
    ("softmax", {}),
    ("flash", {}),
    ("flash", {"window": 20}),
    ("flash", {"window": 5, "num_sinks": 2}),
    pytest.param("softmax", {"window": 5, "num_sinks": 2}, marks=pytest.mark.exhaustive),
    ("linear", {}),
    ("linear", {"feature_map": "hedgehog"}),
    ("linear", {"normalize": False, "chunk_size": 7}),
    pytest.param("linear", {"impl": "reference", "chunk_size": 32}, marks=pytest.mark.exhaustive),
    ("gated_linear", {"gate": "alibi", "feature_map": "exp", "chunk_size": 32}),
    ("gated_linear", {"gate": "gated_retention", "chunk_size": 7}),
    ("gated_linear", {"gate": "gla", "feature_map": "hedgehog", "chunk_size": 32}),
    ("linear", {"feature_map": "cosine", "max_length": 200, "chunk_size": 32}),
    ("gated_linear", {"gate": "mamba2", "feature_map": "dpfp", "chunk_size": 32}),
    (
        "gated_linear",
        {"gate": "hgrn2", "feature_map": "random", "num_features": 16, "chunk_size": 32},
    ),
    ("gated_linear", {"gate": "rwkv6", "feature_map": "relu", "chunk_size": 32}),
    ("gated_linear", {"gate": "mlstm", "feature_map": "hedgehog", "chunk_size": 32}),
    ("delta", {}),
    (
        "delta",
        {
            "gate": "vector",
            "feature_map": "squared_relu",
            "num_features": 12,
            "window": 20,
            "chunk_size": 16,  # C++ has no more, and 8,192 tokens take torch 10 s
        },
    ),
    ("delta", {"short_convolution": 4, "output_gate": True, "chunk_size": 16}),
    pytest.param(
        "delta", {"window": 5, "num_sinks": 2, "chunk_size": 32}, marks=pytest.mark.exhaustive
    ),
    pytest.param(
        "delta",
        {"gate": "none", "allow_negative_eigenvalues": True, "feature_map": "hedgehog"},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "gated_linear",
        {"gate": "matrix", "feature_map": "softmax", "impl": "torch"},
        marks=pytest.mark.exhaustive,  # its rules are in gated_linear/test_matrix_gate.py too
    ),
]


@pytest.mark.parametrize(("name", "options"), BUILTIN, ids=str)
def test_builtin_backends_conform(name, options):
    cls = get_backend(name)
    report = check_backend(cls, config=cls.config_class.from_options(name, options))
    assert {*report.passed, *report.skipped} == {rule.name for rule in RULES}
    assert "padding" in report.passed


@dataclass(frozen=True, kw_only=True)
class TinyConfig(BackendConfig):
    """Has a chunk size, from which the suite derives the lengths of its sequences."""

    chunk_size: int = 8


class TinyState(NamedTuple):
    kv: Tensor  # [B, Hkv, D, E]
    k: Tensor  # [B, Hkv, D]


class Tiny(AttentionBackend):
    """A correct backend that subclasses break in one place: linear attention with a gate."""

    config_class = TinyConfig
    capabilities = Capabilities(recurrent=True, needs_hidden_states=True)

    def __init__(self, config, geometry):
        super().__init__(config, geometry)
        self.gate = nn.Parameter(torch.empty(geometry.num_key_heads, geometry.hidden_size))
        self.bias = nn.Parameter(torch.empty(geometry.num_key_heads))
        self.register_buffer("widths", torch.empty(geometry.num_key_heads, geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gate, std=0.1)
        nn.init.zeros_(self.bias)
        nn.init.uniform_(self.widths, 0.5, 1.5)

    def keys(self, k, hidden, padding_mask):
        """Return the features of keys, [B, Hkv, S, D]."""
        features = F.elu(k * self.widths[:, None].to(k)) + 1
        gate = torch.sigmoid(F.linear(hidden, self.gate.to(hidden), self.bias.to(hidden)))
        features = features * gate.mT[..., None]
        return (
            features
            if padding_mask is None
            else features.masked_fill(~padding_mask[:, None, :, None], 0)
        )

    def before(self, state, like):
        """Return the sums over earlier tokens."""
        return state if state is not None else TinyState(*(x[:, :, 0] * 0 for x in like))

    def cumulative_sum(self, x):
        """Return the sums over the tokens up to each token."""
        return x.cumsum(2)

    def read_sums(self, q, kv, k):
        """Return the outputs of queries, computed from the sums, [B, Hkv, G, T, E]."""
        numerator = torch.einsum("bhgtd,bhtde->bhgte", q, kv)
        return numerator / (torch.einsum("bhgtd,bhtd->bhgt", q, k) + 1e-9)[..., None]

    def attend(self, inputs):
        wide = torch.promote_types(inputs.v.dtype, torch.float32)
        q, k, v, hidden = (x.to(wide) for x in (*inputs[:3], inputs.hidden_states))
        k = self.keys(k, hidden, inputs.mask.padding)
        q = (F.elu(q) + 1).unflatten(1, (k.shape[1], -1))
        each = TinyState(k[..., None] * v[..., None, :], k)
        past = self.before(inputs.state, each)
        if inputs.mask.causal:
            pairs = zip(each, past, strict=True)
            sums = TinyState(*(self.cumulative_sum(x) + s[:, :, None] for x, s in pairs))
        else:
            sums = TinyState(*(x.sum(2, True).expand_as(x) for x in each))
        state = TinyState(*(x[:, :, -1] for x in sums))
        return AttentionOutput(self.read_sums(q, *sums).flatten(1, 2).to(inputs.v.dtype), state)


def test_the_correct_backend_conforms():
    report = check_backend(Tiny)
    assert set(report.skipped) == {"statements", "exactness"}
    assert "does not state that it is exact" in str(report)
    assert any("bfloat16" in trial for trial in report.trials)


class Float32Output(Tiny):
    def attend(self, inputs):
        output = super().attend(inputs)
        return output._replace(out=output.out.float())


def test_the_dtype_of_an_output_is_named():
    with pytest.raises(ConformanceError, match="the output is float32 and the values are float64"):
        check_backend(Float32Output)


class NeedsContiguousInputs(Tiny):
    def attend(self, inputs):
        return super().attend(inputs._replace(v=inputs.v.view(-1).view_as(inputs.v)))


class RefusesNothing(Tiny):
    def unsupported_reasons(self, inputs):
        return []


class AttendsToTheNextToken(Tiny):
    def keys(self, k, hidden, padding_mask):
        ahead = torch.cat([hidden[:, 1:], hidden[:, -1:]], 1)
        return super().keys(k, ahead, padding_mask)


class ForgetsItsState(Tiny):
    def before(self, state, like):
        return super().before(None, like)


class KeepsItsStateInTheModule(Tiny):
    memory = None

    def attend(self, inputs):
        output = super().attend(inputs._replace(state=inputs.state and self.memory))
        self.memory = output.state
        return output


class KeysState(NamedTuple):
    kv: Tensor
    k: Tensor
    keys: Tensor


class StateGrows(Tiny):
    def attend(self, inputs):
        state = inputs.state
        output = super().attend(inputs._replace(state=state and TinyState(*state[:2])))
        keys = inputs.k if state is None else torch.cat([state.keys, inputs.k], 2)
        return output._replace(state=KeysState(*output.state, keys))


class GrowsAsDeclared(StateGrows):
    # it keeps the keys, but not the values
    capabilities = replace(Tiny.capabilities, state_grows=True)


class GrowsMoreThanDeclared(StateGrows):
    capabilities = replace(Tiny.capabilities, state_grows=True)

    def attend(self, inputs):
        output = super().attend(inputs)
        return output._replace(
            state=output.state._replace(keys=output.state.keys.repeat(1, 1, 1, 3))
        )


class CountsPadding(Tiny):
    def keys(self, k, hidden, padding_mask):
        return super().keys(k, hidden, None)


class DividesByZero(Tiny):
    def read_sums(self, q, kv, k):
        numerator = torch.einsum("bhgtd,bhtde->bhgte", q, kv)
        return numerator / torch.einsum("bhgtd,bhtd->bhgt", q, k)[..., None]


class LeaksAcrossSegments(Tiny):
    capabilities = replace(Tiny.capabilities, packing=True)


class IgnoresWindows(Tiny):
    capabilities = replace(Tiny.capabilities, windowed=True)


class ClaimsToBeExact(Tiny):
    capabilities = replace(Tiny.capabilities, exact=True)


class NormalisesItsOutput(Tiny):
    def read_sums(self, q, kv, k):
        out = super().read_sums(q, kv, k)
        return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6)


class IgnoresDropout(Tiny):
    capabilities = replace(Tiny.capabilities, dropout=True)


class BackwardForgetsPadding(Tiny):
    def keys(self, k, hidden, padding_mask):
        right, wrong = super().keys(k, hidden, padding_mask), super().keys(k, hidden, None)
        return right.detach() + wrong - wrong.detach()


class DetachesTheDenominator(Tiny):
    def read_sums(self, q, kv, k):
        return super().read_sums(q, kv, k.detach())


class AccumulatesInLowPrecision(Tiny):
    def attend(self, inputs):
        self.narrow = inputs.v.dtype
        return super().attend(inputs)

    def cumulative_sum(self, x):
        if self.narrow.itemsize > 2:
            return super().cumulative_sum(x)
        sums = list(x.to(self.narrow).unbind(2))
        for t in range(1, len(sums)):  # torch's own cumsum adds up in float32
            sums[t] = sums[t] + sums[t - 1]
        return torch.stack(sums, 2).to(x.dtype)


class OverflowsInFloat16(Tiny):
    def attend(self, inputs):
        self.narrow = inputs.v.dtype
        return super().attend(inputs)

    def read_sums(self, q, kv, k):
        q = 4 * q  # cancels unless an intermediate result overflows
        numerator = torch.einsum("bhgtd,bhtde->bhgte", q, kv)
        numerator = numerator.masked_fill(numerator.abs() > torch.finfo(self.narrow).max, torch.inf)
        return numerator / (torch.einsum("bhgtd,bhtd->bhgt", q, k) + 1e-9)[..., None]


class ResetsWithoutTheSeed(Tiny):
    def reset_parameters(self):
        super().reset_parameters()
        draw = torch.Generator()
        draw.seed()
        nn.init.uniform_(self.widths, 0.5, 1.5, generator=draw)


class SeedsEverything(Tiny):
    def __init__(self, config, geometry):
        torch.manual_seed(0)
        super().__init__(config, geometry)


class DoesNotSaveItsBuffer(Tiny):
    def __init__(self, config, geometry):
        super().__init__(config, geometry)
        self.register_buffer("widths", self.widths, persistent=False)


class ResetsHalfOfItself(Tiny):
    def __init__(self, config, geometry):
        super().__init__(config, geometry)
        nn.init.uniform_(self.widths, 0.5, 1.5)

    def reset_parameters(self):
        nn.init.normal_(self.gate, std=0.1)
        nn.init.zeros_(self.bias)


BROKEN = {
    "layout": NeedsContiguousInputs,
    "refusals": RefusesNothing,
    "causality": AttendsToTheNextToken,
    "decoding": ForgetsItsState,
    "batching": KeepsItsStateInTheModule,
    "state_size": StateGrows,
    "padding": CountsPadding,
    "masked_rows": DividesByZero,
    "packing": LeaksAcrossSegments,
    "statements": IgnoresWindows,
    "exactness": ClaimsToBeExact,
    "weights": NormalisesItsOutput,
    "dropout": IgnoresDropout,
    "padding_gradients": BackwardForgetsPadding,
    "gradients": DetachesTheDenominator,
    "precision": AccumulatesInLowPrecision,
    "long_gradients": OverflowsInFloat16,
    "determinism": ResetsWithoutTheSeed,
    "random_state": SeedsEverything,
    "saving": DoesNotSaveItsBuffer,
    "materializing": ResetsHalfOfItself,
}


def test_every_rule_has_its_broken_backend():
    assert set(BROKEN) == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_backend_is_caught(rule):
    with pytest.raises(ConformanceError) as caught:
        check_backend(BROKEN[rule], rules=[rule])
    assert caught.value.rule == rule, str(caught.value)
    assert BROKEN[rule].__name__ in str(caught.value)
    assert "H=4, Hkv=2, D=8, E=12" in str(caught.value)


def test_a_window_that_is_too_narrow_is_caught():
    class Narrow(AttentionBackend):
        capabilities = Capabilities(windowed=True)

        def attend(self, inputs):
            mask = inputs.mask
            if mask.window is not None:
                mask = replace(mask, window=(mask.window[0] - 1, mask.window[1]))
            return softmax_attention(*inputs[:3], mask=mask)

    with pytest.raises(ConformanceError, match="first key of the sliding window has no effect"):
        check_backend(Narrow, rules=["statements"])


def test_a_state_that_grows_is_smaller_than_keys_and_values():
    assert check_backend(GrowsAsDeclared, rules=["state_size"]).passed == ("state_size",)
    with pytest.raises(ConformanceError, match="no smaller than their keys and values") as caught:
        check_backend(GrowsMoreThanDeclared, rules=["state_size"])
    assert caught.value.rule == "state_size"


class TiedOnce(Tiny):
    """Has one tensor under two names, and so do the copies that loading makes of it."""

    def __init__(self, config, geometry):
        super().__init__(config, geometry)
        self.again = self.gate


class Tied(TiedOnce):
    def reset_parameters(self):
        super().reset_parameters()
        self.again = self.gate  # leaving the meta device makes two tensors of it


def test_tied_tensors_stay_tied():
    report = check_backend(Tied, rules=("saving", "materializing", "gradients"))
    assert report.passed == ("gradients", "saving", "materializing")
    with pytest.raises(ConformanceError, match="leaves again without a value"):
        check_backend(TiedOnce, rules=["saving", "materializing"])


def test_a_backend_without_supported_layers_raises():
    class Nothing(Tiny):
        capabilities = replace(Tiny.capabilities, causal=False, bidirectional=False)

    with pytest.raises(ConformanceError, match="neither a causal nor a bidirectional layer"):
        check_backend(Nothing)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"'paddin'. Did you mean 'padding'\?"):
        check_backend(Tiny, rules=["paddin"])
    with pytest.raises(ValueError, match=r"Tiny takes none of the dtypes torch\.int64"):
        check_backend(Tiny, dtypes=[torch.int64])


def test_a_backend_with_few_dtypes_is_checked_in_these():
    class Narrow(Tiny):
        dtypes = frozenset({torch.float32, torch.bfloat16})

    report = check_backend(Narrow, rules=["layout", "gradients", "precision"])
    assert report.skipped["gradients"] == "differences of outputs need float64"
    assert "precision" in report.passed
    assert not any("float64" in trial for trial in report.trials)


def test_the_check_does_not_change_random_state_and_threads():
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    check_backend(Tiny, rules=("layout", "random_state", "determinism"))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads
