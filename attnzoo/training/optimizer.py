"""Optimisers and learning-rate schedules by transformers' names.

The optimisers are AdamW, with its state in 32 or in 8 bits, Adafactor, and Muon for matrices with
AdamW for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import SchedulerType
from transformers.optimization import get_scheduler
from transformers.utils.import_utils import is_bitsandbytes_available

from attnzoo.errors import ConfigError, UnsupportedError, did_you_mean
from attnzoo.hf.seam import trainer_optimizer
from attnzoo.hf.swap.extras import decayed_parameters
from attnzoo.training.four_bits import require_bitsandbytes
from attnzoo.training.sharding import SHARDED
from attnzoo.training.transfer import extras

PAGED = ("paged_adamw_32bit", "paged_adamw_8bit")  # between the memory of GPU and CPU
EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit")  # these two are the same
BITSANDBYTES = (*EIGHT_BITS, *PAGED)
OPTIMIZERS = ("adamw_torch", *BITSANDBYTES, "adafactor", "muon")
BETAS = (0.9, 0.95)
ADAPTIVE = ("reduce_lr_on_plateau", "greedy")  # need the held-out loss during training
SCHEDULES = tuple(kind.value for kind in SchedulerType if kind.value not in ADAPTIVE)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some parameter groups and AdamW for the others, as one optimiser.

    Muon's updates are scaled to the size of AdamW's, so that both take the same learning rates.
    Source: Jordan et al., 2024, https://kellerjordan.github.io/posts/muon; the scale is that of
    Liu et al., 2025, arXiv:2502.16982.

    Args:
        groups: Parameter groups with ``use_muon`` and ``lr``.
        weight_decay: Of all groups.
        betas: Of AdamW.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        weight_decay: float,
        betas: tuple[float, float] = BETAS,
    ) -> None:
        mine = [{k: x for k, x in group.items() if k != "use_muon"} for group in groups]
        uses = [group["use_muon"] for group in groups]
        matrices = [group for group, use in zip(mine, uses, strict=True) if use]
        others = [group for group, use in zip(mine, uses, strict=True) if not use]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(
                torch.optim.Muon(
                    matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )
        if others:
            self.parts.append(torch.optim.AdamW(others, betas=betas, weight_decay=weight_decay))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share_state()

    def _share_state(self) -> None:
        """Let the parts have this optimiser's groups and state, so that it saves and loads both."""
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first:last], self.state
            first = last

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of both parts."""
        super().load_state_dict(state_dict)
        self._share_state()

    def step(self, closure: Any = None) -> Any:
        """Take a step of both parts."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss


def check_optimizer(name: str, betas: tuple[float, float] = BETAS) -> None:
    """Refuse the name of an unknown optimiser, and betas of one that has none.

    Raises:
        ConfigError: The optimiser is unknown, or ``"adafactor"`` with other betas than the default.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(
            f"optim must be one of {', '.join(OPTIMIZERS)}, got {name!r}."
            f"{did_you_mean(name, OPTIMIZERS)}"
        )
    if name == "adafactor" and tuple(betas) != BETAS:
        raise ConfigError(
            f"betas={tuple(betas)} are of AdamW, but optim='adafactor' has no first moment, and "
            "its decay of the second one is a schedule; leave betas out"
        )


def require_optimizer(name: str, accelerator: Accelerator) -> None:
    """Raise an error if an optimiser does not run here.

    Args:
        name: One of :data:`OPTIMIZERS`.
        accelerator: That of the run.

    Raises:
        ConfigError: It does not run on shards of weights; or its state is paged between GPU and
            CPU, but there is no such GPU.
        UnsupportedError: bitsandbytes is not installed, or too old for transformers.
    """
    if accelerator.distributed_type in SHARDED:
        _require_sharded(name, accelerator.distributed_type)
    if name in BITSANDBYTES:
        instead = "'adafactor' saves memory without it, and 'adamw_torch' needs no other package"
        require_bitsandbytes(f"optim={name!r} needs", instead)
        if not is_bitsandbytes_available():
            raise UnsupportedError(
                f"optim={name!r} needs a newer bitsandbytes than the one that is installed, by "
                f"what transformers requires (pip install -U bitsandbytes); {instead}"
            )
    if name in PAGED and accelerator.device.type not in ("cuda", "xpu"):
        raise ConfigError(
            f"optim={name!r} moves its state between the memory of the GPU and the CPU, but this "
            f"run is on the device {accelerator.device.type!r}; use 'adamw_8bit', or 'adamw_torch'"
        )


def _require_sharded(name: str, kind: DistributedType) -> None:
    """Raise an error if an optimiser does not run on shards of weights."""
    deepspeed = kind == DistributedType.DEEPSPEED
    if name == "adamw_torch" or (deepspeed and name in EIGHT_BITS):
        return
    advice = "use 'adamw_torch', whose state is sharded too, or train without sharding"
    if name in PAGED and deepspeed:
        raise ConfigError(
            f"optim={name!r} moves its state between GPU and CPU, which is not tested "
            "with DeepSpeed's flat partitions; use 'adamw_8bit', which is, or 'adamw_torch'"
        )
    if name in BITSANDBYTES:
        raise ConfigError(
            f"optim={name!r} does not run on weights that FSDP2 shards: the operators of "
            "bitsandbytes take no DTensor ('got mixed torch.Tensor and DTensor'). Train with the "
            f"launch config deepspeed_zero2 or deepspeed_zero3 and 'adamw_8bit'; or {advice}"
        )
    raise ConfigError(
        f"optim={name!r} updates whole tensors, but FSDP or DeepSpeed shards them; {advice}"
    )


def make_optimizer(
    name: str,
    model: nn.Module,
    groups: list[dict[str, Any]],
    *,
    weight_decay: float,
    betas: tuple[float, float] = BETAS,
) -> torch.optim.Optimizer:
    """Return the optimiser of a stage.

    Args:
        name: ``"adamw_torch"``; ``"adamw_8bit"`` and other names of transformers, which are in
            :data:`OPTIMIZERS`; or ``"muon"``: Muon for the matrices of the model's own layers, and
            AdamW for embeddings, vectors and the parameters that backends add.
        model: The model that has the parameters.
        groups: Parameter groups with learning rates.
        weight_decay: Of the parameters that it applies to: neither norms nor biases, nor those that
            set a decay or a mixture of a backend.
        betas: Of AdamW.
    """
    if weight_decay:
        groups = _split_by_weight_decay(model, groups, weight_decay)
    if name == "adamw_torch":
        return torch.optim.AdamW(groups, betas=betas, weight_decay=weight_decay)
    if name != "muon":
        return _transformers_optimizer(name, model, groups, weight_decay, betas)
    excluded = {id(p) for p in extras(model).values()}
    for module in model.modules():
        if isinstance(module, nn.Embedding):  # an output layer has its weight, or one as large
            excluded |= {id(p) for p in module.parameters()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    excluded |= set() if head is None else {id(p) for p in head.parameters()}
    split = []
    for group in groups:
        for use in (True, False):
            chosen = [p for p in group["params"] if (p.ndim == 2 and id(p) not in excluded) == use]
            if chosen:
                split.append({**group, "params": chosen, "use_muon": use})
    return MuonWithAdamW(split, weight_decay=weight_decay, betas=betas)


def _transformers_optimizer(
    name: str,
    model: nn.Module,
    groups: list[dict[str, Any]],
    weight_decay: float,
    betas: tuple[float, float],
) -> torch.optim.Optimizer:
    """Return an optimizer that transformers' ``Trainer`` makes by the same name."""
    cls, options = trainer_optimizer(name, betas)
    if name in BITSANDBYTES:
        cls = _with_group_bits(cls)
        wide = {id(x.weight) for x in model.modules() if isinstance(x, nn.Embedding)}
        split = []
        for group in groups:
            for bits in ({}, {"optim_bits": 32}):
                chosen = [p for p in group["params"] if (id(p) in wide) == bool(bits)]
                if chosen:
                    split.append({**group, "params": chosen, **bits})
        groups = split
    optimizer: torch.optim.Optimizer = cls(groups, weight_decay=weight_decay, **options)
    return optimizer


