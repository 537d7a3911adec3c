"""Convert transformers' masks to an :class:`AttentionMask` without a ``[T, S]`` tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.names import NAME


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelMask(AttentionMask):
    """An :class:`AttentionMask` that a model passes to its layers instead of a mask tensor.

    ``ndim`` is 4 so that transformers does not create another mask, and ``shape`` is the shape of
    the mask tensor. If the model computes with the mask (adds, slices, concatenates), it is
    converted to the additive mask tensor of eager attention; exact backends support such a mask.
    """

    ndim: int = 4
    shape: tuple[int, ...] = (1, 1, 0, 0)  # [B, 1, T, S]
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    first: int | Tensor = 0  # position of the first new token
    new_tokens: int = 0  # of the call; the mask may have fewer rows, of the last ones
    # results that the layers which use this mask share: see past_padding and packing
    shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ModelMask:
        """Move the tensors to a device, for models split over several devices."""
        function = self.function
        moved: dict[str, Any] = {
            name: x.to(device, non_blocking=non_blocking)
            for name in ("padding", "segment_ids", "q_offset")
            if isinstance(x := getattr(self, name), Tensor)
        }
        if function is not None:
            moved["function"] = lambda: function().to(device, non_blocking=non_blocking)
        return replace(self, device=device, **moved)

    def contiguous(self) -> ModelMask:
        """Return the mask itself; ``generate`` calls this."""
        return self

    def __getitem__(self, index: Any) -> Any:
        """Return the mask of the last queries, or the elements of the additive mask."""
        rows = _last_rows(index, self.shape[2])
        if rows is None or self.function is not None:
            return self.additive()[_as_tensors(index)]
        batch, heads, queries, keys = self.shape
        q_offset = self.q_offset + (queries - rows)
        return replace(self, q_offset=q_offset, shape=(batch, heads, rows, keys))

    def additive(self) -> Tensor:
        """Return the mask of eager attention, ``[B, 1, T, S]``: 0 or the minimum of the dtype."""
        visible = self.dense(self.shape[2], self.shape[3], torch.device(self.device))
        if visible is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        hidden = torch.finfo(self.dtype).min
        zero = torch.zeros((), dtype=self.dtype, device=visible.device)
        return torch.where(visible, zero, hidden).expand(self.shape)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a torch function on the additive mask."""
        return function(*_as_tensors(args), **_as_tensors(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the additive mask."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.additive(), name)


def _last_rows(index: Any, queries: int) -> int | None:
    """Return how many of the last queries ``mask[index]`` keeps, ``None`` for other elements."""
    if not isinstance(index, tuple) or len(index) != 4:
        return None
    if not all(isinstance(x, slice) for x in index):
        return None
    if any(index[i] != slice(None) for i in (0, 1, 3)):
        return None
    begin, end, step = index[2].indices(queries)
    return end - begin if (end, step) == (queries, 1) and begin < end else None


def _as_tensors(value: Any) -> Any:
    """Replace every :class:`ModelMask` in the arguments of a torch function by its tensor."""
    if isinstance(value, ModelMask):
        return value.additive()
    if isinstance(value, dict):
        return {name: _as_tensors(item) for name, item in value.items()}
    return type(value)(map(_as_tensors, value)) if type(value) in (list, tuple) else value


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: ModelMask, *others: Any) -> Any:
        return getattr(self.additive(), name)(*_as_tensors(others))

    return apply


# Python looks operators up on the class, not by __getattr__; == would compare identities.
_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "invert", "and", "or")
_OTHER = ("eq", "ne", "lt", "le", "gt", "ge", "len", "iter", "bool", "contains")
for _name in (*_ARITHMETIC, *_OTHER):
    setattr(ModelMask, f"__{_name}__", _operator(f"__{_name}__"))


