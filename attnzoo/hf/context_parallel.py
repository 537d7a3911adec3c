"""Context parallelism: each process runs the model on its tokens of every row.

Names of batch entries are those of transformers.
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

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.configs import read_field
from attnzoo.hf.layers import unwrap_model

IGNORE_INDEX = -100  # label that the loss ignores, as in transformers
SPLIT_ENTRIES = (  # split along dimension 1
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "labels",
    "shift_labels",
)
COPIED_ENTRIES = ("num_items_in_batch", "use_cache", "return_dict", "output_hidden_states")
# Where torch, by version, records that its context_parallel has replaced its attention function
TORCH_MODULES = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)


@contextmanager
def context_parallel(
    model: nn.Module, batch: Mapping[str, Any], group: Any | None = None
) -> Iterator[dict[str, Any]]:
    """Split the rows of a batch over processes, and synchronise the model's attention layers.

    Rank r of P runs tokens r T / P to (r + 1) T / P of every row. In the attention layers, ranks
    exchange what the backend needs: states, the keys of a window, or all keys for exact backends.
    Forward and backward equal those of one process::

        with attnzoo.context_parallel(model, batch, mesh["cp"]) as local_batch:
            loss = model(**local_batch).loss
            loss.backward()

    The loss of the full batch is the *mean* of the losses of all ranks, and the gradient of a
    parameter is the mean of theirs; DDP, FSDP and Accelerate average gradients this way. Without
    them, average over the group. The backward pass may run after the block, except with gradient
    checkpointing.

    Args:
        model: A swapped model, possibly wrapped (DDP, FSDP, PEFT).
        batch: Full rows, the same on all ranks. ``position_ids`` default to 0 to T - 1 (only for
            decoders, without padding). Without ``attention_mask``, packed sequences begin where
            positions are not consecutive, as in transformers.
        group: A ``ProcessGroup``, or a one-dimensional ``DeviceMesh`` such as
            ``accelerator.torch_device_mesh["cp"]``; all processes if ``None``.

    Yields:
        The batch of this rank, the arguments of the model's forward. If the batch has ``labels``,
        it also holds ``shift_labels``, shifted over full rows, and ``num_items_in_batch``, the
        number of labels in the loss per rank.

    Raises:
        SpecError: The model, or a submodel, is not swapped.
        UnsupportedError: The model or the batch cannot be split; the message lists every reason.
    """
    target = check_model(model)
    group = _process_group(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    full_batch = _complete_batch(target, dict(batch), size)
    local_batch, shard = _split_batch(full_batch, group, rank, size)
    backends = [module for module in model.modules() if isinstance(module, AttentionBackend)]
    for backend in backends:
        backend.shard = shard if size > 1 else None
    try:
        yield local_batch
    finally:
        for backend in backends:
            backend.shard = None


def refuse_torch_context_parallel(backend: AttentionBackend) -> None:
    """Raise if torch's own ``context_parallel`` is active.

    ``flash`` without a window calls torch's attention function, which torch replaces by ring
    attention, so it is supported.
    """
    if backend.name == "flash" and "window" not in backend.config.changed_options():
        return
    for module in TORCH_MODULES:
        replaced = getattr(sys.modules.get(module), "_replaced_functions", ())
        if F.scaled_dot_product_attention in replaced:
            raise UnsupportedError(
                f"{backend.geometry.name}: torch's context_parallel "
                "(accelerator.maybe_context_parallel) is active, which only supports torch's own "
                "attention, here backend 'flash' without a window; use "
                "attnzoo.context_parallel(model, batch, mesh) instead"
            )


def _process_group(group: Any | None) -> Any:
    """Return the process group of a group, a mesh or ``None``."""
    if not dist.is_initialized():
        raise UnsupportedError(
            "context_parallel needs several processes, and torch.distributed is not initialised; "
            "start with torchrun, and create an Accelerator or call init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UnsupportedError(
                f"The device mesh has {group.ndim} dimensions ({group.mesh_dim_names}); pass the "
                'one along which rows are split, such as mesh["cp"]'
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise UnsupportedError(
            f"This process ({dist.get_rank()}) is not in the given group; pass the group that "
            'contains it, such as mesh["cp"]'
        )
    return group


def check_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model in ``model``, or raise if its rows cannot be split."""
    target = unwrap_model(model)
    backends = [module for module in model.modules() if isinstance(module, AttentionBackend)]
    if target is None or not backends:
        raise SpecError(
            f"{type(model).__name__} is not swapped, so each rank would attend to its own tokens "
            'only; call attnzoo.swap(model, "linear") first, or attnzoo.swap(model, "flash") for '
            "exact attention"
        )
    others = {str(c._attn_implementation) for c in seam.all_configs(target)} - {"attnzoo"}
    if others:
        raise SpecError(
            f"A part of {type(target).__name__} runs its original attention ({', '.join(others)}), "
            "which would attend to the tokens of one rank only; swap the whole model"
        )
    reasons = [
        f"{b.geometry.name}, backend {b.name!r}: {reason}"
        for b in backends
        for reason in b.shard_reasons()
    ]
    config = target.config.get_text_config()
    if target.config.is_encoder_decoder:
        reasons.append("the model is an encoder-decoder, whose rows have different lengths")
    fields = ("layer_types", "layers_block_type", "block_types")
    layer_types = {str(kind) for name in fields for kind in read_field(config, name) or ()}
    mixers = sorted(k for k in layer_types if "attention" not in k or k.startswith("linear"))
    mixers += sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.Conv1d)})
    if mixers:
        reasons.append(f"layers other than attention mix tokens ({', '.join(mixers)})")
    if rope_types := {"dynamic", "longrope"} & _rope_types(config):
        reasons.append(
            f"rotary positions ({rope_types.pop()}) depend on the longest position of a call"
        )
    if "position_ids" not in inspect.signature(target.forward).parameters:
        reasons.append("the model has no position_ids argument and would count from 0 on each rank")
    if reasons:
        raise UnsupportedError(
            f"{type(target).__name__} does not support context parallelism: {'; '.join(reasons)}. "
            "Supported backends: linear, gated_linear, delta, performer, longformer, flash and "
            "softmax."
        )
    return target