def _with_group_bits(cls: Any) -> Any:
    """Return a class of bitsandbytes whose groups may have an ``optim_bits`` of their own.

    bitsandbytes has a table of such parameters for the whole process, by their ids, which holds
    models for ever and hits new parameters that get the id of an old one.
    """

    class GroupBits(cls):  # type: ignore[misc]
        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config(gindex, pindex, group)
            return {**config, "optim_bits": group.get("optim_bits", config["optim_bits"])}

        @torch.no_grad()
        def load_state_dict(self, state_dict: Any, move_to_device: bool = True) -> None:
            super().load_state_dict(state_dict, move_to_device)
            if not self.is_paged:
                return
            for parameter, state in self.state.items():  # which is now in memory that is not paged
                for key in ("state1", "state2"):
                    buffer = self.get_state_buffer(parameter, dtype=state[key].dtype)
                    state[key] = buffer.copy_(state[key])

    return GroupBits


def _split_by_weight_decay(
    model: nn.Module, groups: list[dict[str, Any]], weight_decay: float
) -> list[dict[str, Any]]:
    """Return groups of parameters that have the same weight decay, ``weight_decay`` or 0."""
    named = dict(model.named_parameters(remove_duplicate=False))
    decayed = {id(named[name]) for name in decayed_parameters(model)}
    split = []
    for group in groups:
        for value in (weight_decay, 0.0):
            chosen = [p for p in group["params"] if (id(p) in decayed) == (value > 0)]
            if chosen:
                split.append({**group, "params": chosen, "weight_decay": value})
    return split


def make_schedule(
    name: str,
    options: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    *,
    warmup: int,
    steps: int,
) -> Any:
    """Return a schedule of the learning rates of an optimizer.

    Args:
        name: ``lr_scheduler_type`` of transformers' ``TrainingArguments``, such as ``"cosine"``.
        options: Its ``lr_scheduler_kwargs``.
        optimizer: The optimizer.
        warmup: Steps of linear warmup; ``"constant"`` has none.
        steps: Steps in all.
    """
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(options),
    )


def check_schedule(name: str, options: Mapping[str, Any]) -> None:
    """Raise an error for a schedule that does not exist or cannot be made.

    Raises:
        ConfigError: The name is unknown, or the options are not those of this schedule.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            f"lr_scheduler_type must be one of {', '.join(SCHEDULES)}, got {name!r}."
            f"{did_you_mean(name, SCHEDULES)}"
        )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    try:
        make_schedule(name, options, optimizer, warmup=1, steps=10)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"The schedule {name!r} cannot be made with lr_scheduler_kwargs={dict(options)}: "
            f"{error}"
        ) from error