def make_mask(
    *,
    batch_size: int,  # B
    q_length: int,  # T
    kv_length: int,  # S
    q_offset: int | Tensor = 0,  # position of the first query
    kv_offset: int | Tensor = 0,  # of the first key
    mask_function: Callable[..., Any] = seam.causal_mask_function,
    attention_mask: Tensor | ModelMask | None = None,  # padding, [B, S], true at real tokens
    use_vmap: bool = False,  # whether the model added its own mask function
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> ModelMask:
    """Create a model's mask; registered with transformers' ``AttentionMaskInterface``.

    ``mask_function`` maps indices (batch, head, query, key) to whether the query sees the key;
    ``kwargs`` are what other implementations read.
    """
    if kwargs.keys() - seam.IGNORED_MASK_ARGUMENTS:
        seam.refuse_unknown_arguments("the mask", kwargs, seam.IGNORED_MASK_ARGUMENTS)
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    if isinstance(q_offset, Tensor):  # a static cache updates its counter in place
        q_offset = q_offset.clone()
    padding = None
    if attention_mask is not None:
        padding = _padding(attention_mask, kv_length, kv_offset)
    parsed: dict[str, Any] = {"causal": True}
    if mask_function is not seam.causal_mask_function:
        parsed = _parse_mask_function(mask_function)
    unknown = parsed.pop("unknown", "")
    mask = ModelMask(
        **parsed,
        padding=padding,
        q_offset=q_offset - kv_offset,
        first=q_offset,
        new_tokens=q_length,
        shape=(batch_size, 1, q_length, kv_length),
        dtype=dtype,
        device=device or "cpu",
    )
    if not unknown:
        return mask
    dense = partial(
        seam.materialise_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        device=device,
    )
    return replace(mask, function=dense, function_name=f"an unknown function ({unknown})")


def _padding(attention_mask: Tensor, length: int, offset: int | Tensor) -> Tensor | None:
    """Return the padding with one entry per key; ``None`` if all are real (not when compiling)."""
    if isinstance(offset, int) and isinstance(length, int):
        padding = attention_mask[:, offset : offset + length]
        if padding.shape[1] < length:  # unused keys of a static cache
            padding = torch.nn.functional.pad(padding, (0, length - padding.shape[1]))
    else:
        padding = attention_mask
    padding = padding.bool()
    if torch.compiler.is_compiling():
        return padding
    if torch._C._get_tracing_state() is not None:
        raise UnsupportedError(
            "torch.jit.trace records whether this attention_mask has padding as a constant, so the "
            "traced model would ignore other masks; use torch.compile or torch.export, or trace "
            "without attention_mask for inputs without padding"
        )
    return None if bool(padding.all()) else padding


def _parse_mask_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a mask function sets in a mask; ``"unknown"`` names one that is not supported."""
    kind, value = seam.mask_parts(function)
    if kind == "all":
        return {name: x for part in value for name, x in _parse_mask_function(part).items()}
    if kind == "remapped":
        return _parse_mask_function(value)
    if kind == "window":
        return {"window": (value - 1, 0)}
    if kind == "bidirectional window":
        return {"window": (value, value)}
    names = {"causal": "causal", "packed": "segment_ids", "": "unknown"}
    return {names[kind]: kind == "causal" or value} if kind in names else {}


AttentionMaskInterface.register(NAME, make_mask)  # in place of the function that imports this file


def read_mask(
    attention_mask: object,  # what the module passes to its attention function
    *,
    causal: bool,
    window: int | None,  # of the model, in tokens
    q_length: int,  # T
    kv_length: int,  # S
    given: object = None,
    all_columns: bool = False,
    as_bias: bool = False,
) -> tuple[AttentionMask, Tensor | None]:
    """Return the mask, and the additive bias if it is one, of a layer's ``attention_mask``.

    If the module made a tensor of a :class:`ModelMask`, padding and positions are known from what
    was ``given`` to it. ``all_columns`` keeps those of keys that are not among those of the call,
    for a state that holds them; ``as_bias`` returns a bool tensor as a bias too.
    """
    queries, keys = q_length, kv_length
    if attention_mask is None:
        if causal and queries not in (1, keys):
            raise UnsupportedError(
                f"a causal layer has {queries} queries, {keys} keys and no mask, so the "
                "positions of the queries are unknown; pass attention_mask to the model"
            )
        seen = None
        if window is not None and causal:  # eager ignores the window without a mask otherwise
            seen = (window - 1, 0)
        return AttentionMask(causal=causal, window=seen, q_offset=keys - queries), None
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4:
        kind = type(attention_mask).__name__
        if isinstance(attention_mask, Tensor):
            kind += f" of shape {tuple(attention_mask.shape)}"
        raise UnsupportedError(
            f"the attention mask is a {kind}; attnzoo accepts a 2-D padding mask, passed to the "
            "model, or a 4-D mask [batch, heads, queries, keys]"
        )
    mask = AttentionMask(q_offset=keys - queries)
    fits = isinstance(given, ModelMask) and (all_columns or given.shape[-1] == keys)
    if isinstance(given, ModelMask) and fits and given.function is None:
        mask = replace(given, causal=False, window=None, segment_ids=None)
    tensor = attention_mask if all_columns else attention_mask[..., :keys]
    if tensor.dtype != torch.bool:
        return mask, tensor
    if as_bias:
        dtype = torch.get_default_dtype()
        zero = torch.zeros((), dtype=dtype, device=tensor.device)
        return mask, torch.where(tensor, zero, torch.finfo(dtype).min)
    name = "an arbitrary 4-D tensor"
    return replace(mask, function=lambda: tensor, function_name=name), None


def refuse_wrong_length(mask: ModelMask, kv_length: int) -> None:
    """Raise for a mask whose length is not that of the keys."""
    if kv_length == mask.new_tokens:
        raise UnsupportedError(
            f"the mask covers {mask.shape[-1]} keys, but only the {kv_length} new ones are given: "
            "the layer has the keys of another layer, whose backend keeps a state instead of "
            "them; give both layers the same backend, or both an exact one without a window"
        )
    raise UnsupportedError(
        f"the mask covers {mask.shape[-1]} keys, but the model passes {kv_length} keys, which it "
        "made itself; use attn_implementation='sdpa' or 'eager' for it"
    )


def refuse_sinks_under_function(mask: ModelMask, backend: Any) -> None:
    """Raise if first tokens outside of the model's window would be added to its function."""
    num_sinks = getattr(backend.config, "num_sinks", 0)
    if num_sinks and backend.capabilities.exact and backend.geometry.window is not None:
        raise UnsupportedError(
            f"the mask is {mask.function_name}, which contains the model's sliding window, so "
            f"num_sinks={num_sinks} cannot show the first tokens outside of it; leave num_sinks out"
        )


def refuse_window_over_own_keys(backend: Any, columns: int, keys: int) -> None:
    """Raise if a backend has a window over keys that the model has put together itself."""
    if getattr(backend, "window", None) is not None:
        raise UnsupportedError(
            f"the mask covers {columns} keys, but the model passes {keys} keys, which it made "
            f"itself and which have no positions, so window={backend.window} is undefined; leave "
            "window out"
        )


def keep_selected(mask: AttentionMask, indices: Tensor, kv_length: int) -> AttentionMask:
    """Return the mask, restricted to the keys that a sparse indexer selected.

    Args:
        mask: The mask.
        indices: The selected keys of each query, ``[B, T, N]``, the same for all heads.
        kv_length: S.
    """
    batch, queries, _ = indices.shape

    def dense() -> Tensor:
        selected = torch.zeros(batch, queries, kv_length, dtype=torch.bool, device=indices.device)
        selected = selected.scatter(-1, indices.long(), True)[:, None]
        visible = mask.dense(queries, kv_length, indices.device)
        return selected if visible is None else selected & visible

    return replace(mask, function=dense, function_name="a sparse indexer's selection of keys")
