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
from attnzoo.hf.attention.call import ForwardArguments, layer_backend
from attnzoo.hf.attention.packing import Packing
from attnzoo.hf.models.documents import keeps_cache, restarts
from attnzoo.hf.names import NAME

# What models read that make positions from the mask, or from images
OWN_POSITIONS = frozenset({"cumsum", "get_rope_index", "compute_3d_position_ids"})
FIRST_POSITION = {"paligemma": 1}  # where it is not 0
_HANDLE = "_attnzoo_positions"  # attribute of hooked models
ADVICE = "pass neither attention_mask, if all tokens are real, nor a cache (use_cache=False)"


class PositionHook(ForwardArguments):
    """A forward pre-hook on a model that adds positions, or the documents that they separate.

    Args:
        model: The model.
        config: Of a swapped layer; says whether the swap runs.
        counts: Whether to count positions from the first real token of each row, if none are given.
            Learned embeddings differ between families and keep the model's own.
    """

    def __init__(self, model: Any, config: Any, *, counts: bool) -> None:
        super().__init__(type(model).forward)
        signature = inspect.signature(inspect.unwrap(type(model).forward))
        self.passes_on = any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values())
        self.config, self.counts = config, counts
        self.recurrent = seam.has_recurrent_layers(model)  # a DocumentHook serves all its layers
        self.first = FIRST_POSITION.get(model.config.model_type, 0)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return other arguments; ``None`` leaves them as they are.

        Raises:
            UnsupportedError: The positions are not a row per sequence, or separate documents that
                the model's layers would not know.
        """
        tokens = self.get(("input_ids", "inputs_embeds"), args, kwargs)
        if tokens is None or self.config._attn_implementation != NAME:
            return None
        mask = self.get(seam.ATTENTION_MASK, args, kwargs)
        positions, padding = self.get(("position_ids",), args, kwargs), _padding_of(mask)
        cache = self.cache(args, kwargs)
        if isinstance(cache, seam.PagedAttentionCache):
            return None  # continuous batching passes positions, and where each request begins
        past = 0 if cache is None else cache.get_seq_length()
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if positions is not None:
            _check_positions(positions)
            if self.counts and not isinstance(past, Tensor) and not past:
                _refuse_shared_positions(padding, positions, tokens.shape[0])
            is_known = any(kwargs.get(name) is not None for name in Packing._fields)
            if is_known or self.recurrent or isinstance(past, Tensor) or past:
                return None
            has_cache = cache is not None or keeps_cache(model, given)
            documents = documents_of(positions, mask, has_cache=has_cache)
            new = None if documents is None else {"seq_idx": documents}
            if documents is not None and not self.passes_on:
                raise UnsupportedError(
                    f"position_ids begin again inside of a row, which {type(model).__name__} does "
                    f"not tell its layers beside a mask or a cache; {ADVICE}"
                )
        elif self.counts and padding is not None:
            if "position_ids" not in self.names:
                _refuse_left_padding(model, padding)
                return None
            new = {"position_ids": row_positions(padding, tokens, past) + self.first}
        else:
            new = None
        return None if new is None else ((), given | new)


def row_positions(mask: Tensor, tokens: Tensor, past: int | Tensor) -> Tensor:
    """Return positions that begin at the first real token of each row, ``[B, T]``.

    Args:
        mask: ``[B, S]``, 0 at padding. Holes keep their positions, so that distances stay.
        tokens: The new tokens, ``[B, T, ...]``.
        past: Number of tokens before them.
    """
    padding = (mask.to(tokens.device).cumsum(1) == 0).sum(1, keepdim=True)
    rows = torch.arange(tokens.shape[1], device=tokens.device) + past - padding
    return rows.clamp(min=0)


def documents_of(positions: Tensor, mask: Any, *, has_cache: bool) -> Tensor | None:
    """Return the document of each token where positions begin again at 0, ``[B, T]``, or ``None``.

    Positions of padding on the left, of trees, and of M-RoPE do not. Without a mask and a cache the
    mask that transformers makes separates the documents. A compiled graph refuses them when it
    runs.

    Args:
        positions: ``[B or 1, T]``; those of M-RoPE have a further dimension.
        mask: The argument ``attention_mask``.
        has_cache: Whether a cache is given, which is empty, or will be made.
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
        torch._assert_async(~is_packed, f"position_ids begin again inside of a row; {ADVICE}")
        return None
    if not bool(is_packed):
        return None
    steps = positions.diff(dim=1, prepend=positions[:, :1] - 1)
    return (steps != 1).cumsum(1)  # as transformers separates them


