"""Conformance tests of backends: rules for built-in backends and for those of users.

>>> from attnzoo.registry import get_backend
>>> from attnzoo.testing import check_backend
>>> report = check_backend(get_backend("softmax"), rules=("causality", "padding"))
>>> report.passed
('causality', 'padding')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.errors import AttnzooError, did_you_mean
from attnzoo.testing import capabilities, modules, precision, states, tokens
from attnzoo.testing.generation import check_generation
from attnzoo.testing.trial import HIDDEN_SIZE, Broken, ConformanceError, Trial, isolated

__all__ = ["RULES", "ConformanceError", "Report", "Rule", "check_backend", "check_generation"]

Dtypes = Sequence[torch.dtype]
DTYPES: Dtypes = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Rule:
    """One rule; ``check`` raises if it is broken, and returns why if it does not apply."""

    check: Callable[[Trial], str | None]
    every_dtype: bool = True  # else only the widest dtype

    @property
    def name(self) -> str:
        """Name of the rule in reports and in the argument ``rules``."""
        return self.check.__name__


RULES = (
    Rule(tokens.layout),
    Rule(capabilities.refusals, every_dtype=False),
    Rule(tokens.causality),
    Rule(states.decoding),
    Rule(states.batching),
    Rule(states.state_size, every_dtype=False),
    Rule(tokens.padding),
    Rule(tokens.masked_rows),
    Rule(tokens.packing),
    Rule(capabilities.statements, every_dtype=False),
    Rule(capabilities.exactness),
    Rule(capabilities.weights, every_dtype=False),
    Rule(capabilities.dropout, every_dtype=False),
    Rule(tokens.padding_gradients, every_dtype=False),
    Rule(precision.gradients, every_dtype=False),
    Rule(precision.precision, every_dtype=False),
    Rule(precision.long_gradients, every_dtype=False),
    Rule(modules.determinism, every_dtype=False),
    Rule(modules.random_state, every_dtype=False),
    Rule(modules.saving, every_dtype=False),
    Rule(modules.materializing, every_dtype=False),
)


@dataclass(frozen=True)
class Report:
    """Result of :func:`check_backend`.

    Attributes:
        backend: The backend's name.
        passed: Rules that hold.
        skipped: Rules that do not apply, and why.
        trials: Geometries and dtypes that were checked.
    """

    backend: str
    passed: tuple[str, ...]
    skipped: dict[str, str]
    trials: tuple[str, ...]

    def __str__(self) -> str:
        """Return one line per rule."""
        lines = [f"{self.backend}: {len(self.passed)} rules hold"]
        lines += [f"  holds           {name}" for name in self.passed]
        lines += [f"  does not apply  {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join([*lines, *(f"  tried on        {trial}" for trial in self.trials)])


def check_backend(
    cls: type[AttentionBackend],
    *,
    config: BackendConfig | None = None,
    device: torch.device | str = "cpu",
    dtypes: Dtypes = DTYPES,
    rules: Sequence[str] | None = None,
) -> Report:
    """Check that a backend obeys all rules; takes a few seconds.

    Builds the backend for small layers of several shapes, causal and bidirectional as far as it
    supports them, and checks every rule on each. Use it in a test of your own backend::

        def test_conformance():
            check_backend(MyBackend, config=MyConfig(chunk_size=16))

    Args:
        cls: Class of the backend; it need not be registered.
        config: Its options; ``None`` means the defaults of ``cls.config_class``.
        device: The device of the backend.
        dtypes: The dtypes to check, without those that the class does not support. With bfloat16,
            gradients in float16 are checked too.
        rules: Names of the rules of :data:`RULES` to check; ``None`` means all.

    Returns:
        The rules that hold, and those that do not apply, each with the reason.

    Raises:
        ConformanceError: A rule is broken; the message says which, where, and by how much.
        ValueError: The name of a rule is unknown, or the backend supports none of ``dtypes``.
    """
    chosen = _chosen(rules)
    config = cls.config_class() if config is None else config
    passed: dict[str, None] = {}
    skipped: dict[str, str] = {}
    with isolated():
        trials = list(_trials(cls, config, torch.device(device), dtypes))
        for rule in chosen:
            for trial in trials:
                if trial.dtype is trials[0].dtype or rule.every_dtype:
                    reason = _check(rule, trial)
                    if reason is None:
                        passed[rule.name] = None
                    else:
                        skipped[rule.name] = reason
    return Report(
        cls.name or cls.__qualname__,
        tuple(passed),
        {name: why for name, why in skipped.items() if name not in passed},
        tuple(map(str, trials)),
    )


def _chosen(names: Sequence[str] | None) -> list[Rule]:
    """Return the rules of these names, simple rules first."""
    known = [rule.name for rule in RULES]
    for name in names or ():
        if name not in known:
            raise ValueError(
                f"No rule is called {name!r}.{did_you_mean(name, known)} Rules: {', '.join(known)}."
            )
    return [rule for rule in RULES if names is None or rule.name in names]


def _check(rule: Rule, trial: Trial) -> str | None:
    """Check one rule; any exception of the backend breaks the rule."""
    try:
        return rule.check(trial)
    except Broken as error:
        message, cause = str(error), None
    except Exception as error:  # a backend may raise anything; the message names the rule
        message, cause = f"{type(error).__name__}: {error}", error
    name = trial.cls.name or trial.cls.__qualname__
    raise ConformanceError(
        rule.name, f"rule {rule.name!r} is broken by backend {name!r} ({trial}): {message}"
    ) from cause


def _trials(
    cls: type[AttentionBackend], config: BackendConfig, device: torch.device, dtypes: Dtypes
) -> Iterator[Trial]:
    """Yield the trials, the widest dtype first."""
    usable = sorted(set(dtypes) & cls.dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    if not usable:
        raise ValueError(
            f"{cls.__qualname__} takes none of the dtypes {', '.join(map(str, dtypes))}"
        )
    low = [dtype for dtype in usable if dtype is not torch.float64]
    if torch.bfloat16 in low and torch.float16 in cls.dtypes:
        low.append(torch.float16)
    shapes = [shape for causal in (True, False) for shape in _shapes(cls, config, causal=causal)]
    if not shapes:
        raise ConformanceError(
            "layout", f"{cls.__qualname__} serves neither a causal nor a bidirectional layer"
        )
    for dtype in usable:
        for first_of_kind, geometry in shapes:
            if first_of_kind or dtype is usable[0]:
                yield Trial(
                    cls=cls,
                    config=config,
                    geometry=geometry,
                    dtype=dtype,
                    device=device,
                    low_dtypes=tuple(low) if first_of_kind and dtype is usable[0] else (),
                )


def _shapes(
    cls: type[AttentionBackend], config: BackendConfig, *, causal: bool
) -> Iterator[tuple[bool, Geometry]]:
    """Yield supported layers: grouped heads with another value size, and odd sizes."""
    grouped = Geometry(
        num_heads=4,
        num_key_heads=2,
        head_dim=8,
        value_dim=12,
        hidden_size=HIDDEN_SIZE,
        causal=causal,
        name="layer",
    )
    square = replace(grouped, value_dim=8)
    odd = replace(grouped, num_heads=3, num_key_heads=3, head_dim=5, value_dim=5, scale=None)
    served = [g for g in (grouped, square) if _serves(cls, config, g)][:1]
    yield from ((True, geometry) for geometry in served)
    if served and _serves(cls, config, odd):
        yield False, odd


def _serves(cls: type[AttentionBackend], config: BackendConfig, geometry: Geometry) -> bool:
    """Return whether the backend supports a layer."""
    try:
        backend = cls(config, geometry)
    except AttnzooError:
        return False
    return not backend.layer_reasons()
