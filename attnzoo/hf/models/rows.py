"""Positions and documents of rows: a pre-hook of a model reads them once for all of its layers.

The result of softmax depends on differences of rotary positions only. That of feature maps and of
convolutions depends on the positions themselves, so that the output of a row would depend on how
much padding precedes it. ``generate`` passes positions; classification heads, embedders and the
log-probabilities of trainers pass only a mask.

transformers reads packed documents from positions only without a mask and without a cache, its
flash attention also beside a mask of ones. Recurrent layers read them from ``seq_idx`` or
``cu_seq_lens_q``.
"""

from __future__ import annotations

import dis
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import values_are_known
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.attention.call import ModelHook, layer_backend
from attnzoo.hf.attention.packing import Packing, packed_starts, restarting_positions
from attnzoo.hf.configs import read_field
from attnzoo.hf.models.positions import TABLE_NAMES
from attnzoo.hf.names import NAME

# What models read that make positions from the mask, or from images
OWN_POSITIONS = frozenset({"cumsum", "get_rope_index", "compute_3d_position_ids"})
FIRST_POSITION = {"paligemma": 1}  # where it is not 0
_HANDLE = "_attnzoo_rows"  # attribute of hooked models: the hook, and its handle
TAKES_NONE = (
    "{name} counts positions from the start of the row and takes no position_ids, so rows of "
    "several documents are not supported; pass one document a row"
)
ADVICE = "pass neither attention_mask, if all tokens are real, nor a cache (use_cache=False)"
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


def update_row_hooks(model: nn.Module, *, sped_up: bool | None = None) -> None:
    """Register the hook on the models in ``model`` whose layers need it, and remove it from others.

    Those are models with swapped layers that count positions, make masks, or know packed sequences,
    and models with recurrent layers beside swapped ones, or that are sped up.

    Args:
        model: The model.
        sped_up: Whether its recurrent layers read the borders; ``None`` leaves it as it is.
    """
    backends = ((module, layer_backend(module)) for module in model.modules())
    swapped = [(x, backend) for x, backend in backends if backend is not None]
    models = seam.pretrained_models(model)
    recurrent = {x for x in models if seam.has_recurrent_layers(x)}
    for owner in models:
        hook, handle = vars(owner).pop(_HANDLE, (None, None))
        if handle is not None:
            handle.remove()
        reads = (hook is not None and hook.sped_up) if sped_up is None else sped_up
        inner = set(owner.modules())
        found = [(x, backend) for x, backend in swapped if x in inner]
        serves = found and (takes_positions(owner) or _serves_layers(owner, [x for x, _ in found]))
        if serves or (owner in recurrent and (found or reads)):
            encloses = not inner.isdisjoint(recurrent - {owner})
            hook = RowHook(owner, found if serves else [], encloses=encloses)
            hook.sped_up = reads
            handle = owner.register_forward_pre_hook(hook, with_kwargs=True)
            vars(owner)[_HANDLE] = hook, handle


