"""Linear attention and the delta rule by flash-linear-attention (fla), called in its own terms.

fla takes tokens before heads, ``[B, T, H, D]``, one key head per query head, gates in log space,
states ``[sequences, H, D, E]`` and packed sequences as ``cu_seqlens``. Its functions do not
normalise as ours do: sums of weights, which normalise the output and are part of a state, are those
of one more value, 1. What it computes wrong or not at all is a reason of refusal. Time O(T C D +
T D E), with chunks of C = 64 tokens. Source: Yang and Zhang, 2024,
https://github.com/fla-org/flash-linear-attention. Letters as in :mod:`attnzoo.ops.linear.api`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import DeltaState, LinearState
from attnzoo.ops.delta import common as delta
from attnzoo.ops.delta.torch import run_chunks as delta_chunks
from attnzoo.ops.linear import common as linear
from attnzoo.ops.linear.torch import run_torch
from attnzoo.runtime.first_call import differences, first_call_verdict
from attnzoo.runtime.kernel_calls import autocast_disabled, first_derivative_only, is_transformed

FLA: dict[str, Any] = {
    "name": "fla",
    "devices": ("cuda",),
    "automatic": "flash-linear-attention is installed",
    "form": "chunk form",
}
LARGEST = 256  # key and value size
OLDEST = "0.6"  # the functions have these arguments since then
LOWEST_LOG_DECAY = -100.0  # its exponential is 0; sums of much lower ones lose digits
VALUES = 16  # the values with that for the sum of weights are a multiple
# Releases of Triton that compile the backward pass with gates wrongly for Hopper GPUs (fla #640)
WRONG_ON_HOPPER = "3.4", "3.7.1"
TOKENS = (70, 60)  # of the case that is compared with torch, in two sequences

Inputs = TypeVar("Inputs", linear.LinearInputs, delta.DeltaInputs)


# -- what fla supports -----------------------------------------------------------------------------


def linear_reasons(x: linear.LinearInputs) -> list[str]:
    """Return every reason why fla does not support a call of linear attention."""
    reasons = _reasons(x, _size(x), may_round=False)
    if not x.causal:
        reasons.append("attention is bidirectional (the kernels are causal)")
    if x.v.dtype == torch.float16 and x.feature_map != "identity":
        reasons.append(f"features of {x.feature_map} may exceed float16 (take bfloat16)")
    if x.normalize and _is_trained(x):
        reasons.append("the output is normalised (its gradients lose digits in 16-bit sums)")
    return reasons


def delta_reasons(x: delta.DeltaInputs) -> list[str]:
    """Return every reason why fla does not support a call of the delta rule."""
    return _reasons(x, _size(x), may_round=x.normalize)


def _reasons(x: Inputs, size: int, may_round: bool) -> list[str]:
    if torch.compiler.is_compiling():
        return ["torch.compile records the call (fla's functions cannot be recorded)"]
    if missing := _missing():
        return [missing]
    reasons = []
    if is_transformed():
        reasons.append("torch.func or forward-mode differentiation transforms the call")
    if x.v.dtype not in (torch.bfloat16, torch.float16):
        kind = str(x.v.dtype).removeprefix("torch.")
        reasons.append(f"values are {kind} (fla multiplies in 16 bits, or in TF32)")
    elif not (x.q.dtype == x.k.dtype == x.v.dtype or may_round or x.v.dtype == torch.bfloat16):
        reasons.append("queries and keys are not float16 as the values")
    if max(size, x.v.shape[3]) > LARGEST:
        reasons.append(f"key size is {size} and value size {x.v.shape[3]} (at most {LARGEST})")
    if x.chunk_size is not None:
        reasons.append(f"chunk_size is {x.chunk_size} (fla chooses it; leave it out)")
    if x.sequences is not None and x.sequences.rows is not None:
        reasons.append("the number of sequences is unknown while a graph is captured")
    if x.log_decay is not None and _is_trained(x) and (found := _wrong_triton(x.q.device)):
        reasons.append(found)
    return reasons


@cache
def _missing() -> str:
    """Return why fla cannot be imported, or ""."""
    try:
        version = metadata.version("fla-core")  # of which flash-linear-attention is made
    except metadata.PackageNotFoundError:
        return "flash-linear-attention is not installed (pip install 'attnzoo[fla]')"
    if TorchVersion(version) < OLDEST:
        return f"fla-core {version} is installed ({OLDEST} or later is needed)"
    return ""


@cache
def _wrong_triton(device: torch.device) -> str:
    """Return why gradients with gates would be wrong on a GPU, or ""."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return ""
    version = metadata.version("triton")
    if not WRONG_ON_HOPPER[0] <= TorchVersion(version) < WRONG_ON_HOPPER[1]:
        return ""
    return (
        f"Triton {version} compiles the gradients of gates wrongly for Hopper GPUs (install 3.7.1)"
    )


