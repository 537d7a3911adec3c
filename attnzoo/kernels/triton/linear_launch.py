"""One call of linear attention: block shapes, spans, and the launches of both passes.

Letters as in :mod:`attnzoo.kernels.triton.linear`; F decays per token (1 or D).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.configs import Shape, config
from attnzoo.kernels.triton.linear_spans import span_scan_kernel, span_sums_kernel
from attnzoo.kernels.triton.linear_sweep import sweep_kernel

SHORTEST_SPAN = 512  # tokens; a shorter one would cost more for its states than it gains
WAVES = 2  # programs wanted for each processor of the chip
SCAN_BLOCK = 1024


class Given(NamedTuple):
    """The tensors of one call, as ``linear_triton`` has them."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    kv: Tensor
    z: Tensor
    segment_ids: Tensor | None
    real: Tensor | None


class Call:
    """The launches of one call."""

    def __init__(
        self,
        given: Given,
        feature_map: str,
        map_scale: float,
        scale: float,
        normalize: bool,
        eps: float,
        chunk_size: int,
        span: int,
        want_decay: bool = False,
    ) -> None:
        self.q, self.k, self.v = (_dense(x) for x in given[:3])
        self.kv, self.z = given.kv.contiguous(), given.z.contiguous()
        self.batch, self.heads, self.tokens, self.d = self.q.shape
        self.key_heads, self.e = self.k.shape[1], self.v.shape[3]
        self.chunk_size, self.normalize = chunk_size, normalize
        # scale n / (scale d + eps) is n / (d + eps / scale); else it multiplies the results
        self.scale, self.eps = (1.0, eps / scale) if normalize else (scale, eps)
        self.gate, self.decay, gate_strides = _gates(given.log_decay, self.k)
        self.gate_shape = None if given.log_decay is None else given.log_decay.shape
        nothing = self.q.new_empty(1, dtype=torch.int8)
        self.ids = nothing if given.segment_ids is None else given.segment_ids.contiguous()
        self.real = nothing if given.real is None else given.real.to(torch.int8).contiguous()
        self.capability, processors = _device(self.q.device)
        self.wide, precision = _operands(self.q, self.k, self.v)
        self.constants = {
            "D": self.d,
            "E": self.e,
            "G": self.heads // self.key_heads,
            "MAP": feature_map,
            "DECAY": self.decay,
            "NORMALIZE": normalize,
            "PACKED": given.segment_ids is not None,
            "PADDED": given.real is not None,
            "WANT_DECAY": want_decay,
            "OPERAND": tl.float32 if self.wide else tl.bfloat16,
            "PRECISION": precision,
            "gate_token": gate_strides[2],
            "key_heads": self.key_heads,
        }
        tiles = self._tiles("out")["TILES"]
        self.span = span or _span(self.batch * self.key_heads * tiles, self.tokens, processors)
        self.spans = max(1, -(-self.tokens // self.span))
        self.numbers = {
            "gate_batch": gate_strides[0],
            "gate_head": gate_strides[1],
            "tokens": self.tokens,
            "span": self.span,
            "spans": self.spans,
            "scale": self.scale,
            "map_scale": map_scale,
        }

    # -- passes ------------------------------------------------------------------------------------

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the state after the last token."""
        out = _room(self.v, self.heads, self.e)
        last = torch.empty_like(self.kv), torch.empty_like(self.z)
        with _on(self.q.device):
            starts = self._span_states((self.kv, self.z), self.k, self.v)
            self._sweep("out", out, starts, last=last)
        return out.transpose(1, 2), *last

    def backward(
        self, d_out: Tensor, d_kv: Tensor, d_z: Tensor, last: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients; ``last`` is the state that the forward pass has returned."""
        d_out, want_decay = _dense(d_out), self.constants["WANT_DECAY"]
        dq, dk = _room(self.q, self.heads, self.d), _room(self.k, self.key_heads, self.d)
        dv = _room(self.v, self.key_heads, self.e)
        first = torch.empty_like(self.kv), torch.empty_like(self.z)
        parts = (self._tiles("dq")["TILES"], 1) if self.decay != "vector" else (1, self.d)
        shape = (parts[0], self.batch, self.key_heads, self.tokens, parts[1])
        products = self.z.new_empty(shape if want_decay else 1)
        with _on(self.q.device):
            starts = self._span_states((self.kv, self.z), self.k, self.v)
            rows = self._rows(d_out, starts)
            shared = {"d_out": d_out, **rows, "products": products}
            self._sweep("dq", dq, starts, **shared)
            given = tuple(_times(x, 1 / self.scale).contiguous() for x in (d_kv, d_z))
            ends = self._span_states(given, self.q, d_out, rows)
            after = last
            if want_decay and self.spans > 1:
                after = tuple(
                    torch.cat([start[:, :, 1:], end.unsqueeze(2)], 2)
                    for start, end in zip(starts, last, strict=True)
                )
            d_log = torch.empty_like(products)
            self._sweep("dk", dk, ends, last=first, ends=after, d_log_decay=d_log, **shared)
            self._sweep("dv", dv, ends, last=first, **shared)
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
        return dq, dk, dv, self._shaped(d_log), *(_times(x, self.scale) for x in first)

    def _rows(self, d_out: Tensor, starts: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return what each row's weights share, where anything needs it."""
        exp = self.constants["MAP"] == "exp"
        if not (self.normalize or exp):
            return {"inverse": self.z, "shared": self.z, "tops": self.z}
        inverse = self.z.new_empty(self.batch, self.heads, self.tokens)
        tops = self.z.new_empty((2, *inverse.shape) if exp else 1)
        parts = self.z.new_empty(self._tiles("shared")["TILES"], *inverse.shape)
        self._sweep("shared", parts, starts, d_out=d_out, inverse=inverse, tops=tops)
        return {"inverse": inverse, "shared": parts.sum(0), "tops": tops}

    def _shaped(self, d_log: Tensor) -> Tensor:
        """Bring the gradient of every token's log decay to the shape that was given."""
        if not self.constants["WANT_DECAY"]:
            return self.q.new_empty(0)
        assert self.gate_shape is not None
        d_log = d_log.sum(0) if len(d_log) > 1 else d_log[0]
        if len(self.gate_shape) == 1:
            d_log = d_log.sum((0, 2, 3))
        return d_log.reshape(self.gate_shape).to(self.gate.dtype)

    # -- launches ----------------------------------------------------------------------------------

    def _sweep(
        self,
        mode: str,
        result: Tensor,
        states: tuple[Tensor, Tensor],
        *,
        last: tuple[Tensor, ...] | None = None,
        ends: tuple[Tensor, ...] | None = None,
        **given: Tensor,
    ) -> None:
        """Launch :func:`sweep_kernel`; what a mode does not use may be any tensor."""
        names = ("d_out", "inverse", "shared", "tops", "products", "d_log_decay")
        d_out, *rest = (given.get(name, self.z if name != "d_out" else self.v) for name in names)
        launch, blocks = self._config(mode)
        blocks["MODE"] = mode
        tensors = {"q": self.q, "k": self.k, "v": self.v, "o": d_out}
        strides = [s for x in tensors.values() for s in x.stride()[:2]]
        steps = {f"{name}_token": x.stride(2) for name, x in tensors.items()}
        sweep_kernel[self._grid(blocks)](
            self.q, self.k, self.v, d_out, result, self.gate, self.ids, self.real,
            *states, *(last or states), *(ends or states), *rest, *strides,
            **self.numbers, eps=self.eps, **steps, **self.constants, **blocks, **launch,
        )  # fmt: skip

    def _span_states(
        self,
        given: tuple[Tensor, Tensor],
        x: Tensor,
        y: Tensor,
        rows: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the state at the start of each span; given ``rows``, its gradient at the end.

        Args:
            given: The state before the first token, or its gradient after the last.
            x: Keys, or queries.
            y: Values, or gradients of the output.
            rows: As :meth:`_rows` returns them.
        """
        if self.spans == 1:
            return given
        kv, z = (g.new_empty(*g.shape[:2], self.spans, *g.shape[2:]) for g in given)
        width = self.d if self.decay == "vector" else 1
        carries = z.new_empty(*z.shape[:3], width)
        reverse = rows is not None
        inverse, shared = (z, z) if rows is None else (rows["inverse"], rows["shared"])
        launch, blocks = self._config("sums")
        span_sums_kernel[self._grid(blocks)](
            x, y, self.gate, self.ids, self.real, inverse, shared, kv, z, carries,
            *x.stride()[:2], *y.stride()[:2], **self.numbers, **self.constants, **blocks, **launch,
            x_token=x.stride(2), y_token=y.stride(2), REVERSE=reverse,
        )  # fmt: skip
        for sums, start, e in ((kv, given[0], self.e), (z, given[1], 1)):
            grid = (self.batch * self.key_heads, -(-self.d * e // SCAN_BLOCK))
            span_scan_kernel[grid](
                sums, start, carries, self.spans,
                D=self.d, E=e, F=width, BLOCK=SCAN_BLOCK, REVERSE=reverse, num_warps=4,
            )  # fmt: skip
        return kv, z

    def _grid(self, blocks: dict[str, Any]) -> tuple[int]:
        return (self.batch * self.key_heads * self.spans * blocks["TILES"],)

    def _shape(self, kernel: str) -> Shape:
        """Return what a kernel's config depends on."""
        inner = _padded(self.d if kernel not in ("dq", "dk") else self.e)
        return Shape(kernel, self.decay, self._kind(), inner)

    def _kind(self) -> str:
        """Return one of ``configs.KINDS``."""
        if self.wide:
            return "wide"
        filled = (self.d, self.e) == (_padded(self.d), _padded(self.e))
        masked = self.constants["PACKED"] or self.constants["PADDED"]
        if masked or not filled:
            return "any"
        return "mapped" if self.normalize or self.constants["MAP"] != "identity" else "bare"

    def _tiles(self, kernel: str) -> dict[str, int]:
        """Return the columns of x, of a tile of u, and how many tiles there are."""
        shape = self._shape(kernel)
        u = self.e if kernel not in ("dq", "dk") else self.d
        tile = min(config(shape, self.capability).tile, _padded(u))
        return {"BX": shape.size, "BU": tile, "TILES": -(-u // tile)}

    def _config(self, kernel: str) -> tuple[dict[str, int], dict[str, Any]]:
        """Return launch options and blocks."""
        blocks, chosen = self._tiles(kernel), config(self._shape(kernel), self.capability)
        blocks["C"] = self.chunk_size or chosen.chunk
        return {"num_warps": chosen.warps, "num_stages": chosen.stages}, blocks


def _times(x: Tensor, factor: float) -> Tensor:
    """Return ``x`` times a factor that mostly is one."""
    return x if factor == 1 else x * factor


def _room(like: Tensor, heads: int, size: int) -> Tensor:
    """Return room for ``[B, T, heads, size]``, as the next product reads it."""
    return like.new_empty(like.shape[0], like.shape[2], heads, size)


def _operands(*inputs: Tensor) -> tuple[bool, str]:
    """Return whether operands are float32, and how exactly these are multiplied.

    bfloat16 goes as it is; float16 as tf32, which has its mantissa; float32 as torch's own products
    would (``torch.set_float32_matmul_precision``).
    """
    dtypes = {x.dtype for x in inputs}
    fine = torch.float32 in dtypes and torch.get_float32_matmul_precision() == "highest"
    return dtypes != {torch.bfloat16}, "tf32x3" if fine else "tf32"


def _dense(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _gates(log_decay: Tensor | None, k: Tensor) -> tuple[Tensor, str, tuple[int, int, int]]:
    """Return the log decays, their kind, and their strides over batch, key heads and tokens."""
    if log_decay is None:
        return k, "none", (0, 0, 0)
    if log_decay.dim() == 4:
        log_decay = _dense(log_decay)
        return log_decay, "vector", tuple(log_decay.stride()[:3])  # type: ignore[return-value]
    if log_decay.dim() == 3:
        return log_decay, "scalar", tuple(log_decay.stride())  # type: ignore[return-value]
    return log_decay, "scalar", (0, log_decay.stride(0), 0)


def _power(x: int) -> int:
    return int(triton.next_power_of_2(x))


def _padded(size: int) -> int:
    """Return the power of two that a block of columns has: products take 16 at least."""
    return max(16, _power(size))


def _span(programs: int, tokens: int, processors: int) -> int:
    """Return how many tokens a program walks: all, unless that leaves processors idle."""
    parts = -(-WAVES * processors // max(programs, 1))
    span = _power(-(-tokens // parts))
    return max(span, SHORTEST_SPAN)


@cache
def _device(device: torch.device) -> tuple[int, int]:
    """Return compute capability and number of processors; of an H200 for the interpreter."""
    if device.type != "cuda":
        return 90, 132
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
