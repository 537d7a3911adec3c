"""Tell all layers of a model with recurrent layers where the documents of packed rows begin.

Its layers read this from different arguments: softmax layers from a mask, which transformers makes
of ``position_ids`` if there is neither a cache nor an ``attention_mask``, and recurrent layers from
``seq_idx`` or ``cu_seq_lens_q``. A model that is sped up reads all of them once per call, and gives
all layers the same borders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.contract.padding import values_are_known
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.attention.call import ForwardArguments
from attnzoo.hf.attention.packing import (
    Packing,
    add_position_starts,
    join_starts,
    restarting_positions,
)
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME

# Models that pass the borders of documents to all layers that mix tokens, if `speed_up` runs their
# recurrent layers; and those of them that make masks without regard to positions
PACKED_HYBRIDS = frozenset(
    {
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
        *("bailing_hybrid", "granitemoehybrid", "bamba", "nemotron_h", "falcon_h1", "zamba2"),
        "lara_mini",
    }
)
MASKS_WITHOUT_POSITIONS = frozenset({"granitemoehybrid"})
MASKED_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", NAME)  # whose layers get masks
PACKED_IN_GRAPH = (
    "position_ids begin again inside of a row, and this compiled model supports one document a row "
    "there; call attnzoo.speed_up(model), and pass use_cache=False and no attention_mask"
)
DECODED_PADDING = (
    "is a single token of padding (attention_mask is 0), for which recurrent layers have no mask; "
    "leave these rows out of the batch, or pass all tokens of the padded prompt in one call"
)


def add_document_hooks(model: nn.Module, *, sped_up: bool = False) -> None:
    """Register the hook on the models in ``model`` that have recurrent layers."""
    recurrent = [x for x in seam.pretrained_models(model) if seam.has_recurrent_layers(x)]
    for owner in recurrent:
        hook = next(iter(_hooks(owner).values()), None)
        if hook is None:
            inner = set(owner.modules()) - {owner}
            hook = DocumentHook(type(owner).forward, encloses=not inner.isdisjoint(recurrent))
            owner.register_forward_pre_hook(hook, with_kwargs=True)
        hook.sped_up |= sped_up


def remove_document_hooks(model: nn.Module, *, sped_up: bool = False) -> None:
    """Remove the hooks from models in ``model`` that are now neither swapped nor sped up."""
    for owner in seam.pretrained_models(model):
        for key, hook in _hooks(owner).items():
            hook.sped_up &= not sped_up
            if not hook.sped_up and all(NAME not in x._modules for x in owner.modules()):
                del owner._forward_pre_hooks[key], owner._forward_pre_hooks_with_kwargs[key]


def _hooks(model: nn.Module) -> dict[int, DocumentHook]:
    hooks = model._forward_pre_hooks.items()
    return {key: hook for key, hook in hooks if isinstance(hook, DocumentHook)}


class DocumentHook(ForwardArguments):
    """A forward pre-hook that gives all layers the same borders, on CPUs, or refuses the call.

    Args:
        forward: The method of the model's class.
        encloses: Whether the model only calls another that creates the masks. Its hook refuses what
            the other cannot do; some models do not pass all arguments on.

    Attributes:
        sped_up: Whether the recurrent layers read the borders.
    """

    def __init__(self, forward: Callable[..., Any], *, encloses: bool) -> None:
        super().__init__(forward)
        self.encloses = encloses
        self.sped_up = False

    def __call__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return other arguments for rows of several documents, else ``None``."""
        groups = ("input_ids", "inputs_embeds"), seam.ATTENTION_MASK, ("position_ids",)
        tokens, mask, positions = self.find(args, kwargs, *groups)
        runs = self.sped_up or model.config._attn_implementation == NAME
        if tokens is None or tokens.device.type != "cpu" or not runs:
            return None
        family = model.config.get_text_config().model_type
        if self.encloses and family in PACKED_HYBRIDS:
            return None
        packing = Packing(*(kwargs.get(name) for name in Packing._fields))
        if tokens.shape[1] == 1:
            positions = None
            if self.sped_up and isinstance(mask, Tensor) and mask.ndim == 2:
                refuse_rows(~mask[:, -1].bool(), DECODED_PADDING)
        if not packing.given() and positions is None:
            return None
        given = dict(zip(self.names, args, strict=False)) | kwargs
        cache = self.cache(args, kwargs)
        reason = self._unsupported_reason(model)
        starts = document_starts(
            packing,
            _text_positions(positions),
            mask,
            (tokens.shape[0], tokens.shape[1]),
            keeps_cache=cache is not None or keeps_cache(model, given),
            one_each=bool(reason),
        )
        if starts is None and not packing.given():
            return None
        given = {name: x for name, x in given.items() if name not in Packing._fields}
        if starts is None:
            return (), given
        if cache is not None or given.get("use_cache"):
            reason = "a cache is given or requested, and no call can continue from packed rows"
        if reason:
            raise UnsupportedError(
                f"rows of several documents are not supported here: {reason}. Call the model with "
                "use_cache=False, or with one document a row"
            )
        text = restarting_positions(starts, _text_positions(positions))
        given |= {"use_cache": False, "attention_mask": None}
        given["seq_idx"] = F.pad(starts.int().cumsum(1, dtype=torch.int32), (1, 0))
        if "position_ids" in self.names:
            mrope = positions is not None and positions.ndim == 3
            given["position_ids"] = torch.cat([text[None], positions[-3:]]) if mrope else text
        if family in MASKS_WITHOUT_POSITIONS:
            given["attention_mask"] = seam.document_masks(model, text)
        return (), given

    def _unsupported_reason(self, model: Any) -> str:
        """Return why the layers of a model cannot get borders, or ``""``."""
        config = model.config
        if config.get_text_config().model_type not in PACKED_HYBRIDS:
            return f"not all layers of {type(model).__name__} would get them"
        if not self.sped_up:
            return "the recurrent layers would mix them; call attnzoo.speed_up(model) first"
        if config._attn_implementation not in MASKED_IMPLEMENTATIONS:
            return f"attn_implementation={config._attn_implementation!r} gets no mask on a CPU"
        return ""


