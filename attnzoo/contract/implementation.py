"""The registry of implementations, and the selection of the one that computes a call.

An implementation is one file and one registration::

    register_implementation(
        Implementation(
            op="linear_attention",
            name="metal",
            devices=("mps",),
            run=run_metal,
            reasons=metal_reasons,
            automatic="compiled for this GPU",
        )
    )

``step=`` computes one token of decoding. The op calls :func:`select` once per call, calls what it
returns, and returns the choice with its output, which ``attnzoo.describe`` shows. The configs of
backends, ``attnzoo list`` and all errors read the same registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from attnzoo.contract.states import ImplChoice
from attnzoo.errors import UnsupportedError, did_you_mean
from attnzoo.runtime.cpp import prebuilt


class OpCall(Protocol):
    """The inputs of an op; the device of the queries is that of the call."""

    @property
    def q(self) -> Tensor: ...  # noqa: D102


Call = TypeVar("Call", bound=OpCall)
Result = TypeVar("Result")

NAMED = "named in the options"
NOT_IN_ONNX = "torch.onnx.export has no translation of its operators"


@dataclass(frozen=True, kw_only=True)
class Implementation(Generic[Call, Result]):
    """One implementation of an op.

    Attributes:
        op: The op that it computes.
        name: The value of ``impl=`` that selects it.
        run: Computes a call.
        devices: The device types that it runs on, such as ``"cuda"``; empty if it runs on all.
        interpreted_on: Further device types, on which only its name selects it, for example those
            where Triton's interpreter runs its kernels.
        reasons: Returns every reason why a call is unsupported, except for its device; an empty
            list if it is supported.
        form: What ``describe`` says first, for example ``"one token"``; ``""`` if nothing.
        automatic: The reason to prefer it with ``impl="auto"``; ``""`` if only its name selects it.
        auto_reasons: Returns why ``impl="auto"`` skips it although it may support the call, for
            example because another one is as fast; checked before ``reasons``.
        verdict: Returns why ``impl="auto"`` skips it, although it supports the call, because it has
            not passed a check on the device, or ``""``; and what ``describe`` says about the check.
            Reads verdicts (:mod:`attnzoo.runtime.gpu_verdicts`), or compares the kernels of other
            projects with torch (:mod:`attnzoo.runtime.first_call`), so it is called last.
        note: Returns what ``describe`` adds about a call, for example the kernel that runs; ``""``
            if nothing.
        onnx: Whether ``torch.onnx.export`` translates all its operators.
        priority: ``impl="auto"`` tries higher numbers first, and names in alphabetical order among
            equal ones, those for the call's device type before those for every device. The ones of
            attnzoo have 0, and 10 where there are two for a device type: its own Triton kernels
            come before those of other projects.
        step: Computes a call of one token, from a state, for ops that have steps. They are ops of
            their own, ``linear_step`` of ``linear_attention``, with the other fields of this one.
        step_reasons: As ``reasons``, for a step.
        step_form: As ``form``, for a step.
    """

    op: str
    name: str
    run: Callable[[Call], Result]
    devices: tuple[str, ...] = ()
    interpreted_on: tuple[str, ...] = ()
    reasons: Callable[[Call], list[str]] | None = None
    form: str = ""
    automatic: str = ""
    auto_reasons: Callable[[Call], list[str]] | None = None
    verdict: Callable[[Call], tuple[str, str]] | None = None
    note: Callable[[Call], str] | None = None
    onnx: bool = False
    priority: int = 0
    step: Callable[[Any], Any] | None = None
    step_reasons: Callable[[Any], list[str]] | None = None
    step_form: str = "one token"
    choice: ImplChoice = field(init=False, compare=False)  # by "auto", without more to say
    named: ImplChoice = field(init=False, compare=False)  # by its name

    def __post_init__(self) -> None:
        for choice, why in (("choice", self.automatic), ("named", NAMED)):
            reason = f"{self.form}; {why}" if self.form else why
            object.__setattr__(self, choice, ImplChoice(self.name, reason))

    def runs_on(self, device_type: str) -> bool:
        """Return whether it runs on a device type, if only because its name selects it."""
        if not self.devices:
            return True
        return device_type in self.devices or device_type in self.interpreted_on

    def refusals(self, call: Call) -> list[str]:
        """Return every reason why a call is unsupported, its device included."""
        reasons, device = [], call.q.device.type
        if not self.runs_on(device):
            devices = ", ".join(self.devices)
            reasons.append(f"the tensors are on {device} ({self.name} runs on {devices})")
        if not self.onnx and exports_to_onnx():
            reasons.append(NOT_IN_ONNX)
        return reasons + (self.reasons(call) if self.reasons else [])

    def supports(self, call: Call) -> bool:
        """Return whether it computes a call."""
        if not self.runs_on(call.q.device.type) or (exports_to_onnx() and not self.onnx):
            return False
        return not (self.reasons and self.reasons(call))


# What implementations of these names have in common, where nothing else is to be said of them
CPP: dict[str, Any] = {"name": "cpp", "devices": ("cpu",), "automatic": prebuilt.origin()}
TRITON: dict[str, Any] = {
    "name": "triton",
    "devices": ("cuda",),
    "interpreted_on": ("cpu",),
    "automatic": "compiled for this GPU",
    "priority": 10,
}
TORCH: dict[str, Any] = {"name": "torch", "automatic": "runs on every device"}

_NAMED: dict[str, dict[str, Implementation[Any, Any]]] = {}  # of each op, in order of registration
# What impl="auto" selects from, by op and device type; "" stands for all other types
_AUTOMATIC: dict[str, dict[str, tuple[Implementation[Any, Any], ...]]] = {}


def register_implementation(*implementations: Implementation[Any, Any]) -> None:
    """Register implementations, and their steps. The name of each must be new to its op.

    Raises:
        ValueError: The op has another implementation of a name, or a ``"reference"`` is automatic.
    """
    steps = [_step_of(each) for each in implementations if each.step is not None]
    for each in (*implementations, *steps):
        op, name = each.op, each.name
        if name == "auto" or (name == "reference" and each.automatic):
            raise ValueError(
                f"{op} gets an implementation {name!r} that impl='auto' would select; register it "
                "under another name, or a reference without automatic="
            )
        table = _NAMED.setdefault(op, {})
        owner = table.setdefault(name, each)
        if owner is not each:
            raise ValueError(
                f"{op} has an implementation {name!r}, {owner.run!r}; register {each.run!r} under "
                "another name"
            )
        _AUTOMATIC[op] = _automatic(table.values())


def _step_of(each: Implementation[Any, Any]) -> Implementation[Any, Any]:
    """Return the implementation of one token that belongs to one of an op."""
    op = f"{each.op.removesuffix('_attention')}_step"
    step: dict[str, Any] = {"op": op, "run": each.step, "reasons": each.step_reasons}
    step["form"] = each.step_form
    return replace(each, **step, step=None, auto_reasons=None, note=None)


def _automatic(
    table: Iterable[Implementation[Any, Any]],
) -> dict[str, tuple[Implementation[Any, Any], ...]]:
    """Return what ``impl="auto"`` selects from, by device type."""
    found = [each for each in table if each.automatic]
    found.sort(key=lambda each: (-each.priority, each.name))
    general = tuple(each for each in found if not each.devices)
    types = {device for each in found for device in each.devices}
    special = {x: (*(each for each in found if x in each.devices), *general) for x in types}
    return {"": general, **special}


def implementations(op: str) -> tuple[Implementation[Any, Any], ...]:
    """Return the implementations of an op in the order of registration."""
    return tuple(_NAMED.get(op, {}).values())


def impl_names(*ops: str) -> tuple[str, ...]:
    """Return the values that ``impl=`` of some ops accepts: ``"auto"``, then every name."""
    return ("auto", *dict.fromkeys(name for op in ops for name in _NAMED.get(op, {})))


def select(
    op: str, call: Call, requested: str = "auto"
) -> tuple[Implementation[Call, Any], ImplChoice]:
    """Return the implementation that computes a call, and why.

    ``"auto"`` selects the first automatic implementation that supports the call. Any other name
    selects that implementation or raises; it is never replaced.

    Args:
        op: Name of the op.
        call: The inputs that ``reasons`` and ``run`` take.
        requested: ``"auto"`` or the name of an implementation.

    Raises:
        UnsupportedError: No implementation has this name, or none supports the call. The message
            gives every reason.
    """
    found = select_if_supported(op, call, requested)
    if found is None:
        raise UnsupportedError(_refusal(op, call, requested))
    return found


def select_if_supported(
    op: str, call: Call, requested: str = "auto"
) -> tuple[Implementation[Call, Any], ImplChoice] | None:
    """Return the implementation that computes a call, and why; ``None`` if there is none.

    For ops of one token, as a more general op computes the calls that they do not support.
    Arguments as in :func:`select`.
    """
    if requested != "auto":
        named = _NAMED[op].get(requested)
        if named is None or not named.supports(call):
            return None
        note = named.note(call) if named.note else ""
        return named, _with(named.named, note) if note else named.named
    table, refused = _AUTOMATIC[op], []
    # exports_to_onnx() without a call, of which every layer makes one
    recorded = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
    onnx = recorded and exports_to_onnx()
    for each in table.get(call.q.device.type, table[""]):
        if onnx and not each.onnx:
            refused.append(f"{each.name} cannot: {NOT_IN_ONNX}")
            continue
        if each.auto_reasons and (skipped := each.auto_reasons(call)):
            refused.append(f"{each.name} is skipped: {'; '.join(skipped)}")
            continue
        if each.reasons and (reasons := each.reasons(call)):
            refused.append(f"{each.name} cannot: {'; '.join(reasons)}")
            continue
        refusal, status = each.verdict(call) if each.verdict else ("", "")
        if refusal:
            refused.append(f"{each.name} is skipped: {refusal}")
            continue
        note = each.note(call) if each.note else ""
        if not (status or note or refused):
            return each, each.choice
        return each, _with(each.choice, note, status, *refused)
    return None


def exports_to_onnx() -> bool:
    """Return whether ``torch.onnx.export`` records this call."""
    recorded = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
    return recorded and _is_in_onnx_export()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_in_onnx_export() -> bool:  # torch.compile takes torch's function for False
    return torch.onnx.is_in_onnx_export()


def _with(choice: ImplChoice, *more: str) -> ImplChoice:
    """Return a choice with more reasons, of which some may be empty."""
    return choice._replace(reason="; ".join(filter(None, (choice.reason, *more))))


def _refusal(op: str, call: Call, requested: str) -> str:
    """Return the message for a call that no implementation, or not the named one, supports."""
    table, names = _NAMED[op], impl_names(op)
    if requested not in names:
        return (
            f"{op} has no impl {requested!r}.{did_you_mean(requested, names)} "
            f"It has {', '.join(names)}."
        )
    if exports_to_onnx() and not any(each.onnx for each in table.values()):
        return (
            f"torch.onnx.export has no translation of the operators of {op}; give the layer "
            "backend 'softmax' or 'flash', or use torch.export"
        )
    if requested != "auto":
        usable = ["auto", *(name for name, each in table.items() if each.supports(call))]
        return (
            f"impl={requested!r} cannot run this call of {op}: "
            f"{'; '.join(table[requested].refusals(call))}. "
            f"Use impl={' or '.join(map(repr, usable))}."
        )
    refused = []
    for each in table.values():
        if each.automatic:
            reasons = each.refusals(call)
            if not reasons and each.auto_reasons:
                reasons = each.auto_reasons(call)
            if not reasons and each.verdict:
                reasons = [each.verdict(call)[0]]
            refused.append(f"{each.name} cannot: {'; '.join(reasons)}")
    return f"No implementation of {op} supports this call: {'. '.join(refused)}."
