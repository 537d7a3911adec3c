"""Validation of queries, keys, values and masks, for ops and for backends."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from attnzoo.contract.config import MAX_SIZE
from attnzoo.contract.masks import PLAIN, AttentionMask
from attnzoo.contract.sequences import Sequences
from attnzoo.errors import ConfigError, UnsupportedError, short_repr

STATE_DTYPES = (torch.float32, torch.float64)
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


def qkv_reasons(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None = None,
    dtypes: Collection[torch.dtype] = DTYPES,
) -> list[str]:
    """Return every reason why queries, keys, values and a mask are invalid; empty if valid.

    The batch and the sequences may be empty; heads and sizes per head may not.
    """
    reasons = []
    if not (q.dtype in dtypes and k.dtype in dtypes and v.dtype in dtypes):
        reasons += [
            f"{name} is {_format_dtype(x.dtype)}, but must be one of {_format_dtypes(dtypes)}"
            for name, x in (("q", q), ("k", k), ("v", v))
            if x.dtype not in dtypes
        ]
    if not q.ndim == k.ndim == v.ndim == 4:
        return reasons + [
            f"{name} must be [{letters}], got {format_shape(x)}"
            for name, x, letters in (
                ("q", q, "B, H, T, D"),
                ("k", k, "B, Hkv, S, D"),
                ("v", v, "B, Hkv, S, E"),
            )
            if x.ndim != 4
        ]
    batch, heads, _, size = q.shape
    key_batch, key_heads, length, key_size = k.shape
    if k.shape[:3] != v.shape[:3]:
        reasons.append(
            f"k and v must agree in batch, heads and length, got k {format_shape(k)} and "
            f"v {format_shape(v)}"
        )
    if batch != key_batch or size != key_size:
        reasons.append(
            f"q and k must agree in batch and in key size, got q {format_shape(q)} and "
            f"k {format_shape(k)}"
        )
    if not q.device == k.device == v.device:
        reasons.append(
            f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}"
        )
    if 0 in (heads, key_heads, size, v.shape[3]):
        reasons.append(
            f"heads and sizes per head must be at least 1, got q {format_shape(q)}, "
            f"k {format_shape(k)} and v {format_shape(v)}"
        )
    elif heads % key_heads:
        reasons.append(
            f"the number of query heads must be a multiple of the number of key heads, got {heads} "
            f"and {key_heads}"
        )
    if mask is not None and mask is not PLAIN.get(mask.causal):
        reasons += _mask_reasons(mask, key_batch, length, q.device)
    return reasons


def check_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None = None,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> None:
    """Raise ``UnsupportedError`` if inputs disagree, with every reason of :func:`qkv_reasons`."""
    reasons = qkv_reasons(q, k, v, mask)
    if not 0 <= dropout <= 1:
        reasons.append(f"dropout must be a probability from 0 to 1, got {short_repr(dropout)}")
    if reasons:
        raise UnsupportedError(f"{'; '.join(reasons)}.")
    if bias is not None:
        scores = *q.shape[:3], k.shape[2]
        check_broadcastable("bias", bias, scores, "B, H, T, S", q.device)
        if not bias.is_floating_point():
            raise UnsupportedError(
                f"bias is added to the scores, so it must be floating-point, got "
                f"{_format_dtype(bias.dtype)}; pass what is masked as mask."
            )
    if sinks is not None:
        if sinks.dim() == 1:
            check_shape("sinks", sinks, (q.shape[1],), "H", q.device)
        else:
            check_shape("sinks", sinks, (*q.shape[:3], 1), "H] or [B, H, T, 1", q.device)


def check_mask_fields(op: str, mask: AttentionMask, *fields: str) -> None:
    """Raise ``UnsupportedError`` if a mask restricts attention by a field that an op does not read.

    Args:
        op: Name of the op.
        mask: The mask. Every op reads ``causal`` and ``padding``.
        fields: The other fields that it reads, of ``segment_ids`` and ``q_offset``.
    """
    found = []
    if mask.segment_ids is not None and "segment_ids" not in fields:
        found.append("of packed segments (run them as rows of a batch)")
    if mask.window is not None:
        found.append(f"a sliding window of {mask.window}")
    if mask.function is not None:
        found.append(mask.function_name or "arbitrary")
    is_shifted = not isinstance(mask.q_offset, int) or mask.q_offset != 0
    if mask.causal and is_shifted and "q_offset" not in fields:
        found.append("causal with a q_offset (pass earlier tokens as state=)")
    if found:
        kinds = "causal, padding and segment" if "segment_ids" in fields else "causal and padding"
        raise UnsupportedError(
            f"{op} supports {kinds} masks; the mask is {' and '.join(found)}. Use "
            "softmax_attention or flash_attention."
        )


def check_lengths(q: Tensor, k: Tensor, mask: AttentionMask) -> None:
    """Raise ``UnsupportedError`` unless there are as many queries as keys, or the last ones."""
    length, keys = q.shape[2], k.shape[2]
    given = f"{length} queries and {keys} keys are given"
    if length > keys or (length < keys and not mask.causal):
        raise UnsupportedError(
            f"{given}; fewer queries than keys need a causal mask with q_offset, the position of "
            "the first query, and more queries than keys are not supported."
        )
    offset = mask.q_offset
    if mask.causal and isinstance(offset, int) and not 0 <= offset <= keys - length:
        raise UnsupportedError(
            f"{given} with a mask whose q_offset is {offset}; it must be between 0 and "
            f"{keys - length}, so that every query has a key at its position."
        )


def check_shape(
    name: str, x: Tensor, shape: tuple[int, ...], letters: str, device: torch.device
) -> None:
    """Raise ``UnsupportedError`` for another shape or device, or a dtype that no op supports."""
    if x.shape == shape and x.device == device and x.dtype in DTYPES:
        return
    if x.shape != shape:
        raise UnsupportedError(
            f"{name} must be [{letters}], here {list(shape)}, got {format_shape(x)}."
        )
    check_dtype(name, x)
    check_device(name, x, device)


def check_broadcastable(
    name: str, x: Tensor, shape: tuple[int, ...], letters: str, device: torch.device
) -> None:
    """Raise ``UnsupportedError`` if a tensor is not broadcastable to a shape, on a device."""
    if x.device != device:
        check_device(name, x, device)
    if x.dim() == 0 or x.shape == shape:
        return
    sizes = zip(reversed(x.shape), reversed(shape), strict=False)
    if x.dim() > len(shape) or any(n not in (1, m) for n, m in sizes):
        raise UnsupportedError(
            f"{name} must be broadcastable to [{letters}], here {list(shape)}, got "
            f"{format_shape(x)}."
        )


def _mask_reasons(mask: AttentionMask, batch: int, keys: int, device: torch.device) -> list[str]:
    """Return every reason why a mask does not fit the keys; kernels trust its fields."""
    reasons, window = [], mask.window
    if window is not None and not (isinstance(window, tuple | list) and len(window) == 2):
        reasons.append(
            f"window of the mask must be (before, after), got {window!r} (n keys up to the query's "
            "own are (n - 1, 0))"
        )
    elif window is not None and any(isinstance(side, float) for side in window):
        reasons.append(f"window of the mask must be integers, got {window}")
    if isinstance(mask.q_offset, float):
        reasons.append(f"q_offset of the mask must be an integer, got {mask.q_offset}")
    for name, x in (("padding", mask.padding), ("segment_ids", mask.segment_ids)):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            reasons.append(f"{name} of the mask must be a tensor, got {type(x).__name__}")
        elif x.shape != (batch, keys):
            reasons.append(
                f"{name} of the mask must be [B, S], here {[batch, keys]}, got {format_shape(x)}"
            )
        elif x.device != device:
            reasons.append(f"{name} of the mask is on {x.device} and q on {device}")
        elif name == "padding" and x.dtype != torch.bool:
            reasons.append(
                "padding of the mask must be bool, true at real tokens, got "
                f"{_format_dtype(x.dtype)} (pass padding.bool())"
            )
        elif x.is_floating_point() or x.is_complex():
            reasons.append(
                f"segment_ids of the mask must be integers, got {_format_dtype(x.dtype)}"
            )
    return reasons


def check_dtype(name: str, x: Tensor) -> None:
    """Raise ``UnsupportedError`` if a tensor has a dtype that no op supports."""
    if x.dtype not in DTYPES:
        raise UnsupportedError(
            f"{name} is {_format_dtype(x.dtype)}, but must be one of {_format_dtypes(DTYPES)}."
        )


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    """Raise ``UnsupportedError`` if a tensor is not on the device of the queries.

    A scalar on the CPU is supported with every device, as in torch.
    """
    if x.device != device and (x.dim() or x.device.type != "cpu"):
        raise UnsupportedError(
            f"{name} is on {x.device} and q on {device}; move both to one device with "
            f"{name}.to(q.device)."
        )


def check_sequences(sequences: Sequences | None, slots: Tensor | None, q: Tensor, k: Tensor) -> int:
    """Return the number of states that a call takes and returns.

    Raises:
        UnsupportedError: The sequences or slots do not fit the call.
    """
    if slots is not None:
        if slots.shape != q.shape[:1] or slots.dtype not in (torch.int64, torch.int32):
            raise UnsupportedError(
                f"slots must be [B], here [{q.shape[0]}], and integers, got {format_shape(slots)} "
                f"{_format_dtype(slots.dtype)}."
            )
        if sequences is not None or q.shape[2] != 1:
            raise UnsupportedError(
                f"slots are for one token of each row, got {q.shape[2]} tokens"
                f"{' and sequences' if sequences is not None else ''}; take the states of several "
                "tokens from the pool before the call."
            )
    if sequences is None:
        return k.shape[0]
    if k.shape[0] != 1:
        raise UnsupportedError(
            f"sequences are of one row, got {k.shape[0]} rows of keys; put all tokens into one."
        )
    for name, x in (("starts", sequences.starts), ("lengths", sequences.lengths)):
        if x.dtype != torch.int64 or x.dim() != 1 or x.shape != sequences.starts.shape:
            raise UnsupportedError(
                f"sequences.starts and sequences.lengths must be [S] int64; sequences.{name} is "
                f"{format_shape(x)} {_format_dtype(x.dtype)}. Sequences.from_cu_seqlens makes them "
                "from cumulative lengths."
            )
        check_device(f"sequences.{name}", x, k.device)
    if k.is_cuda:  # implementations for the CPU check the values where they read them
        sequences.check(k.shape[2])
    return sequences.count


def check_shard(shard: object | None, state: object | None) -> None:
    """Raise ``UnsupportedError`` if a call is given both a shard and a state."""
    if shard is not None and state is not None:
        raise UnsupportedError(
            "shard and state are given; the ranks before this one give the state of a shard, so "
            "leave state out."
        )


def check_state_field(
    name: str,
    x: Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    dtypes: Collection[torch.dtype] = STATE_DTYPES,
) -> None:
    """Raise ``UnsupportedError`` if a tensor of a state does not fit the call."""
    if x.shape == shape and x.device == device and x.dtype in dtypes:
        return
    if x.shape != shape:
        raise UnsupportedError(
            f"{name} must be {list(shape)} for these keys and values, got {format_shape(x)}; "
            "pass the state of a call with the same heads and sizes."
        )
    check_device(name, x, device)
    if x.dtype not in dtypes:
        raise UnsupportedError(
            f"{name} is {_format_dtype(x.dtype)}, but must be one of {_format_dtypes(dtypes)}; do "
            "not convert a state."
        )


def check_log_decay(
    log_decay: Tensor, k_shape: tuple[int, ...], device: torch.device, causal: bool
) -> None:
    """Raise ``UnsupportedError`` if log decays do not fit keys ``[B, Hkv, S, D]`` and the mask."""
    check_dtype("log_decay", log_decay)
    check_device("log_decay", log_decay, device)
    if not causal:
        raise UnsupportedError(
            "log_decay decays earlier tokens, so it needs a causal mask; leave it out without one."
        )
    accepted = [k_shape[1:2], k_shape[:3], k_shape]
    if log_decay.shape not in accepted:
        raise UnsupportedError(
            f"log_decay must be [Hkv], [B, Hkv, S] or [B, Hkv, S, D], here "
            f"{', '.join(str(list(shape)) for shape in accepted)}; got {format_shape(log_decay)}."
        )
    check_is_log_decay(log_decay, k_shape[2])


def check_is_log_decay(log_decay: Tensor, length: int) -> None:
    """Raise ``UnsupportedError`` if a log decay is above 0, so that it is no decay.

    Checked on CPUs, where reading the values does not wait for a device, for several tokens.
    """
    is_known = type(log_decay) in (Tensor, torch.nn.Parameter) and log_decay.device.type == "cpu"
    if length < 2 or not log_decay.numel() or not is_known or torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:  # vmap has no single value
        return
    largest = log_decay.detach().amax().item()
    if largest > 0:
        raise UnsupportedError(
            f"log_decay is up to {largest:.3g}, but the logarithm of a decay, which is between 0 "
            "and 1, is at most 0; pass decay.log(), or logsigmoid of a gate's output."
        )


def check_size(name: str, value: int, minimum: int = 1, maximum: int = MAX_SIZE) -> None:
    """Raise ``UnsupportedError`` if an option of an op is no integer in this range."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise UnsupportedError(
            f"{name} must be an integer from {minimum} to {maximum}, got {short_repr(value)}."
        )


