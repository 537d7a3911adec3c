"""Calls of attnzoo and its peers for ``gpu.py``: equal inputs, in the layout of each peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_cases import Workload
from gpu_rows import PeerUnavailable
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import LinearState
from attnzoo.ops.block_sparse.api import block_sparse_attention
from attnzoo.ops.delta.api import delta_attention
from attnzoo.ops.features.functional import MapWeights
from attnzoo.ops.flash.api import flash_attention
from attnzoo.ops.flash.sdpa import sdpa_kernel_name
from attnzoo.ops.gated.mlstm import mlstm_attention
from attnzoo.ops.gated.rwkv6 import rwkv6_attention
from attnzoo.ops.hybrid.api import LinearBranch, hybrid_attention
from attnzoo.ops.hybrid.parts import HybridState
from attnzoo.ops.linear.api import linear_attention

Inputs = list[Tensor | None]  # q, k, v and the log decay
Run = Callable[[], Tensor]


def inputs_of(workload: Workload, device: torch.device, mean: float = 0.0) -> Inputs:
    """Return random q, k, v and log decay, stored as ``[B, T, H, D]`` like projections."""

    def rows(heads: int) -> Tensor:
        x = torch.randn(
            workload.B, workload.T, heads, workload.D, device=device, dtype=torch.bfloat16
        )
        return x.transpose(1, 2)

    q, k, v = rows(workload.H), rows(workload.key_heads), rows(workload.key_heads) + mean
    shape = {"none": None, "scalar": k.shape[:3], "vector": k.shape}[workload.decay]
    gates = None if shape is None else -torch.rand(shape, device=device) / 16
    return [x if x is None else x.detach().requires_grad_(workload.train) for x in (q, k, v, gates)]


def prepared(run: Run, inputs: Inputs, *, train: bool) -> Callable[[], list[Tensor]]:
    """Return a function that runs forward, or forward + backward with a fixed output gradient."""

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [run()]

    if not train:
        return forward
    leaves = [x for x in inputs if x is not None]
    d_out: list[Tensor] = []

    def forward_and_backward() -> list[Tensor]:
        out = run()
        if not d_out:
            generator = torch.Generator(out.device).manual_seed(7)
            like = {"device": out.device, "generator": generator, "dtype": torch.bfloat16}
            d_out.append(torch.randn(out.shape, **like).to(out.dtype))
        grads = torch.autograd.grad(out, leaves, d_out[0], allow_unused=True)
        return [out, *(x for x in grads if x is not None)]  # softmax ignores the decay

    return forward_and_backward


def attnzoo_kernels(workload: Workload, inputs: Inputs, impl: str = "triton") -> Run:
    """Return a call of attnzoo for the mechanism of a workload."""
    if workload.mechanism != "linear":
        return _MECHANISMS[workload.mechanism](workload, inputs, impl)
    q, k, v, gates = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    options: dict[str, Any] = {
        "log_decay": gates,
        "normalize": workload.normalize,
        "feature_map": workload.feature_map,
        "impl": impl,
    }
    if workload.decode:
        shape = (workload.B, workload.key_heads, workload.D, workload.D)
        state = LinearState(
            torch.rand(shape, device=q.device), torch.rand(shape[:3], device=q.device)
        )
        options |= {"state": state, "return_state": True}
    return lambda: linear_attention(q, k, v, **options).out


def _hybrid(workload: Workload, inputs: Inputs, impl: str) -> Run:
    """Return a window hybrid with hedgehog, 2 D features; a decoding step reuses its state."""
    q, k, v, gates = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    size, generator = workload.D, torch.Generator().manual_seed(3)
    shape = {"generator": generator, "dtype": torch.float32}
    maps = [torch.randn(n, size, size, **shape) / size for n in (workload.H, workload.key_heads)]
    weights = MapWeights(*(x.bfloat16().to(q.device, q.dtype) for x in maps))
    branch = LinearBranch(
        *(q, k, torch.zeros(1, workload.H, 1, 1, device=q.device), gates),
        mean=True,
        feature_map="hedgehog",
        feature_scale=size**-0.5,
        map_weights=weights,
    )
    options: dict[str, Any] = {"window": workload.window, "scale": size**-0.5, "impl": impl}
    if workload.decode:
        rows = workload.B, workload.key_heads, workload.window
        sums = torch.rand(*rows[:2], 2 * size, size + 1, device=q.device)
        keys = k.new_zeros(*rows, size)
        features = branch._replace(k=keys).mapped().k
        seen = torch.full((workload.B,), 4096, device=q.device)
        state = HybridState(keys, keys.float(), features, sums, sums[..., -1].clone(), seen)
        options |= {"state": state, "return_state": True, "reuse_state": True}
    return lambda: hybrid_attention(q, k, v, branch, **options).out


def _mlstm(workload: Workload, inputs: Inputs, impl: str) -> Run:
    q, k, v, gates = inputs
    assert gates is not None
    return lambda: mlstm_attention(q, k, v, log_forget=gates, log_input=gates, impl=impl).out  # type: ignore[arg-type]


def _rwkv6(workload: Workload, inputs: Inputs, impl: str) -> Run:
    q, k, v, gates = inputs
    assert gates is not None
    bonus = torch.zeros(workload.key_heads, workload.D, dtype=gates.dtype, device=gates.device)
    return lambda: rwkv6_attention(q, k, v, log_decay=gates, bonus=bonus, impl=impl).out  # type: ignore[arg-type]


def _write_strengths(k: Tensor) -> Tensor:
    """Return beta, ``[B, Hkv, T]``: the same for all implementations, between 0 and 1."""
    return torch.sigmoid(k.detach()[..., 0].float())


def _delta(workload: Workload, inputs: Inputs, impl: str) -> Run:
    q, k, v, gates = inputs
    assert k is not None
    beta = _write_strengths(k)
    options: dict[str, Any] = {"log_decay": gates, "normalize_qk": True, "impl": impl}
    return lambda: delta_attention(q, k, v, beta, **options).out  # type: ignore[arg-type]


def _block_sparse(workload: Workload, inputs: Inputs, impl: str) -> Run:
    q, k, v, _ = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    options: dict[str, Any] = {"mask": AttentionMask(causal=True), **dict(workload.sparse)}
    return lambda: block_sparse_attention(q, k, v, impl=impl, **options).out


def _window(workload: Workload, inputs: Inputs, impl: str) -> Run:
    """Return softmax attention in a sliding window, computed by torch's varlen kernel."""
    q, k, v, _ = inputs
    assert q is not None
    if q.device.type != "cuda":
        raise PeerUnavailable("torch's varlen kernel runs on a GPU only")
    mask = AttentionMask(causal=True, window=(workload.window - 1, 0))
    return lambda: flash_attention(q, k, v, mask=mask, impl="varlen").out  # type: ignore[arg-type]


