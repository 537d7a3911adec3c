"""Softmax attention by torch's FlexAttention: windows, first tokens, packing, padding, any blocks.

FlexAttention compiles a kernel for a mask that is a function of single queries and keys, and skips
the blocks of keys that a list leaves out. :class:`Region` holds both; a list follows from the begin
and end of the keys that each query sees, so that no dense mask is needed: time O(T S / C^2) for it,
with blocks of C = 128. Source: Dong et al., 2024, arXiv:2412.05496. Other letters: M blocks of
queries, N blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.implementation import OpCall
from attnzoo.contract.masks import AttentionMask
from attnzoo.ops.window.band import LocalOptions, dense_softmax
from attnzoo.ops.window.cpu.band import OutsideSums
from attnzoo.ops.window.pattern import Band
from attnzoo.runtime.first_call import differences, first_call_verdict
from attnzoo.runtime.kernel_calls import autocast_disabled, is_transformed

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # C, which the tiles of FlexAttention's kernels divide
LARGEST = 256  # head size
SMALLEST = 16  # head size: that of a product of matrices
COMPILED = 64  # variants of masks, dtypes and head sizes; torch compiles no more than 8 by default

Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # row, head, query, key -> bool


class Region(NamedTuple):
    """Which keys each query sees."""

    seen: Seen
    some: Tensor  # [1 or B, 1 or H, M, N] bool: blocks in which a query may see a key
    every: Tensor  # the same: blocks in which every query sees every key

    def __and__(self, other: Region) -> Region:
        """Return the keys that both see."""
        ours, theirs = self.seen, other.seen
        return Region(
            lambda b, h, i, j: ours(b, h, i, j) & theirs(b, h, i, j),
            self.some & other.some,
            self.every & other.every,
        )

    def __or__(self, other: Region) -> Region:
        """Return the keys that one of them sees."""
        ours, theirs = self.seen, other.seen
        return Region(
            lambda b, h, i, j: ours(b, h, i, j) | theirs(b, h, i, j),
            self.some | other.some,
            self.every | other.every,
        )

    def block_mask(self, queries: int, keys: int) -> BlockMask:
        """Return the mask of T queries and S keys for FlexAttention."""
        from torch.nn.attention.flex_attention import BlockMask

        whole = _are_whole(queries, self.some)[:, None] & _are_whole(keys, self.some)
        every = self.every & whole  # in others, kernels must not read behind the last key
        lengths = queries, keys
        return BlockMask.from_kv_blocks(
            *_listed(self.some & ~every), *_listed(every), BLOCK, self.seen, lengths
        )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and these, then the others."""
    order = blocks.int().argsort(dim=3, descending=True, stable=True)
    return blocks.sum(3, dtype=torch.int32), order.int()


def _are_whole(tokens: int, like: Tensor) -> Tensor:
    """Return which blocks of tokens are no shorter than others, ``[M]`` bool."""
    return torch.arange(BLOCK, tokens + BLOCK, BLOCK, device=like.device) <= tokens


def between(begin: Tensor, end: Tensor, keys: int) -> Region:
    """Return the region of keys from ``begin`` to before ``end``, ``[1 or B, 1 or H, T]`` each."""
    begins, ends = blocks_of(begin), blocks_of(end)
    low = torch.arange(0, keys, BLOCK, device=begin.device)
    high = (low + BLOCK).clamp(max=keys) - 1
    some = (high >= begins.amin(3)[..., None]) & (low < ends.amax(3)[..., None])
    every = (low >= begins.amax(3)[..., None]) & (high < ends.amin(3)[..., None])
    first, stop = reader(begin), reader(end)
    return Region(lambda b, h, i, j: (j >= first(b, h, i)) & (j < stop(b, h, i)), some, every)


