"""Select the implementation of an op from the op's table.

An op lists its implementations in order of preference::

    IMPLEMENTATIONS = (
        Implementation(name="cpp", run=run_cpp, reasons=cpp_reasons, automatic="compiled for CPUs"),
        Implementation(name="torch", run=run_torch, automatic="runs on every device"),
        Implementation(name="reference", run=run_reference),
    )

The op calls :func:`select` once per call and returns the choice with its output, which
``attnzoo.describe`` shows. The config of the backend, ``attnzoo list`` and all errors read the same
table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from attnzoo.contract.states import ImplChoice
from attnzoo.errors import UnsupportedError, did_you_mean

Call = TypeVar("Call")
Result = TypeVar("Result")


def _no_reasons(call: object) -> list[str]:
    return []


def _no_verdict(call: object) -> tuple[str, str]:
    return "", ""


@dataclass(frozen=True, kw_only=True)
class Implementation(Generic[Call, Result]):
    """One implementation of an op.

    Attributes:
        name: The value of ``impl=`` that selects it.
        run: Computes a call.
        reasons: Returns every reason why a call is unsupported; an empty list if it is supported.
        automatic: The reason to prefer it with ``impl="auto"``; ``""`` if only its name selects it.
        auto_reasons: Returns why ``impl="auto"`` skips it although it may support the call, for
            example because another one is as fast; checked before ``reasons``.
        verdict: Returns why ``impl="auto"`` skips it, although it supports the call, because it has
            not passed a check on the device, or ``""``; and what ``describe`` says about the check.
            Reads verdicts (:mod:`attnzoo.runtime.kernel_groups`), so it is called last.
    """

    name: str
    run: Callable[[Call], Result]
    reasons: Callable[[Call], list[str]] = _no_reasons
    automatic: str = ""
    auto_reasons: Callable[[Call], list[str]] = _no_reasons
    verdict: Callable[[Call], tuple[str, str]] = _no_verdict


def impl_names(table: Sequence[Implementation[Any, Any]]) -> tuple[str, ...]:
    """Return the values that ``impl=`` accepts: ``"auto"``, then every name of the table."""
    return ("auto", *(each.name for each in table))


def select(
    op: str,
    table: Sequence[Implementation[Call, Result]],
    call: Call,
    requested: str = "auto",
) -> tuple[Implementation[Call, Result], ImplChoice]:
    """Return the implementation that computes a call, and why.

    ``"auto"`` selects the first automatic implementation that supports the call. Any other name
    selects that implementation or raises; it is never replaced.

    Args:
        op: Name of the op, for errors.
        table: The op's implementations, in order of preference.
        call: The inputs that ``reasons`` and ``run`` take.
        requested: ``"auto"`` or a name from the table.

    Raises:
        UnsupportedError: No implementation has this name, or none supports the call. The message
            gives every reason.
    """
    if requested != "auto":
        return _named(op, table, call, requested), ImplChoice(requested, "named in the options")
    refused: list[str] = []
    for each in table:
        if not each.automatic:
            continue
        skipped = each.auto_reasons(call)
        if skipped:
            refused.append(f"{each.name} is skipped: {'; '.join(skipped)}")
            continue
        reasons = each.reasons(call)
        if reasons:
            refused.append(f"{each.name} cannot: {'; '.join(reasons)}")
            continue
        refusal, status = each.verdict(call)
        if refusal:
            refused.append(f"{each.name} is skipped: {refusal}")
            continue
        why = [each.automatic, *([status] if status else []), *refused]
        return each, ImplChoice(each.name, "; ".join(why))
    raise UnsupportedError(f"No implementation of {op} supports this call: {'. '.join(refused)}.")


def _named(
    op: str, table: Sequence[Implementation[Call, Result]], call: Call, requested: str
) -> Implementation[Call, Result]:
    """Return the implementation ``requested``, or raise with every reason against it."""
    for found in table:
        if found.name == requested:
            break
    else:
        names = impl_names(table)
        raise UnsupportedError(
            f"{op} has no impl {requested!r}.{did_you_mean(requested, names)} "
            f"It has {', '.join(names)}."
        )
    reasons = found.reasons(call)
    if reasons:
        usable = ["auto", *(each.name for each in table if not each.reasons(call))]
        raise UnsupportedError(
            f"impl={requested!r} cannot run this call of {op}: {'; '.join(reasons)}. "
            f"Use impl={' or '.join(map(repr, usable))}."
        )
    return found