def _refuse_left_padding(model: nn.Module, mask: Tensor) -> None:
    """Raise for padding on the left in a model that takes no positions; a graph when it runs."""
    begins = mask[:, :1].bool() | ~mask.bool().any(1, keepdim=True)
    advice = "takes no position_ids and counts from the start of the row; pad on the right"
    if not values_are_known(begins):
        torch._assert_async(begins.all(), f"{type(model).__name__} {advice}")
    elif not bool(begins.all()):
        row = int((~begins).nonzero()[0, 0])
        raise UnsupportedError(
            f"row {row} has padding on the left, and {type(model).__name__} {advice}"
        )


def _refuse_shared_positions(padding: Tensor | None, positions: Tensor, rows: int) -> None:
    """Raise for positions that an outer model counts from the start of rows with left padding.

    A graph refuses them when it runs.

    Args:
        padding: ``[B, S]``, 0 at padding.
        positions: ``[B or 1, T]``.
        rows: B.
    """
    if padding is None or positions.ndim != 2 or positions.shape[0] != 1:
        return
    begins = padding[:, 0].bool() | ~padding.bool().any(1)
    counts = rows > 1 or (positions.diff() == 1).all()
    advice = (
        "the same position_ids are given for all rows, as an outer model makes them; give each "
        "row its own, as generate does, or swap the outer model, in which only some layers may "
        'change: attnzoo.swap(model, {"text_config": ...})'
    )
    if not values_are_known(begins):
        is_wrong = ~begins.all() & counts
        torch._assert_async(~is_wrong, f"there is padding on the left, and {advice}")
    elif bool(counts) and not bool(begins.all()):
        row = int((~begins).nonzero()[0, 0])
        raise UnsupportedError(f"row {row} has padding on the left, and {advice}")


def _padding_of(mask: Any) -> Tensor | None:
    """Return the padding, ``[B, S]``, that a mask is, or those have that an outer model made."""
    if isinstance(mask, dict):
        found = [x for x in map(_padding_of, mask.values()) if x is not None]
        return max(found, key=lambda x: x.shape[1], default=None)
    if isinstance(mask, AttentionMask):
        return mask.padding
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _check_positions(positions: Tensor) -> None:
    if positions.ndim == 3 and positions.shape[0] == 1:
        raise UnsupportedError(
            f"position_ids have the shape {tuple(positions.shape)}; pass [batch, tokens], or "
            "[1, tokens] for all rows"
        )


def takes_positions(model: nn.Module) -> bool:
    """Return whether a model counts positions from the start of a row, or makes masks with them.

    False for a model that makes positions from the mask or from images.
    """
    code = seam.forward_code(model)
    if code is None or not OWN_POSITIONS.isdisjoint(code.co_names):
        return False
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if not set(seam.ATTENTION_MASK) <= set(arguments):
        return False
    stored = (x.argval for x in dis.get_instructions(code) if x.opname.startswith("STORE"))
    counts = "arange" in code.co_names and any("position_ids" in _names(x) for x in stored)
    makes_mask = any(x.startswith("create_") and "mask" in x for x in code.co_names)
    return counts or ("position_ids" in arguments and makes_mask)


def has_rotary_positions(model: nn.Module) -> bool:
    """Return whether layers of a model rotate queries and keys; learned positions do not count."""
    return any(name.endswith("inv_freq") for name, _ in model.named_buffers())


def _names(argument: Any) -> tuple[Any, ...]:
    """Return the names that an instruction stores; newer Python joins two instructions."""
    return argument if isinstance(argument, tuple) else (argument,)


def add_position_hooks(model: nn.Module) -> None:
    """Register the hook on the models in ``model`` that count positions or make masks."""
    remove_position_hooks(model)
    backends = ((module, layer_backend(module)) for module in model.modules())
    swapped = [(x, backend) for x, backend in backends if backend is not None]
    for owner in seam.pretrained_models(model):
        inner = set(owner.modules())
        found: list[Any] = [(x, backend) for x, backend in swapped if x in inner]
        if found and takes_positions(owner):
            exact = all(backend.capabilities.exact for _, backend in found)
            counts = not exact and has_rotary_positions(owner)
            hook = PositionHook(owner, found[0][0].config, counts=counts)
            vars(owner)[_HANDLE] = owner.register_forward_pre_hook(hook, with_kwargs=True)


def remove_position_hooks(model: nn.Module) -> None:
    """Remove the hooks of :func:`add_position_hooks`."""
    for owner in seam.pretrained_models(model):
        handle = vars(owner).pop(_HANDLE, None)
        if handle is not None:
            handle.remove()
