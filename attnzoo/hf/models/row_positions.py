"""Positions of rows: from the mask where none are given, and documents where they begin again.

The result of softmax depends on differences of rotary positions only. That of feature maps and of
convolutions depends on the positions themselves, so that the output of a row would depend on how
much padding precedes it. ``generate`` passes positions; classification heads, embedders and the
log-probabilities of trainers pass only a mask.

transformers reads packed documents from positions only without a mask and without a cache, its
flash attention also beside a mask of ones.
"""

from __future__ import annotations

import dis
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import values_are_known
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.attention.call import ModelHook, layer_backend
from attnzoo.hf.attention.packing import (
    Packing,
    add_position_starts,
    join_starts,
    restarting_positions,
)
from attnzoo.hf.models.documents import keeps_cache, refuse_rows, restarts
from attnzoo.hf.models.positions import TABLE_NAMES
from attnzoo.hf.names import NAME

# What models read that make positions from the mask, or from images
OWN_POSITIONS = frozenset({"cumsum", "get_rope_index", "compute_3d_position_ids"})
FIRST_POSITION = {"paligemma": 1}  # where it is not 0
_HANDLE = "_attnzoo_positions"  # attribute of hooked models
TAKES_NONE = (
    "{name} counts positions from the start of the row and takes no position_ids, so rows of "
    "several documents are not supported; pass one document a row"
)
ADVICE = "pass neither attention_mask, if all tokens are real, nor a cache (use_cache=False)"