def _rope_types(config: Any) -> set[str]:
    """Return the types of rotary positions in a config, which may have one per layer type."""
    rope = read_field(config, "rope_parameters") or read_field(config, "rope_scaling") or {}
    entries = [rope, *(entry for entry in rope.values() if isinstance(entry, dict))]
    return {str(entry.get("rope_type", "default")) for entry in entries}


def _complete_batch(target: PreTrainedModel, batch: dict[str, Any], size: int) -> dict[str, Any]:
    """Check a batch of full rows, and add position ids and shifted labels."""
    batch = {name: x for name, x in batch.items() if x is not None}
    reasons = [
        f"{name!r} is not known to have one entry per token"
        for name in batch
        if name not in (*SPLIT_ENTRIES, *COPIED_ENTRIES)
    ]
    inputs = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(inputs, Tensor):
        raise UnsupportedError("context_parallel needs input_ids or inputs_embeds of full rows")
    rows, length = inputs.shape[:2]
    if length % size:
        reasons.append(
            f"rows of {length} tokens are not divisible by {size} processes (pad them to "
            f"{-(-length // size) * size}, with attention_mask 0 and labels {IGNORE_INDEX})"
        )
    mask = batch.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        reasons.append("attention_mask is not [batch, tokens], 1 where a token is real")
    elif "position_ids" not in batch:
        padded = mask is not None and not bool(mask.bool().all())
        if padded or not _is_decoder(target):
            reasons.append("position_ids are missing (pass those of the full rows)")
        batch["position_ids"] = torch.arange(length, device=inputs.device)[None]
    positions = batch.get("position_ids")
    if positions is not None and (positions.ndim != 2 or positions.shape[1] != length):
        reasons.append(f"position_ids are {tuple(positions.shape)}, not {(rows, length)}")
    if "labels" in batch and "shift_labels" not in batch:
        if not _supports_shift_labels(target):
            reasons.append("labels are given to a model that is not a causal LM (use its logits)")
        batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    if reasons:
        raise UnsupportedError(f"The batch cannot be split over processes: {'; '.join(reasons)}.")
    batch["position_ids"] = batch["position_ids"].expand(rows, -1)
    if "shift_labels" in batch:
        number = (batch["shift_labels"] != IGNORE_INDEX).sum().clamp(min=1)
        batch["num_items_in_batch"] = batch.get("num_items_in_batch", number) / size
    return batch


def _is_decoder(target: PreTrainedModel) -> bool:
    """Return whether all swapped layers of a model are causal."""
    return all(m.geometry.causal for m in target.modules() if isinstance(m, AttentionBackend))


def _supports_shift_labels(target: PreTrainedModel) -> bool:
    """Return whether a model is a causal LM whose forward passes keywords on to its loss."""
    parameters = inspect.signature(target.forward).parameters.values()
    has_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return target.loss_type in ("ForCausalLM", None) and has_kwargs and _is_decoder(target)


def _split_batch(
    batch: dict[str, Any], group: Any, rank: int, size: int
) -> tuple[dict[str, Any], SequenceShard]:
    """Return this rank's part of a batch of full rows, and the shard for the backends."""
    length = batch["position_ids"].shape[1] // size
    padding = ids = None
    if "attention_mask" in batch:
        padding = batch["attention_mask"].bool()
        padding = None if bool(padding.all()) else padding
    else:
        starts = batch["position_ids"].diff(dim=1) != 1
        ids = F.pad(starts.cumsum(1), (1, 0)) if bool(starts.any()) else None
    shard = SequenceShard(
        group=group, rank=rank, size=size, length=length, padding=padding, segment_ids=ids
    )
    tokens = slice(rank * length, (rank + 1) * length)
    local_batch = {
        name: x[:, tokens].contiguous() if name in SPLIT_ENTRIES else x for name, x in batch.items()
    }
    return local_batch, shard
