"""Rows that lie on several processes: every one runs the model on its share of a batch.

What transformers, Accelerate and torch call context parallelism. Names of what a batch holds, and
of what is yielded, are those of transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.integrations import compat
from attnzoo.integrations.layers import whole_model
from attnzoo.ops.context_parallel import Shard

IGNORED = -100  # a label that no loss counts, as transformers has it
BY_TOKEN = (  # what is cut along dimension 1
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "labels",
    "shift_labels",
)
AS_THEY_ARE = ("num_items_in_batch", "use_cache", "return_dict", "output_hidden_states")
TORCHS = (  # where torch, by version, notes that it has taken hold of its attention function
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)


@contextmanager
def context_parallel(
    model: nn.Module, batch: Mapping[str, Any], group: Any | None = None
) -> Iterator[dict[str, Any]]:
    """Give every process its share of whole rows, and let the model's backends work together.

    Process r of P runs tokens r T / P to (r + 1) T / P of every row. Where tokens meet, in the
    attention layers, processes send each other what is needed: states, the keys of a window, or,
    for the exact backends, all keys. Forward and backward equal those of one process::

        with attnzoo.context_parallel(model, batch, mesh["cp"]) as share:
            loss = model(**share).loss
            loss.backward()

    The loss of whole rows is the *mean* of the processes' losses, and a parameter's gradient the
    mean of theirs, which is what DDP, FSDP and Accelerate make of them; without these, average them
    over the group. The backward pass may come after the block, except under gradient checkpointing.

    Args:
        model: A swapped model; wrappers (DDP, FSDP, PEFT) may be around it.
        batch: Whole rows, the same on all processes of the group. ``position_ids``, where they are
            not given, are 0 to T - 1 (of decoders, without padding). Without ``attention_mask``,
            positions that jump are where packed sequences begin, as in transformers.
        group: The processes that share rows: a ``ProcessGroup``, or a ``DeviceMesh`` of one
            dimension, such as ``accelerator.torch_device_mesh["cp"]``; all processes without.

    Yields:
        The batch for this process, to be given to the model's forward. ``labels`` come as
        ``shift_labels`` too, shifted over whole rows, with ``num_items_in_batch``: how many of them
        count, for each process.

    Raises:
        SpecError: The model, or a part of it, is not swapped.
        UnsupportedError: It cannot run on shares of these rows; every reason is given.
    """
    target = refuse_model(model)
    group = _group(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = _whole(target, dict(batch), size)
    share, shard = _share(whole, group, rank, size)
    backends = [module for module in model.modules() if isinstance(module, AttentionBackend)]
    for backend in backends:
        backend.shard = shard if size > 1 else None
    try:
        yield share
    finally:
        for backend in backends:
            backend.shard = None


def refuse_torchs(backend: AttentionBackend) -> None:
    """Refuse to run while torch's own ``context_parallel`` holds the rows' shares.

    All but ``flash`` without a window: that calls the function which torch then makes ring
    attention of, where torch has it (on GPUs).

    Raises:
        UnsupportedError: It cuts rows in another order, and knows of no states.
    """
    if torch.compiler.is_compiling():
        return
    if backend.name == "flash" and "window" not in backend.config.changed_options():
        return
    for module in TORCHS:
        held = getattr(sys.modules.get(module), "_replaced_functions", ())
        if F.scaled_dot_product_attention in held:
            raise UnsupportedError(
                f"{backend.geometry.name}: torch's context_parallel "
                "(accelerator.maybe_context_parallel) is active, which serves torch's own "
                "attention, here backend 'flash' without a window, and no other; use "
                "attnzoo.context_parallel(model, batch, mesh) in its place"
            )


def _group(group: Any | None) -> Any:
    """Return the process group that a user means."""
    if not dist.is_initialized():
        raise UnsupportedError(
            "context_parallel needs several processes, and torch.distributed is not initialised; "
            "start with torchrun, and make an Accelerator or call init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UnsupportedError(
                f"The device mesh has {group.ndim} dimensions ({group.mesh_dim_names}); give the "
                'one along which rows are cut, such as mesh["cp"]'
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise UnsupportedError(
            f"This process ({dist.get_rank()}) is not in the group that shares rows; give the one "
            'that it is in, such as mesh["cp"]'
        )
    return group


def refuse_model(model: nn.Module) -> PreTrainedModel:
    """Refuse a model whose tokens meet where no backend of ours sees to it.

    Returns:
        The transformers model in it.

    Raises:
        SpecError: The model, or a part of it, is not swapped.
        UnsupportedError: It cannot run on shares of its rows; every reason is given.
    """
    target = whole_model(model)
    backends = [module for module in model.modules() if isinstance(module, AttentionBackend)]
    if target is None or not backends:
        raise SpecError(
            f"{type(model).__name__} is not swapped, so its attention would see one share of every "
            'row only; call attnzoo.swap(model, "linear") first, or attnzoo.swap(model, "flash") '
            "for exact attention"
        )
    others = {str(c._attn_implementation) for c in compat.all_configs(target)} - {"attnzoo"}
    if others:
        raise SpecError(
            f"A part of {type(target).__name__} runs its own attention ({', '.join(others)}), "
            "which would see one share of every row only; swap the whole model"
        )
    reasons = [
        f"{b.geometry.name}, backend {b.name!r}: {reason}"
        for b in backends
        for reason in b.shard_reasons()
    ]
    config = target.config.get_text_config()
    if target.config.is_encoder_decoder:
        reasons.append("the model is an encoder and a decoder, each with rows of its own")
    kinds = {*(getattr(config, "layer_types", None) or ()), *_block_types(config)}
    mixing = sorted(k for k in kinds if "attention" not in k or k.startswith("linear"))
    mixing += sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.Conv1d)})
    if mixing:
        reasons.append(f"tokens meet outside of attention too ({', '.join(mixing)})")
    if kinds := {"dynamic", "longrope"} & _rope_types(config):
        reasons.append(f"rotary positions ({kinds.pop()}) follow the longest position of a call")
    if "position_ids" not in inspect.signature(target.forward).parameters:
        reasons.append("the model takes no position_ids, and would count every share from 0")
    if reasons:
        raise UnsupportedError(
            f"{type(target).__name__} cannot run on shares of its rows: {'; '.join(reasons)}. "
            "Backends that can: linear, gated_linear, performer, longformer, and flash or softmax."
        )
    return target


def _block_types(config: Any) -> list[str]:
    """Return the kinds of layers of a config that has other names for them."""
    found = getattr(config, "layers_block_type", None) or getattr(config, "block_types", None)
    return [str(kind) for kind in found or ()]


def _rope_types(config: Any) -> set[str]:
    """Return the kinds of rotary positions of a config, of which it may have one per layer type."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [given, *(part for part in given.values() if isinstance(part, dict))]
    return {str(part.get("rope_type", "default")) for part in parts}