class PositionHook(ModelHook):
    """A forward pre-hook on a model that adds positions, or the documents that they separate.

    It reads the borders of documents once per call, from the packing arguments and the positions,
    which must agree.

    Args:
        model: The model.
        layers: The backends of its layers.
        config: Of a swapped layer; says whether the swap runs.
    """

    reads = (*seam.ATTENTION_MASK, "position_ids", *Packing._fields)

    def __init__(self, model: Any, layers: list[Any], config: Any) -> None:
        super().__init__(type(model).forward)
        signature = inspect.signature(inspect.unwrap(type(model).forward))
        self.passes_on = any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values())
        self.takes_positions = "position_ids" in self.names
        self.config = config
        # Whether to count positions from the first real token of each row, if none are given.
        # Learned embeddings differ between families and keep the model's own.
        exact = all(backend.capabilities.exact for backend in layers)
        self.counts = takes_positions(model) and not exact and has_rotary_positions(model)
        self.absolute = self.counts or has_position_table(model)
        self.causal = any(backend.geometry.causal for backend in layers)
        self.mask_reads_positions = _mask_reads_positions(model)
        self.recurrent = seam.has_recurrent_layers(model)  # a DocumentHook serves all its layers
        self.first = first_position(model)

    def change(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return other arguments; ``None`` leaves them as they are."""
        groups = ("input_ids", "inputs_embeds"), seam.ATTENTION_MASK, ("position_ids",)
        tokens, mask, positions = self.find(args, kwargs, *groups)
        if tokens is None or self.config._attn_implementation != NAME:
            return None
        padding = None if mask is None else _padding_of(mask)
        cache = self.cache(args, kwargs)
        if isinstance(cache, seam.PagedAttentionCache):
            return None  # continuous batching passes positions, and where each request begins
        past = 0 if cache is None else cache.get_seq_length()
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if positions is not None:
            if positions.ndim == 3 and positions.shape[0] == 1:
                raise UnsupportedError(
                    f"position_ids have the shape {tuple(positions.shape)}; pass [batch, tokens], "
                    "or [1, tokens] for all rows"
                )
            if self.counts and not isinstance(past, Tensor) and not past:
                _refuse_shared_positions(padding, positions, tokens.shape[0])
        packing, new = Packing(*map(kwargs.get, Packing._fields)), None
        is_packed = not (packing[0] is packing[1] is packing[2] is None)
        if is_packed and not self.recurrent and not (packing.has_lengths and _is_later(past)):
            made = self._positions_of(model, packing, positions, padding, tokens)
            if made is not None and not _is_later(past):  # the layers refuse borders there
                return (), given | {"position_ids": made}
        if positions is not None:
            if is_packed or self.recurrent or isinstance(past, Tensor) or past:
                return None
            has_cache = cache is not None or keeps_cache(model, given)
            new = self._documents_of(model, positions, mask, has_cache)
        elif self.counts and padding is not None:
            if not self.takes_positions:
                refuse_rows(
                    _starts_with_padding(padding),
                    f"has padding on the left, and {type(model).__name__} takes no position_ids "
                    "and counts from the start of the row; pad on the right",
                )
                return None
            new = {"position_ids": row_positions(padding, tokens, past) + self.first}
        return None if new is None else ((), given | new)

    def _positions_of(
        self,
        model: nn.Module,
        packing: Packing,
        positions: Tensor | None,
        padding: Tensor | None,
        x: Tensor,
    ) -> Tensor | None:
        """Return positions that restart with each packed sequence; ``None``: no others than given.

        ``positions`` must restart at the same tokens, or nowhere; x are the new tokens.
        """
        batch, tokens = x.shape[:2]
        if packing.shape_reasons(batch, tokens):
            return None  # the layers refuse the call with all its reasons
        starts, is_compared = packing.starts(tokens), packing.is_before_end(tokens)
        real = None if padding is None else padding[:, -tokens:].to(x.device).bool()
        if real is not None:
            is_compared = is_compared & (real[:, 1:] & real[:, :-1])
        flat = positions if positions is not None and positions.ndim == 2 else None
        if flat is not None:
            add_position_starts(starts, flat, is_compared)
        union = join_starts(starts, is_compared).expand(batch, -1).to(x.device)
        name = type(model).__name__
        if not self.takes_positions:
            if self.absolute:
                _refuse(union.any(), TAKES_NONE.format(name=name))
            return None
        if positions is not None and flat is None:
            goes_on = (union & (positions[-3].diff(dim=1) == 1)).any()
            _refuse(goes_on, f"position_ids of {name} do not begin again with each packed sequence")
            return None
        return restarting_positions(
            union, flat, real=real, is_compared=is_compared, first=self.first
        )

    def _documents_of(
        self, model: nn.Module, positions: Tensor, mask: Any, has_cache: bool
    ) -> dict[str, Tensor] | None:
        """Return ``seq_idx`` of documents that only the positions separate, or ``None``."""
        read = self.mask_reads_positions
        if not read and not self.causal:
            return None  # as in the stock model
        own = self.first if has_position_table(model) else 0
        advice = ADVICE if read else "give their borders as seq_idx too"
        documents = documents_of(
            positions - own, mask, has_cache=has_cache or not read, advice=advice
        )
        if documents is None:
            return None
        name = type(model).__name__
        if self.absolute and not self.takes_positions:
            raise UnsupportedError(TAKES_NONE.format(name=name))
        if not self.passes_on:
            raise UnsupportedError(
                f"position_ids begin again inside of a row, which {name} does not tell its layers "
                f"beside a mask or a cache; {advice}"
            )
        return {"seq_idx": documents}


def row_positions(mask: Tensor, tokens: Tensor, past: int | Tensor) -> Tensor:
    """Return positions that begin at the first real token of each row, ``[B, T]``.

    Holes in ``mask [B, S]`` keep their positions, so that distances stay.
    """
    padding = (mask.to(tokens.device).cumsum(1) == 0).sum(1, keepdim=True)
    rows = torch.arange(tokens.shape[1], device=tokens.device) + past - padding
    return rows.clamp(min=0)


def documents_of(
    positions: Tensor, mask: Any, *, has_cache: bool, advice: str = ADVICE
) -> Tensor | None:
    """Return the document of each token where positions begin again at 0, ``[B, T]``, or ``None``.

    Positions of padding on the left, of trees, and of M-RoPE do not. Without a mask and a cache the
    mask that transformers makes separates the documents; ``has_cache`` is also true of a model that
    makes masks without positions. A compiled graph refuses documents when it runs.
    """
    if positions.ndim != 2 or (mask is None and not has_cache):
        return None
    if mask is not None and not (
        isinstance(mask, Tensor) and mask.shape[1:] == positions.shape[1:]
    ):
        return None
    is_packed = restarts(positions, None).any()
    if mask is not None:
        is_packed = is_packed & mask.bool().all()
    if not values_are_known(positions):
        torch._assert_async(~is_packed, f"position_ids begin again inside of a row; {advice}")
        return None
    if not bool(is_packed):
        return None
    steps = positions.diff(dim=1, prepend=positions[:, :1] - 1)
    return (steps != 1).cumsum(1)  # as transformers separates them


def _starts_with_padding(mask: Tensor) -> Tensor:
    """Return which rows of a mask ``[B, S]`` have padding before a token, ``[B]``."""
    return ~mask[:, 0].bool() & mask.bool().any(1)


def _refuse_shared_positions(padding: Tensor | None, positions: Tensor, rows: int) -> None:
    """Raise for positions that an outer model counts from the start of rows with left padding.

    ``positions`` are ``[B or 1, T]``, for B = ``rows``.
    """
    if padding is None or positions.ndim != 2 or positions.shape[0] != 1:
        return
    counts = rows > 1 or (positions.diff() == 1).all()
    refuse_rows(
        _starts_with_padding(padding) & counts,
        "has padding on the left, and the same position_ids are given for all rows, as an outer "
        "model makes them; give each row its own, as generate does, or swap the outer model, in "
        'which only some layers may change: attnzoo.swap(model, {"text_config": ...})',
    )


def _padding_of(mask: Any) -> Tensor | None:
    """Return the padding, ``[B, S]``, that a mask is, or those have that an outer model made."""
    if isinstance(mask, dict):
        found = [x for x in map(_padding_of, mask.values()) if x is not None]
        return max(found, key=lambda x: x.shape[1], default=None)
    if isinstance(mask, AttentionMask):
        return mask.padding
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _is_later(past: int | Tensor) -> bool:
    """Return whether a call may follow earlier tokens; a static cache counts them in a tensor."""
    if isinstance(past, Tensor):
        return not values_are_known(past) or bool(past)
    return past > 0


def _refuse(condition: Tensor, message: str) -> None:
    """Raise if ``condition`` holds; a graph when it runs."""
    if not values_are_known(condition):
        torch._assert_async(~condition, message)
    elif bool(condition):
        raise UnsupportedError(message)


def takes_positions(model: nn.Module) -> bool:
    """Return whether a model counts positions from the start of a row, or makes masks with them.

    False for a model that makes positions from the mask or from images.
    """
    code = seam.forward_code(model)
    if code is None or not OWN_POSITIONS.isdisjoint(code.co_names):
        return False
    arguments = _arguments(code)
    if not set(seam.ATTENTION_MASK) <= arguments:
        return False
    stored = (x.argval for x in dis.get_instructions(code) if x.opname.startswith("STORE"))
    counts = "arange" in code.co_names and any("position_ids" in _names(x) for x in stored)
    makes_mask = any(x.startswith("create_") and "mask" in x for x in code.co_names)
    return counts or ("position_ids" in arguments and makes_mask)


def has_rotary_positions(model: nn.Module) -> bool:
    """Return whether layers of a model rotate queries and keys; learned positions do not count."""
    return any(name.endswith("inv_freq") for name, _ in model.named_buffers())


def has_position_table(model: nn.Module) -> bool:
    """Return whether a model adds an embedding of positions, learned or computed."""
    return any(hasattr(module, name) for module in model.modules() for name in TABLE_NAMES)


def first_position(model: Any) -> int:
    """Return the first position of a row; tables like RoBERTa's begin with rows of padding."""
    for module in model.modules():
        for name in TABLE_NAMES:
            table = getattr(module, name, None)
            if isinstance(table, nn.Embedding) and table.padding_idx is not None:
                return table.padding_idx + 1
    return FIRST_POSITION.get(model.config.model_type, 0)


def _mask_reads_positions(model: nn.Module) -> bool:
    """Return whether a model makes its mask with the positions, of which it reads documents."""
    code = seam.forward_code(model)
    keywords = [] if code is None else [x for x in code.co_consts if isinstance(x, tuple)]
    return any({"position_ids", "config"} <= set(x) for x in keywords)


def _serves_layers(owner: Any, layers: list[Any]) -> bool:
    """Return whether a model takes tokens and a mask, and has swapped layers of no inner model."""
    arguments = _arguments(seam.forward_code(owner))
    if not {"input_ids", "inputs_embeds"} & arguments or not arguments & set(seam.ATTENTION_MASK):
        return False
    inner = {
        x for part in seam.pretrained_models(owner) if part is not owner for x in part.modules()
    }
    return any(x not in inner for x in layers)


def _arguments(code: Any) -> set[str]:
    """Return the names of a function's arguments; a class that only creates others has none."""
    count = 0 if code is None else code.co_argcount + code.co_kwonlyargcount
    return set(code.co_varnames[:count]) if count else set()


def _names(argument: Any) -> tuple[Any, ...]:
    """Return the names that an instruction stores; newer Python joins two instructions."""
    return argument if isinstance(argument, tuple) else (argument,)


def add_position_hooks(model: nn.Module) -> None:
    """Register the hook on the models in ``model`` that count positions or make masks.

    And on those whose own layers are swapped, which know packed sequences.
    """
    remove_position_hooks(model)
    backends = ((module, layer_backend(module)) for module in model.modules())
    swapped = [(x, backend) for x, backend in backends if backend is not None]
    for owner in seam.pretrained_models(model):
        inner = set(owner.modules())
        found: list[Any] = [(x, backend) for x, backend in swapped if x in inner]
        layers = [module for module, _ in found]
        if found and (takes_positions(owner) or _serves_layers(owner, layers)):
            hook = PositionHook(owner, [backend for _, backend in found], layers[0].config)
            vars(owner)[_HANDLE] = owner.register_forward_pre_hook(hook, with_kwargs=True)


def remove_position_hooks(model: nn.Module) -> None:
    """Remove the hooks of :func:`add_position_hooks`."""
    for owner in seam.pretrained_models(model):
        handle = vars(owner).pop(_HANDLE, None)
        if handle is not None:
            handle.remove()