def _size(x: linear.LinearInputs | delta.DeltaInputs) -> int:
    """Return the size of the features of keys, D."""
    if isinstance(x, delta.DeltaInputs):
        return x.k.shape[3]
    return linear.like_features(x.k, x.feature_map, x.map_weights).shape[3]


def _is_trained(x: linear.LinearInputs | delta.DeltaInputs) -> bool:
    """Return whether the call is recorded for a backward pass."""
    if not torch.is_grad_enabled():
        return False
    more = (x.beta,) if isinstance(x, delta.DeltaInputs) else (x.map_weights or ())
    tensors = (x.q, x.k, x.v, x.log_decay, *(x.state or ()), *more)
    return any(t is not None and t.requires_grad for t in tensors)


# -- calls -----------------------------------------------------------------------------------------


def run_linear(x: linear.LinearInputs) -> linear.Result:
    """Compute linear attention with ``chunk_simple_gla``, or ``chunk_gla`` for decays per channel.

    A call for its output alone, not normalised, has no sums of weights.
    """
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    size = x.v.shape[3]
    with autocast_disabled(x.q.device):
        x = linear.map_inputs(x)
        values, first = x.v, None if x.state is None else x.state.kv
        if x.normalize or x.return_state:
            more = -(size + 1) % VALUES
            values = F.pad(F.pad(x.v, (0, 1), value=1.0), (0, more))
            if x.state is not None:
                first = F.pad(torch.cat([x.state.kv, x.state.k.unsqueeze(3)], 3), (0, more))
        function = chunk_gla if x.log_decay is not None and x.log_decay.dim() == 4 else None
        out, last = _call(function or chunk_simple_gla, "linear_attention", x, values, first)
        if x.normalize:
            weights = out[..., size : size + 1].float() + x.eps
            out = (out[..., :size].float() / weights).to(x.v.dtype)
        out = out[..., :size]
        if last is None:
            return out, None
        kv, z = last[..., :size], last[..., size]
        return out, LinearState(kv.contiguous(), z.contiguous())


def run_delta(x: delta.DeltaInputs) -> delta.Result:
    """Compute the delta rule with the function for its decay."""
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    x = delta.normalized(x)
    function = chunk_delta_rule
    if x.log_decay is not None:
        function = chunk_kda if x.log_decay.dim() == 4 else chunk_gated_delta_rule
    state = None if x.state is None else x.state.kv
    out, last = _call(function, "delta_attention", x, x.v, state)
    return out, None if last is None else DeltaState(last.contiguous())