def among(chosen: Tensor, queries: int) -> Region:
    """Return the region of the keys that are ``chosen``, ``[1 or B, 1 or H, S]`` bool."""
    blocks, read = blocks_of(chosen), reader(chosen)
    shape = (-1, -1, -(-queries // BLOCK), -1)
    some, every = (x[:, :, None].expand(shape) for x in (blocks.any(3), blocks.all(3)))
    return Region(lambda b, h, i, j: read(b, h, j), some, every)


def blocks_of(x: Tensor) -> Tensor:
    """Return ``[B, H, T]`` in blocks, ``[B, H, M, C]``; the last one repeats the last token."""
    size = x.shape[2]
    index = torch.arange(-(-size // BLOCK) * BLOCK, device=x.device).clamp(max=size - 1)
    blocks: Tensor = x[:, :, index].unflatten(2, (-1, BLOCK))
    return blocks


def reader(x: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function of row, head and token that reads ``[1 or B, 1 or H, T]``."""
    x = x.contiguous()
    if x.shape[:2] == (1, 1):
        of_all = x[0, 0]
        return lambda b, h, i: of_all[i]
    if x.shape[1] == 1:
        of_rows = x[:, 0]
        return lambda b, h, i: of_rows[b, i]
    if x.shape[0] == 1:
        of_heads = x[0]
        return lambda b, h, i: of_heads[h, i]
    return lambda b, h, i: x[b, h, i]


# -- regions of masks ------------------------------------------------------------------------------


def windows(
    queries: int,
    keys: int,
    bands: Sequence[Band],
    *,
    causal: bool,
    offset: int | Tensor = 0,
    key_mask: Tensor | None = None,
    extra: Tensor | None = None,
    segment_ids: Tensor | None = None,
    device: torch.device,
) -> Region:
    """Return the keys that the windows of all heads contain, and some outside of them.

    Args:
        queries: T.
        keys: S.
        bands: The window of each query head, or one for all.
        causal: Whether later keys are hidden.
        offset: Position of query 0 among the keys.
        key_mask: The keys that windows contain, ``[1 or B, S]`` bool; ``None``: all.
        extra: The keys that queries see outside of their window too, ``[1 or B, S]`` bool.
        segment_ids: Queries see the run of tokens with an equal number, ``[1 or B, S]``.
        device: Of the tensors.
    """
    bands = bands[:1] if len(set(bands)) == 1 else bands
    position = torch.arange(queries, device=device)[None, None] + offset
    first, stop = torch.zeros_like(position), torch.full_like(position, keys)
    if causal:
        stop = position + 1
    if segment_ids is not None:
        begin, end = (x[:, None, keys - queries :] for x in runs(segment_ids))
        first, stop = begin, stop.minimum(end)
    sizes = torch.tensor([[min(x, keys) for x in band] for band in bands], device=device)
    before, after, step = (
        sizes.mT[:, None, :, None] if len(bands) > 1 else sizes.mT[..., None, None]
    )
    near = between(
        first.maximum(position - before * step), stop.minimum(position + after * step + 1), keys
    )
    if any(band.dilation > 1 for band in bands):
        near &= _at_steps(position, step, near)
    if key_mask is not None:
        near &= among(key_mask[:, None], queries)
    if extra is None:
        return near
    return near | (among(extra[:, None], queries) & between(first, stop, keys))


def runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return begin and end of the run of equal numbers around each token of ``[B, S]``."""
    token = torch.arange(ids.shape[1], device=ids.device)
    changes = ids[:, 1:] != ids[:, :-1]
    first, last = F.pad(changes, (1, 0), value=True), F.pad(changes, (0, 1), value=True)
    begin = torch.where(first, token, 0).cummax(1).values
    end = torch.where(last, token + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return begin, end


def _at_steps(position: Tensor, step: Tensor, like: Region) -> Region:
    """Return the keys a multiple of ``step``, ``[1 or H, 1]``, from a query's position."""
    at, steps = reader(position), reader(step.expand(1, -1, position.shape[2]))
    return Region(
        lambda b, h, i, j: (at(b, h, i) - j) % steps(b, h, i) == 0,
        torch.ones_like(like.some),
        torch.zeros_like(like.every),
    )


def of_mask(mask: AttentionMask, q: Tensor, k: Tensor) -> Region:
    """Return the keys that queries see under a mask, which is no function."""
    assert mask.function is None
    keys, device = k.shape[2], k.device
    before, after = mask.window or (keys, keys)
    has_sinks = mask.window is not None and mask.num_sinks > 0
    return windows(
        q.shape[2],
        keys,
        [Band(before, after, 1)],
        causal=mask.causal,
        offset=mask.q_offset,
        key_mask=mask.padding,
        extra=mask.sinks(keys, device) if has_sinks else None,
        segment_ids=mask.segment_ids,
        device=device,
    )


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    offset: int | Tensor,
    outside: OutsideSums | None = None,
    bands: Sequence[Band] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention within a band and to global keys, as ``band_attention`` does.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, E]``.
        options: Band, scale and masks.
        offset: Position of query 0 among the keys.
        outside: Sums over other keys, which it does not add.
        bands: The band of each query head, in place of the one of the options.
    """
    assert outside is None
    extra = options.global_indices
    is_extra = None
    if extra is not None:
        is_extra = torch.zeros(len(extra.valid), k.shape[2], dtype=torch.bool, device=k.device)
        is_extra = is_extra.scatter(1, extra.positions, extra.valid)
    region = windows(
        q.shape[2],
        k.shape[2],
        [options.band] if bands is None else bands,
        causal=options.causal,
        offset=offset,
        key_mask=options.key_mask,
        extra=is_extra,
        segment_ids=options.segment_ids,
        device=q.device,
    )
    return run_flex(q, k, v, region, options.scale, return_lse=options.return_lse)


# -- the kernel ------------------------------------------------------------------------------------


def run_flex(
    q: Tensor, k: Tensor, v: Tensor, region: Region, scale: float, *, return_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """Return attention to the keys of a region, and the log-sum-exp if it is asked for.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``, zeros for a query that sees no key, and
        ``[B, H, T, 1]``, float32 or wider and finite.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    options: dict[str, Any] = {"return_aux": AuxRequest(lse=True)} if return_lse else {}
    mask = region.block_mask(q.shape[2], k.shape[2])
    with autocast_disabled(q.device):
        dtype = torch.promote_types(q.dtype, k.dtype)
        found = _call(
            *(q.to(dtype), k.to(dtype), v.to(dtype)),
            block_mask=mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            **options,
        )
    if not return_lse:
        return found.to(v.dtype), q.new_empty(0)
    out, lse = found[0], found[1].lse
    lse = lse.masked_fill(lse == -torch.inf, torch.finfo(lse.dtype).min / 8)
    return out.to(v.dtype), lse.unsqueeze(3)


def _call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Call FlexAttention, compiled on GPUs, unless a compiled program contains the call."""
    from torch.nn.attention import flex_attention

    attend: Callable[..., Any] = flex_attention.flex_attention
    if torch.compiler.is_compiling() or q.device.type == "cpu":
        return attend(q, k, v, **options)
    with torch._dynamo.config.patch(recompile_limit=COMPILED):
        return _compiled(attend)(q, k, v, **options)


@cache
def _compiled(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return FlexAttention compiled; where that fails it raises, and computes nothing densely."""
    return torch.compile(attend, fullgraph=True)


def flex_verdict(x: OpCall) -> tuple[str, str]:
    """Return why ``impl="auto"`` skips FlexAttention on a device, or "", and what describe adds."""
    found: tuple[str, str] = _verdict(x.q.device)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _verdict(device: torch.device) -> tuple[str, str]:
    return first_call_verdict("FlexAttention", "", device, lambda: compare_with_torch(device))


def compare_with_torch(device: torch.device) -> list[str]:
    """Return how a small call, with its log-sum-exp and gradients, differs from float64."""

    def flex(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        return run_flex(q, k, v, of_mask(mask, q, k), 0.2, return_lse=True)

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        seen = mask.dense(q.shape[2], k.shape[2], q.device)
        assert seen is not None
        return dense_softmax(q, k, v, seen, 0.2)

    exact = _small_case(torch.device("cpu"), torch.float64, dense)
    return differences(_small_case(device, torch.bfloat16, flex), exact)


def _small_case(
    device: torch.device, dtype: torch.dtype, attend: Callable[..., tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Return output, log-sum-exp and gradients of a call with every kind of limit, on the CPU."""
    generator, token = torch.Generator().manual_seed(0), torch.arange(200)
    drawn = [torch.randn(2, h, 200, 32, generator=generator).bfloat16() for h in (4, 2, 2, 4)]
    q, k, v, d_out = (x.to(device, dtype).requires_grad_() for x in drawn)
    real = (token >= torch.tensor([[0], [70]])).to(device)
    ids = (token >= 150).int().expand(2, -1).to(device)
    mask = AttentionMask(causal=True, window=(40, 0), num_sinks=3, padding=real, segment_ids=ids)
    found = [x.masked_fill(~real[:, None, :, None], 0) for x in attend(q, k, v, mask)]
    found += torch.autograd.grad((found[0] * d_out).sum() + found[1].sum(), (q, k, v))
    names = "output", "log-sum-exp", "dq", "dk", "dv"
    return {name: x.detach().cpu() for name, x in zip(names, found, strict=True)}


# What implementations of this name have in common
FLEX: dict[str, Any] = {
    "name": "flex",
    "devices": ("cuda",),
    "automatic": "PyTorch's FlexAttention skips keys that no query sees",
    "verdict": flex_verdict,
}


def flex_reasons(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """Return every reason why FlexAttention does not support some tensors."""
    reasons = [x for x in [device_reason(q.device)] if x]
    if is_transformed():
        reasons.append("forward-mode differentiation or a transform of torch.func is active")
    if torch.compiler.is_exporting():
        reasons.append("torch.export does not translate its masks")
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype == torch.float64:
        dtypes = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
        reasons.append(f"q, k and v are {dtypes} (it takes one dtype of at most 32 bits)")
    for name, x in (("queries", q), ("values", v)):
        if not SMALLEST <= x.shape[3] <= LARGEST:
            reasons.append(f"{name} have size {x.shape[3]} (it takes {SMALLEST} to {LARGEST})")
    return reasons


def device_reason(device: torch.device) -> str:
    """Return why FlexAttention does not run on a device, or ``""``."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0"
    if device.type == "cuda" and not _has_triton():
        return "torch.compile needs Triton, which is not installed"
    return ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    found: bool = has_triton()
    return found