class RowHook(ModelHook):
    """A forward pre-hook on a model that gives its layers positions and documents, or refuses.

    It reads the borders of documents once per call, from the packing arguments and the positions,
    which must agree.

    Args:
        model: The model.
        layers: Its swapped layers, whose positions the hook serves, and their backends.
        encloses: Whether the model only calls another with recurrent layers, whose hook refuses
            what it cannot do; some models do not pass all arguments on.

    Attributes:
        sped_up: Whether the recurrent layers read the borders.
    """

    reads = (*seam.ATTENTION_MASK, "position_ids", *Packing._fields)
    groups = ("input_ids", "inputs_embeds"), seam.ATTENTION_MASK, ("position_ids",)

    def __init__(self, model: Any, layers: list[Any], *, encloses: bool = False) -> None:
        super().__init__(type(model).forward)
        self.encloses, self.sped_up = encloses, False
        self.recurrent = seam.has_recurrent_layers(model)
        signature = inspect.signature(inspect.unwrap(type(model).forward))
        self.passes_on = any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values())
        self.takes_positions = "position_ids" in self.names
        self.config = layers[0][0].config if layers else None  # says whether the swap runs
        # Whether to count positions from the first real token of each row, if none are given.
        # Learned embeddings differ between families and keep the model's own.
        exact = all(backend.capabilities.exact for _, backend in layers)
        self.counts = takes_positions(model) and not exact and has_rotary_positions(model)
        self.absolute = self.counts or has_position_table(model)
        self.causal = any(backend.geometry.causal for _, backend in layers)
        self.mask_reads_positions = _mask_reads_positions(model)
        self.first = first_position(model)

    def change(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return other arguments; ``None`` leaves them as they are."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        changed = self._separate(model, given) if self.recurrent else None
        if self.config is not None and self.config._attn_implementation == NAME:
            given = given if changed is None else changed
            new = self._place(model, given)
            changed = changed if new is None else given | new
        return None if changed is None else ((), changed)

    def _separate(self, model: Any, given: dict[str, Any]) -> dict[str, Any] | None:
        """Return arguments that give all layers, on a CPU, the same documents; else ``None``."""
        tokens, mask, positions = self.find((), given, *self.groups)
        runs = self.sped_up or model.config._attn_implementation == NAME
        if tokens is None or tokens.device.type != "cpu" or not runs:
            return None
        family = model.config.get_text_config().model_type
        if self.encloses and family in PACKED_HYBRIDS:
            return None
        packing = Packing(*map(given.get, Packing._fields))
        if tokens.shape[1] == 1:
            positions = None
            if self.sped_up and isinstance(mask, Tensor) and mask.ndim == 2:
                refuse_rows(~mask[:, -1].bool(), DECODED_PADDING)
        if not packing.given() and positions is None:
            return None
        cache = self.cache((), given)
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
            return given
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
        return given

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

    def _place(self, model: nn.Module, given: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return the positions, or the documents, that swapped layers need beside what is given."""
        tokens, mask, positions = self.find((), given, *self.groups)
        if tokens is None:
            return None
        padding = None if mask is None else _padding_of(mask)
        cache = self.cache((), given)
        if isinstance(cache, seam.PagedAttentionCache):
            return None  # continuous batching passes positions, and where each request begins
        past = 0 if cache is None else cache.get_seq_length()
        if positions is not None:
            if positions.ndim == 3 and positions.shape[0] == 1:
                raise UnsupportedError(
                    f"position_ids have the shape {tuple(positions.shape)}; pass [batch, tokens], "
                    "or [1, tokens] for all rows"
                )
            if self.counts and not isinstance(past, Tensor) and not past:
                _refuse_shared_positions(padding, positions, tokens.shape[0])
        packing = Packing(*map(given.get, Packing._fields))
        is_packed = not (packing[0] is packing[1] is packing[2] is None)
        if is_packed and not self.recurrent and not (packing.has_lengths and _is_later(past)):
            made = self._positions_of(model, packing, positions, padding, tokens)
            if made is not None and not _is_later(past):  # the layers refuse borders there
                return {"position_ids": made}
        if positions is not None:
            if is_packed or self.recurrent or isinstance(past, Tensor) or past:
                return None
            has_cache = cache is not None or keeps_cache(model, given)
            return self._documents_of(model, positions, mask, has_cache)
        if self.counts and padding is not None:
            if not self.takes_positions:
                refuse_rows(
                    _starts_with_padding(padding),
                    f"has padding on the left, and {type(model).__name__} takes no position_ids "
                    "and counts from the start of the row; pad on the right",
                )
                return None
            return {"position_ids": row_positions(padding, tokens, past) + self.first}
        return None

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
        real = None if padding is None else padding[:, -tokens:].to(x.device).bool()
        flat = positions if positions is not None and positions.ndim == 2 else None
        union, is_compared = packed_starts(packing, flat, real, (batch, tokens))
        union = union.to(x.device)
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
    if given:
        union, _ = packed_starts(packing, positions, real, shape)
    elif positions is None:
        return None
    else:
        by_steps = mask is None and not keeps_cache
        found = positions.diff(dim=1) != 1 if by_steps else restarts(positions, real)
        if not known and (one_each or not by_steps):
            torch._assert_async(~found.any(), PACKED_IN_GRAPH)
            return None
        union = found.expand(batch, -1)
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
