"""LoRA adapters beside the parameters that backends add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.hf.names import NAME
from attnzoo.optional_packages import OptionalPackage

if TYPE_CHECKING:
    import peft
else:
    peft = OptionalPackage("peft", extra="train")


def require_peft() -> None:
    """Raise ``UnsupportedError`` if PEFT is not installed."""
    _ = peft.LoraConfig


def with_adapters(
    model: nn.Module,
    rank: int,
    task: str,
    *,
    alpha: int | None = None,
    target_modules: Sequence[str] | None = None,
) -> Any:
    """Return the model with LoRA adapters on linear layers outside backends.

    The backends' own parameters stay in the model instead of the adapter: runs train them with a
    learning rate of their own and save the merged model. The adapters' scale is ``alpha / rank``,
    2 when ``alpha`` is ``None``; ``target_modules`` are last parts of names, such as ``q_proj``.
    """
    if target_modules is not None:
        check_target_modules(model, target_modules)
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank if alpha is None else alpha,
            target_modules="all-linear" if target_modules is None else list(target_modules),
            exclude_modules=rf".*\.{NAME}(\..*)?",
            modules_to_save=[],
            task_type=task,
        ),
    )


@torch.no_grad()
def add_adapters(model: nn.Module, trained: Any) -> None:
    """Add what was trained beside frozen weights to a model of the same architecture.

    The sum of a weight and its adapter is computed in float32, and rounded once to the type of the
    weight. Frozen weights of the trained model may be rounded, or quantized.
    """
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    base = trained.get_base_model() if isinstance(trained, PeftModel) else trained
    extras = {n: x for n, x in base.state_dict().items() if f".{NAME}." in n}
    model.load_state_dict(extras, strict=False)
    adapted: dict[str, Any] = {n: m for n, m in base.named_modules() if isinstance(m, LoraLayer)}
    for name, layer in adapted.items():
        weight: Any = model.get_submodule(name).weight
        for adapter in layer.active_adapters:
            delta = layer.get_delta_weight(adapter).float().to(weight.device)
            weight.data = (weight.data.float() + delta).to(weight.dtype)


def check_target_modules(model: nn.Module, names: Sequence[str]) -> None:
    """Raise an error for a name that is the last part of no linear layer's, which PEFT ignores."""
    known = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and f".{NAME}." not in name
    }
    for name in names:
        if name not in known:
            raise ConfigError(
                f"lora_target_modules names {name!r}, but no linear layer of "
                f"{type(model).__name__} is called so.{did_you_mean(name, known)} Its layers are "
                f"{', '.join(sorted(known))}"
            )