def _call(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    op: str,
    x: linear.LinearInputs | delta.DeltaInputs,
    values: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Call a function of fla; returns the output ``[B, H, T, E]`` and the last state.

    Tokens outside of sequences follow the sequence before them, as zeros, which change no state.
    """
    tokens, heads, key_heads = x.q.shape[2], x.q.shape[1], x.k.shape[1]
    groups = heads // key_heads
    inside = None if x.sequences is None else x.sequences.inside(tokens)

    def arrange(y: Tensor, repeats: int = 1) -> Tensor:
        if inside is not None:
            y = torch.where(inside.view(-1, *(1,) * (y.dim() - 3)), y, 0)
        y = y.transpose(1, 2)
        return y if repeats == 1 else y.repeat_interleave(repeats, 2)

    dtype = values.dtype
    named = {
        "q": arrange(x.q.to(dtype)),
        "k": arrange(x.k.to(dtype), groups),
        "v": arrange(values, groups),
    }
    if isinstance(x, delta.DeltaInputs):
        named["beta"] = arrange(x.beta, groups)
    if x.log_decay is not None:
        decay = x.log_decay.float().clamp(min=LOWEST_LOG_DECAY)
        decay = decay[None, :, None].expand(x.k.shape[:3]) if decay.dim() == 1 else decay
        named["g"] = arrange(decay, groups)
    if state is not None:
        named["initial_state"] = state.repeat_interleave(groups, 1)
    tensors = _FirstDerivative.apply(op, *named.values())  # type: ignore[no-untyped-call]
    out, last = function(
        **dict(zip(named, tensors, strict=True)),
        scale=x.scale,
        output_final_state=x.return_state,
        cu_seqlens=None if x.sequences is None else x.sequences.cu_seqlens(tokens),
    )
    if last is not None:  # the same for all query heads of a key head
        last = last.unflatten(1, (key_heads, groups))[:, :, 0]
    return out.transpose(1, 2), last


class _FirstDerivative(torch.autograd.Function):
    """Its inputs; fla's gradients have no derivative, and this raises where one is asked for."""

    @staticmethod
    def forward(ctx: Any, op: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.op = op
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        same = first_derivative_only(ctx.op)(lambda _, *given: given)
        return None, *same(ctx, *grads)


# -- comparison with torch -------------------------------------------------------------------------


def linear_verdict(x: linear.LinearInputs) -> tuple[str, str]:
    """Return what the comparison of the first call of this kind with torch found."""
    return _verdict("linear", x, run_linear, linear.on_rows(run_torch))


def delta_verdict(x: delta.DeltaInputs) -> tuple[str, str]:
    """Return what the comparison of the first call of this kind with torch found."""
    return _verdict("delta", x, run_delta, delta.on_rows(delta_chunks))


def _verdict(
    op: str, x: Inputs, run: Callable[[Inputs], Any], exact: Callable[[Inputs], Any]
) -> tuple[str, str]:
    is_trained, decay = _is_trained(x), None if x.log_decay is None else x.log_decay.dim() == 4
    shape = (x.q.shape[1], x.k.shape[1], _size(x), x.v.shape[3], x.v.dtype)
    options = (x.sequences is None, x.state is None, x.return_state, x.normalize)
    kind = (op, decay, shape, options, is_trained)

    def compare() -> list[str]:
        small = _small_call(x)
        found = _results(small, run, is_trained, x.q.device)
        return differences(found, _results(small, exact, is_trained))

    return first_call_verdict("flash-linear-attention", kind, x.q.device, compare)


def _small_call(x: Inputs) -> Inputs:
    """Return a call of the same kind with random numbers, on the CPU; some gates are strong."""
    generator = torch.Generator().manual_seed(0)
    heads, size, count, dtype = x.k.shape[1], _size(x), 1, x.v.dtype
    sequences = None
    if x.sequences is not None:
        count, lengths = 2, torch.tensor(TOKENS)
        sequences = Sequences(lengths.cumsum(0) - lengths, lengths, TOKENS[0])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = (
        draw(1, n, sum(TOKENS), d).to(dtype)
        for n, d in ((x.q.shape[1], size), (heads, size), (heads, x.v.shape[3]))
    )
    new: dict[str, Any] = {"q": q, "k": F.normalize(k, dim=3), "v": v, "sequences": sequences}
    if x.log_decay is not None:
        decay = -draw(*k.shape).abs() / 2
        decay[:, 0, 10:13], decay[:, 0, TOKENS[0] + 5] = -40.0, -torch.inf
        new["log_decay"] = decay if x.log_decay.dim() == 4 else decay[..., 0]
    kv = draw(count, heads, size, x.v.shape[3])
    if isinstance(x, delta.DeltaInputs):
        new["beta"] = torch.rand(k.shape[:3], generator=generator)
        return x._replace(**new, state=None if x.state is None else DeltaState(kv))
    new |= {"feature_map": "identity", "map_weights": None}
    if x.normalize:  # sums of weights are positive
        new |= {"q": q.abs(), "k": new["k"].abs()}
    state = None if x.state is None else LinearState(kv, kv[..., 0].abs())
    return x._replace(**new, state=state)


def _results(
    x: Inputs,
    run: Callable[[Inputs], Any],
    is_trained: bool,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Return output, state and gradients by name, on the CPU; without a device, in float64."""
    leaves: dict[str, Tensor] = {}

    def move(name: str, y: Tensor) -> Tensor:
        y = y.double() if device is None else y.to(device)
        leaves[name] = y.detach().requires_grad_(is_trained)
        return leaves[name]

    names = [n for n in ("q", "k", "v", "beta", "log_decay") if getattr(x, n, None) is not None]
    new: dict[str, Any] = {name: move(name, getattr(x, name)) for name in names}
    if x.state is not None:
        fields = zip(x.state._fields, x.state, strict=True)
        new["state"] = type(x.state)(*(move(f"state.{name}", y) for name, y in fields))
    if x.sequences is not None and device is not None:
        starts, lengths = x.sequences.starts.to(device), x.sequences.lengths.to(device)
        new["sequences"] = Sequences(starts, lengths, x.sequences.longest)
    with torch.set_grad_enabled(is_trained):
        out, last = run(x._replace(**new))
    found = {"out": out}
    if x.return_state:
        found |= dict(zip(last._fields, last, strict=True))
    if is_trained:
        generator = torch.Generator().manual_seed(1)
        weights = (torch.randn(y.shape, generator=generator).to(y) for y in found.values())
        total = sum((y * w).sum() for y, w in zip(found.values(), weights, strict=True))
        grads = torch.autograd.grad(total, list(leaves.values()))
        found |= {f"d_{name}": y for name, y in zip(leaves, grads, strict=True)}
    return {name: y.detach().cpu() for name, y in found.items()}
