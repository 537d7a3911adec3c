"""DeepSpeed's ZeRO-3: partitions parameters one after the other, and gathers them again.

Source: Rajbhandari et al., 2020, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of weights, by mixed precision


def uses_zero3(accelerator: Accelerator) -> bool:
    """Return whether DeepSpeed partitions the weights, and not to NVMe."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return False
    plugin: Any = accelerator.state.deepspeed_plugin
    return plugin.zero_stage == 3 and _offload(accelerator).get("device") != "nvme"


def _offload(accelerator: Accelerator) -> dict[str, Any]:
    """Return where the config of DeepSpeed keeps parameters."""
    plugin: Any = accelerator.state.deepspeed_plugin
    zero: dict[str, Any] = plugin.deepspeed_config.get("zero_optimization", {})
    return zero.get("offload_param") or {}


class _OneByOne(nn.Module):
    """Has its parameters' data only while an iteration over them is at each one.

    Args:
        iterate: Returns the iterator.
    """

    def __init__(self, iterate: Callable[[], Iterator[nn.Parameter]]) -> None:
        super().__init__()
        self.iterate = iterate

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the iterator."""
        return self.iterate()


def partition(
    accelerator: Accelerator, model: nn.Module, fetch: Callable[[str], Tensor]
) -> dict[int, nn.Parameter]:
    """Return partitioned parameters by the id of those that they replace.

    Args:
        accelerator: The Accelerator that will prepare the model.
        model: A model without data.
        fetch: Returns the whole data of a parameter, by name.
    """
    from deepspeed import zero

    dtype = DTYPES.get(accelerator.mixed_precision, torch.float32)
    new: dict[int, nn.Parameter] = {}

    def iterate() -> Iterator[nn.Parameter]:
        for name, p in model.named_parameters():
            full = fetch(name).to(accelerator.device, dtype)
            new[id(p)] = nn.Parameter(full, p.requires_grad)
            del full
            yield new[id(p)]

    given = _offload(accelerator)
    device = given.get("device", "none")
    options = {"remote_device": None if device == "none" else device}
    zero.Init(module=_OneByOne(iterate), **options, pin_memory=given.get("pin_memory", False))
    return new


def gathered(p: nn.Parameter) -> AbstractContextManager[Any]:
    """Return a context in which a partitioned parameter is whole; entered by all processes."""
    from deepspeed import zero

    context: AbstractContextManager[Any] = zero.GatheredParameters([p])
    return context


def free_partition(p: Any) -> None:
    """Free the data of a partitioned parameter that is not used again.

    Hooks of DeepSpeed keep its engine, and with it the partitions, for longer than its model.
    """
    p.ds_tensor.data = p.ds_tensor.data.new_empty(0)