_MECHANISMS: dict[str, Callable[[Workload, Inputs, str], Run]] = {
    "hybrid": _hybrid,
    "mlstm": _mlstm,
    "rwkv6": _rwkv6,
    "delta": _delta,
    "block_sparse": _block_sparse,
    "window": _window,
}


def remark(name: str, workload: Workload) -> str:
    """Return the remark printed next to a peer's time, or ""."""
    if name == "fla" and workload.decay == "scalar" and workload.train:
        # On Hopper, these versions may compute wrong gradients, and fla 0.6.0 raises an error
        return "fla's check for Triton 3.4 to 3.7 is disabled; only timed"
    return ""


def fla(workload: Workload, inputs: Inputs) -> Run:
    """Return a call of flash-linear-attention; grouped k and v are repeated."""
    if inputs[0] is None or inputs[0].device.type != "cuda":
        raise PeerUnavailable("fla runs on a GPU only")
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gla import chunk_gla
        from fla.ops.kda import chunk_kda
        from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        raise PeerUnavailable(f"fla cannot be imported: {error}") from error
    if remark("fla", workload):
        from fla.ops.common import chunk_o

        chunk_o.TRITON_ABOVE_3_7_1 = True
    groups = workload.H // workload.key_heads

    def to_fla_layout(x: Tensor, repeat: int) -> Tensor:
        x = x.transpose(1, 2)
        return x.repeat_interleave(repeat, 2) if repeat > 1 else x

    def run() -> Tensor:
        q, k, v = (
            to_fla_layout(x, n) for x, n in zip(inputs[:3], (1, groups, groups), strict=True)
        )  # type: ignore[arg-type]
        if workload.feature_map == "elu+1":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        gates = None if inputs[3] is None else to_fla_layout(inputs[3], groups)
        if workload.mechanism == "delta":
            assert inputs[1] is not None
            attend = chunk_gated_delta_rule if workload.decay == "scalar" else chunk_kda
            beta = _write_strengths(inputs[1]).transpose(1, 2)
            out, _ = attend(q, k, v, g=gates, beta=beta, scale=1.0, use_qk_l2norm_in_kernel=True)
        elif workload.decay == "scalar":
            out, _ = chunk_simple_gla(q, k, v, g=gates, scale=1.0)
        elif workload.decay == "vector":
            out, _ = chunk_gla(q, k, v, g=gates, scale=1.0)
        else:
            attend = fused_recurrent_linear_attn if workload.decode else chunk_linear_attn
            out, _ = attend(q, k, v, scale=1.0, normalize=workload.normalize)
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    return run


def sdpa(workload: Workload, inputs: Inputs) -> Run:
    """Return a call of torch's causal softmax attention, with the kernel that torch selects."""
    q, k, v, _ = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    sdpa_kernel_name(q, k, v, is_causal=True)  # raises if torch has no kernel
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def xformers(workload: Workload, inputs: Inputs) -> Run:
    """Return a call of xformers' causal softmax attention."""
    if inputs[0] is None or inputs[0].device.type != "cuda":
        raise PeerUnavailable("xformers runs on a GPU only")
    try:
        from xformers.ops import LowerTriangularMask, memory_efficient_attention
    except ImportError as error:
        raise PeerUnavailable(f"xformers cannot be imported: {error}") from error
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])  # type: ignore[union-attr]
    return lambda: memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask())


PEERS = {"attnzoo": attnzoo_kernels, "fla": fla, "sdpa": sdpa, "xformers": xformers}


def copy_gigabytes(device: torch.device) -> float | None:
    """Return the bandwidth of a large copy, read plus written; ``None`` without a GPU."""
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