def keeps_cache(model: Any, given: dict[str, Any]) -> bool:
    """Return whether a call without a cache creates one."""
    found = given.get("use_cache")
    checkpoints = getattr(model, "gradient_checkpointing", False) and model.training
    default = read_field(model.config, "use_cache") and not checkpoints
    return bool(default if found is None else found)


def refuse_rows(wrong: Tensor, reason: str) -> None:
    """Raise ``UnsupportedError`` if any row is ``wrong``, ``[B]``; a graph raises when it runs."""
    if not values_are_known(wrong):
        torch._assert_async(~wrong.any(), f"a row {reason}")
    elif bool(wrong.any()):
        rows = ", ".join(map(str, wrong.nonzero()[:, 0].tolist()))
        raise UnsupportedError(f"row {rows} {reason}")


def _text_positions(positions: Tensor | None) -> Tensor | None:
    """Return positions in a text, ``[B or 1, T]``; with M-RoPE they are the first of four kinds."""
    if positions is None or positions.ndim == 2:
        return positions
    return positions[0] if positions.ndim == 3 and positions.shape[0] == 4 else None


def document_starts(
    packing: Packing,
    positions: Tensor | None,
    mask: Any,
    shape: tuple[int, int],
    *,
    keeps_cache: bool,
    one_each: bool = False,
) -> Tensor | None:
    """Return the tokens after the first that begin a document, ``[B, T - 1]`` bool, or ``None``.

    Runs of padding count as documents, so that rows of several need no other mask. With a cache or
    a mask, ``positions [B or 1, T]`` that begin again at 0 begin a document; without, each step
    that is not 1 does, as in the masks of transformers. ``one_each`` says that a compiled graph
    supports only one document a row.
    """
    given, (batch, tokens) = packing.given(), shape
    real = mask[:, -tokens:].bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
    if reasons := packing.shape_reasons(batch, tokens):
        raise UnsupportedError(f"{' and '.join(given)}: {'; '.join(reasons)}")
    known = values_are_known(*given.values(), *(x for x in (positions, real) if x is not None))
    if mask is not None and (real is None or not known) and given:
        raise UnsupportedError(
            f"{' and '.join(given)} and an attention_mask are given, which must be [batch, tokens] "
            "and, in a compiled call, missing; leave the attention_mask out"
        )
    if real is not None and known and bool(real.all()):
        real = None
    starts = packing.starts(tokens)
    is_compared = packing.is_before_end(tokens)
    if real is not None:
        is_compared = is_compared & (real[:, 1:] & real[:, :-1])
    if positions is not None and given:
        add_position_starts(starts, positions, is_compared)
    elif positions is not None:
        by_steps = mask is None and not keeps_cache
        found = positions.diff(dim=1) != 1 if by_steps else restarts(positions, real)
        if not known and (one_each or not by_steps):
            torch._assert_async(~found.any(), PACKED_IN_GRAPH)
        elif not known or bool(found.any()):
            starts["position_ids"] = found
    if not starts:
        return None
    union = join_starts(starts, is_compared).expand(batch, -1)
    if not known:
        return union
    if not bool(union.any()):
        return None
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise UnsupportedError(
            "position_ids begin again inside of a row, and the attention_mask is not [batch, "
            "tokens], so recurrent layers do not know it; leave the attention_mask out"
        )
    return union if real is None else _with_padding(union, real)


def restarts(positions: Tensor, real: Tensor | None) -> Tensor:
    """Return where real tokens have position 0, in rows where this happens again, ``[B, T - 1]``.

    Positions of padding on the left, of beams and trees do not count.
    """
    is_zero, is_later = positions == 0, positions > 0
    if real is not None:
        is_zero, is_later = is_zero & real, is_later & real
    later = is_later.cumsum(1)[:, :-1] > 0
    is_packed = (is_zero[:, 1:] & later).any(1) & (is_zero.sum(1) > 1)
    return is_zero[:, 1:] & is_packed[:, None]


def _with_padding(starts: Tensor, real: Tensor) -> Tensor:
    """Return the starts of documents and of runs of padding, ``[B, T - 1]``."""
    begins = real[:, 1:] & ~real[:, :-1]
    goes_on = begins & (real.cumsum(1)[:, :-1] > 0) & ~starts
    if bool(goes_on.any()):
        row, token = goes_on.nonzero()[0].tolist()
        raise UnsupportedError(
            f"a document of row {row} goes on after padding, at token {token + 1}; put the padding "
            "between or after the documents"
        )
    return starts | (real[:, 1:] != real[:, :-1])