def _whole(target: PreTrainedModel, batch: dict[str, Any], size: int) -> dict[str, Any]:
    """Check a batch of whole rows, and complete it: positions, labels of the next token.

    Raises:
        UnsupportedError: It holds what cannot be cut into shares.
    """
    batch = {name: x for name, x in batch.items() if x is not None}
    reasons = [
        f"{name!r} is given, which is not known to be by token"
        for name in batch
        if name not in (*BY_TOKEN, *AS_THEY_ARE)
    ]
    rows = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(rows, Tensor):
        raise UnsupportedError("context_parallel needs input_ids or inputs_embeds of whole rows")
    count, length = rows.shape[:2]
    if length % size:
        reasons.append(
            f"rows of {length} tokens do not divide over {size} processes (pad them to "
            f"{-(-length // size) * size}, with attention_mask 0 and labels {IGNORED})"
        )
    mask = batch.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        reasons.append("attention_mask is not [batch, tokens], 1 where a token is real")
    elif "position_ids" not in batch:
        padded = mask is not None and not bool(mask.bool().all())
        if padded or not _is_decoder(target):
            reasons.append("position_ids are missing (of whole rows, as the model counts them)")
        batch["position_ids"] = torch.arange(length, device=rows.device)[None]
    positions = batch.get("position_ids")
    if positions is not None and (positions.ndim != 2 or positions.shape[1] != length):
        reasons.append(f"position_ids are {tuple(positions.shape)}, not {(count, length)}")
    if "labels" in batch and "shift_labels" not in batch:
        parameters = inspect.signature(target.forward).parameters.values()
        takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        decoder = _is_decoder(target)
        if target.loss_type not in ("ForCausalLM", None) or not (takes_more and decoder):
            reasons.append("labels are given to a model that is not a causal LM (use its logits)")
        batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    if reasons:
        raise UnsupportedError(f"The batch cannot be cut into shares: {'; '.join(reasons)}.")
    batch["position_ids"] = batch["position_ids"].expand(count, -1)
    if "shift_labels" in batch:
        number = (batch["shift_labels"] != IGNORED).sum().clamp(min=1)
        batch["num_items_in_batch"] = batch.get("num_items_in_batch", number) / size
    return batch


def _is_decoder(target: PreTrainedModel) -> bool:
    """Whether all of a model's swapped layers are causal."""
    return all(m.geometry.causal for m in target.modules() if isinstance(m, AttentionBackend))


def _share(batch: dict[str, Any], group: Any, rank: int, size: int) -> tuple[dict[str, Any], Shard]:
    """Cut whole rows; returns what the model is given, and what its backends are told."""
    width = batch["position_ids"].shape[1]
    length = width // size
    here = slice(rank * length, (rank + 1) * length)
    padding = ids = None
    if "attention_mask" in batch:
        real = batch["attention_mask"].bool()
        padding = None if bool(real.all()) else real
    else:
        jumps = batch["position_ids"].diff(dim=1) != 1
        ids = F.pad(jumps.cumsum(1), (1, 0)) if bool(jumps.any()) else None
    shard = Shard(
        group=group, rank=rank, size=size, length=length, padding=padding, segment_ids=ids
    )
    share = {name: x[:, here].contiguous() if name in BY_TOKEN else x for name, x in batch.items()}
    return share, shard
