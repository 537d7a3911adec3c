"""Run the checks of GPU kernels, whose verdicts decide what ``impl="auto"`` selects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnzoo.ops.linear.triton import verdicts as triton_verdicts
from attnzoo.ops.linear.triton.run import device_reasons
from attnzoo.runtime.kernel_groups import DOCTOR_SIZE, KernelGroup, collect_groups
from attnzoo.runtime.verdicts import PASSED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
Log = Callable[[str], object]
ON_GPU = ("cuda",)  # types of devices
GENERATED = 2  # tokens; the first one comes from the prompt


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """The verdict about some kernels on a device.

    Attributes:
        kernels: The kernels, and the calls that the check covers.
        device: Name of the device.
        outcome: ``"passed"``, ``"failed"``, or ``"not run"`` if the device could not be used.
        reason: What is wrong, unless they passed.
        seconds: Duration of the check.
        stored: Whether the check ran earlier, and its verdict was read from the cache folder.
    """

    kernels: str
    device: str
    outcome: str
    reason: str
    seconds: float
    stored: bool

    def __str__(self) -> str:
        """Return the verdict in one line."""
        result = self.outcome if self.outcome == PASSED else f"{self.outcome}: {self.reason}"
        return f"{self.kernels} on {self.device}: {result} ({self.seconds:.0f} s)"


def check_kernels(
    call: Callable[[], object], *, fresh: bool = False, log: Log = logger.warning
) -> list[KernelCheck]:
    """Check the GPU kernels that a call needs, so that ``impl="auto"`` selects those that pass.

    A check compares kernels with torch and float64, in processes of its own, and takes up to a
    minute. Its verdict is kept in attnzoo's cache folder for this device, driver, compiler and
    version of attnzoo, as that of ``attnzoo doctor``; kernels that have one are not checked again.
    Call it outside ``torch.compile`` and CUDA graphs, which keep what was selected.

    Args:
        call: Runs the model once in the way in which it will be used.
        fresh: Whether to check kernels again that have a verdict.
        log: Called with a message before and after each check.

    Returns:
        The verdict about each group of kernels; empty if the call needs none, as on CPUs.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 100, 8)
        >>> attnzoo.check_kernels(lambda: attnzoo.ops.linear_attention(q, k, v))
        []
    """
    with collect_groups() as groups:
        call()
    return [check_group(group, fresh=fresh, log=log) for group in groups]


def check_group(
    group: KernelGroup, *, fresh: bool = False, log: Log = lambda text: None
) -> KernelCheck:
    """Return the verdict about some kernels; checks them if there is none, or ``fresh``."""
    stored = not fresh and group.stored_verdict() is not None
    if not stored:
        log(f"Checking {group} on {group.device}, once; it takes up to a minute")
    verdict = group.check(fresh=fresh)
    check = KernelCheck(kernels=str(group), device=group.device, stored=stored, **verdict._asdict())
    if not stored:
        log(str(check))
    return check


def device_groups(device: torch.device, *, full: bool = False) -> Iterator[KernelGroup]:
    """Yield the kernels that run on a device, those with the largest size only if ``full``."""
    groups: list[KernelGroup] = []
    if not device_reasons(device):
        groups += triton_verdicts.kernel_groups(device)
    yield from (group for group in groups if full or group.size <= DOCTOR_SIZE)


def check_model_kernels(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], log: Log, *, generate: bool = False
) -> list[KernelCheck]:
    """Check the kernels that a model needs, as the first step of a command; only on a GPU.

    Args:
        model: The model.
        inputs: Arguments of the model, ``input_ids`` among them; on any device.
        log: Called with a message before and after each check.
        generate: Whether the model will generate.
    """
    device = next(model.parameters()).device
    if device.type not in ON_GPU:
        return []
    inputs, training = {name: x.to(device) for name, x in inputs.items()}, model.training

    def call() -> None:
        model(**inputs)
        if generate:
            ids = inputs["input_ids"]
            prompt = ids[:, : max(1, ids.shape[1] - GENERATED)]
            tokens = {"min_new_tokens": GENERATED, "max_new_tokens": GENERATED}
            model.generate(prompt, do_sample=False, pad_token_id=0, **tokens)  # type: ignore[operator]

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            model.eval()
            return check_kernels(call, log=log)
        finally:
            model.train(training)
