"""How ``gpu.py`` calls ours and the others: the same inputs, in the layout that each wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_cases import Work
from torch import Tensor

from attnzoo.ops.flash import sdpa_backend
from attnzoo.ops.linear import linear_attention
from attnzoo.state import LinearState

Inputs = list[Tensor | None]  # q, k, v and the log decay
Run = Callable[[], Tensor]


class Skip(Exception):
    """Why a peer is left out."""


def inputs_of(work: Work, device: torch.device, mean: float = 0.0) -> Inputs:
    """Draw q, k, v and the log decay as a model's layers lay them out: ``[B, T, H, D]`` inside."""

    def rows(heads: int) -> Tensor:
        x = torch.randn(work.B, work.T, heads, work.D, device=device, dtype=torch.bfloat16)
        return x.transpose(1, 2)

    q, k, v = rows(work.H), rows(work.key_heads), rows(work.key_heads) + mean
    shape = {"none": None, "scalar": k.shape[:3], "vector": k.shape}[work.decay]
    gates = None if shape is None else -torch.rand(shape, device=device) / 16
    return [x if x is None else x.detach().requires_grad_(work.train) for x in (q, k, v, gates)]


def call(run: Run, given: Inputs, *, train: bool) -> list[Tensor]:
    """Run forward, or forward and backward for a fixed gradient."""
    if not train:
        with torch.no_grad():
            return [run()]
    out = run()
    leaves = [x for x in given if x is not None]
    generator = torch.Generator(out.device).manual_seed(7)
    d_out = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.bfloat16)
    grads = torch.autograd.grad(out, leaves, d_out.to(out.dtype), allow_unused=True)
    return [out, *(x for x in grads if x is not None)]  # softmax has no use for a decay


def ours(work: Work, given: Inputs, impl: str = "triton") -> Run:
    """Linear attention of attnzoo."""
    q, k, v, gates = given
    assert q is not None
    assert k is not None
    assert v is not None
    options: dict[str, Any] = {
        "log_decay": gates,
        "normalize": work.normalize,
        "feature_map": work.feature_map,
        "impl": impl,
    }
    if work.decode:
        shape = (work.B, work.key_heads, work.D, work.D)
        state = LinearState(
            torch.rand(shape, device=q.device), torch.rand(shape[:3], device=q.device)
        )
        options |= {"form": "recurrent", "state": state, "return_state": True}
    return lambda: linear_attention(q, k, v, **options).out


def fla(work: Work, given: Inputs) -> Run:
    """flash-linear-attention, with k and v repeated where heads are grouped, as it wants them."""
    if given[0] is None or given[0].device.type != "cuda":
        raise Skip("fla runs on a GPU only")
    try:
        from fla.ops.gla import chunk_gla
        from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        raise Skip(f"fla cannot be imported: {error}") from error
    groups = work.H // work.key_heads

    def laid_out(x: Tensor, repeat: int) -> Tensor:
        x = x.transpose(1, 2)
        return x.repeat_interleave(repeat, 2) if repeat > 1 else x

    def run() -> Tensor:
        q, k, v = (laid_out(x, n) for x, n in zip(given[:3], (1, groups, groups), strict=True))  # type: ignore[arg-type]
        if work.feature_map == "elu+1":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        gates = None if given[3] is None else laid_out(given[3], groups)
        if work.decay == "scalar":
            out, _ = chunk_simple_gla(q, k, v, g=gates, scale=1.0)
        elif work.decay == "vector":
            out, _ = chunk_gla(q, k, v, g=gates, scale=1.0)
        else:
            attend = fused_recurrent_linear_attn if work.decode else chunk_linear_attn
            out, _ = attend(q, k, v, scale=1.0, normalize=work.normalize)
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    return run


def sdpa(work: Work, given: Inputs) -> Run:
    """Torch's causal softmax attention, by the kernel that it picks."""
    q, k, v, _ = given
    assert q is not None
    assert k is not None
    assert v is not None
    sdpa_backend(q, k, v, is_causal=True)  # says which, where there is a choice
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def xformers(work: Work, given: Inputs) -> Run:
    """Xformers' causal softmax attention."""
    if given[0] is None or given[0].device.type != "cuda":
        raise Skip("xformers runs on a GPU only")
    try:
        from xformers.ops import LowerTriangularMask, memory_efficient_attention
    except ImportError as error:
        raise Skip(f"xformers cannot be imported: {error}") from error
    q, k, v = (x.transpose(1, 2) for x in given[:3])  # type: ignore[union-attr]
    return lambda: memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask())


PEERS = {"fla": fla, "sdpa": sdpa, "xformers": xformers}


def copy_gigabytes(device: torch.device) -> float | None:
    """Measure a large copy's bandwidth, bytes read plus bytes written; ``None`` without a GPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * 2**30 / sorted(times)[len(times) // 2] / 1e6