def refuse_output(backend: object, output: object) -> None:
    """Raise ``ConfigError`` because a backend's ``attend`` returned no ``AttentionOutput``."""
    raise ConfigError(
        f"{type(backend).__name__}.attend must return attnzoo.AttentionOutput(out), got "
        f"{type(output).__name__}"
    )


def is_empty_call(q: Tensor, k: Tensor) -> bool:
    """Return whether there are no queries or no keys, so that no score exists."""
    return 0 in (q.shape[0], q.shape[2], k.shape[2])


def empty_output(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Tensor:
    """Return the output of an empty call: zeros, ``[B, H, T, E]``.

    The gradients of all inputs are zeros, not missing: data-parallel training waits for each.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        others: All other inputs that have gradients in a call with tokens.
    """
    inputs = [torch.atleast_1d(x) for x in (q, k, v, *others) if x is not None]
    total = torch.stack([x[:0].sum().to(v.dtype) for x in inputs]).sum()
    return v.new_zeros(*q.shape[:3], v.shape[3]) + total


def format_shape(x: Tensor) -> str:
    """Return a shape as error messages show it, such as ``[2, 4, 16, 8]``."""
    return str(list(x.shape))


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _format_dtypes(dtypes: Collection[torch.dtype]) -> str:
    return ", ".join(sorted(map(_format_dtype, dtypes)))
