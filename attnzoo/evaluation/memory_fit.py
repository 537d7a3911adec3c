"""Memory as a function of the length: long inputs, and the longest that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from attnzoo.evaluation.equal_memory import longest_window, saved_cache_bytes
from attnzoo.evaluation.memory import BackwardPeaks, MemoryUse, build_model, compute
from attnzoo.evaluation.memory_case import MemoryCase
from attnzoo.evaluation.models import max_positions
from attnzoo.hf.logits import tokens_per_chunk
from attnzoo.hf.saving.dtype import dtype_name, saved_dtype
from attnzoo.hf.swap.backends import read_spec
from attnzoo.runtime.activation_offload import MIN_BYTES
from attnzoo.spec import AttentionSpec

SHORTEST = 1024  # tokens; the shortest of the three lengths from which longer ones follow
MAX_LENGTH = 2**24  # tokens
ATTEMPTS = 4  # of computing the memory at a length that should fit


class MemoryCurve:
    """The memory of a case at every length.

    It is computed up to four times ``SHORTEST`` tokens, or beyond all windows of the model where
    these are longer. From there on each part is a polynomial of degree two in the length, because
    no operation of a layer is more than quadratic, and follows from three lengths.
    """

    def __init__(self, case: MemoryCase) -> None:
        self.case = case
        positions = max_positions(Path(case.path))
        self.longest = MAX_LENGTH if positions is None else positions
        with torch.device("meta"):
            window, block = longest_window(build_model(replace(case, length=1)))
        start = max(SHORTEST, 4 * window, 4 * block)
        if case.loss != "lm":  # whose logits are computed in chunks where there are more tokens
            start = max(start, _tokens_of_a_chunk(case) // case.rows + 1)
        if case.activation_offloading:  # from where numbers in float32, one a token, are moved too
            start = max(start, MIN_BYTES // (4 * case.rows))
        self.sampled = tuple(max(1, min(start, self.longest // 4)) * n for n in (1, 2, 4))
        self._computed: dict[int, tuple[MemoryUse, BackwardPeaks]] = {}
        self._extrapolate: Callable[[int], MemoryUse] | None = None

    def at(self, length: int) -> MemoryUse:
        """Return the memory at a length.

        Raises:
            UnsupportedError: The model has fewer positions.
        """
        if not self.sampled[-1] < length <= self.longest:
            return self.computed(length)
        use, case = self.extrapolated(length), self.case
        if use.cache is None:
            return use
        spec = None if case.spec is None else AttentionSpec.from_dict(case.spec)
        sizes = saved_cache_bytes(Path(case.path), spec, length, case.compute_dtype)
        return replace(use, cache=case.rows * sum(sizes.values()))

    def computed(self, length: int) -> MemoryUse:
        """Return the memory at a length, computed for that length."""
        return self._with_peaks(length)[0]

    def _with_peaks(self, length: int) -> tuple[MemoryUse, BackwardPeaks]:
        if length not in self._computed:
            self._computed[length] = compute(replace(self.case, length=length))
        return self._computed[length]

    def extrapolated(self, length: int) -> MemoryUse:
        """Return the memory at a length, from the polynomials through the sampled lengths."""
        if self._extrapolate is None:
            self._extrapolate = self._polynomials()
        return self._extrapolate(length)

    def _polynomials(self) -> Callable[[int], MemoryUse]:
        """Return the function from a length to the memory."""
        samples = {n: self._with_peaks(n) for n in self.sampled}
        functions: dict[str, Callable[[int], int | None]] = {
            field.name: _polynomial(
                {n: getattr(use, field.name) for n, (use, _) in samples.items()}
            )
            for field in fields(MemoryUse)
        }
        for name in BackwardPeaks._fields:
            peaks = {n: getattr(found, name) for n, (_, found) in samples.items()}
            if None not in peaks.values():
                functions[name] = _largest(peaks)

        def use(length: int) -> MemoryUse:
            values: dict[str, Any] = {name: value(length) for name, value in functions.items()}
            return MemoryUse(**values)

        return use

    def longest_that_fits(self, limit: int, total: str) -> int | None:
        """Return the most tokens per row with which a total stays within a limit.

        Args:
            limit: Bytes.
            total: One of ``TOTALS``.

        Returns:
            0 if no length fits, ``longest`` if all do, ``None`` if the model has no such total.
        """
        if getattr(self.extrapolated(self.sampled[0]), total) is None:
            return None
        low, high = 0, self.longest + 1  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if getattr(self.extrapolated(middle), total) <= limit:
                low = middle
            else:
                high = middle
        for _ in range(ATTEMPTS):
            used = getattr(self.at(low), total) if low else 0
            if used <= limit:
                return low
            low = min(low - 1, int(0.99 * low * limit / used))
        return 0


def estimate(case: MemoryCase) -> MemoryUse:
    """Return the memory of a case of any length."""
    return MemoryCurve(case).at(case.length)


def estimate_memory(
    model: str | Path,
    attention: str | AttentionSpec | Mapping[str, Any] | None = None,
    *,
    length: int,
    batch: int = 1,
    dtype: str | None = None,
    optimizer: str = "adamw",
    train: str = "full",
    gpus: int = 1,
    sharding: str = "fsdp2",
) -> MemoryUse:
    """Return the bytes that training and decoding use, without running or loading the model.

    Operations are counted on tensors without data, with the implementations that run on a CPU. The
    buffers that one kernel allocates and frees, the memory of the process itself and, on GPUs, the
    context and the fragmentation of the allocator are not part of it.

    Args:
        model: Folder of a saved model; a config.json is enough.
        attention: As in :func:`attnzoo.swap`; ``None`` for the attention of the model's config.
        length: Tokens per row.
        batch: Rows.
        dtype: Data type of the weights, such as ``"float32"``, in which ``recover`` and
            ``finetune`` train; that of ``from_pretrained`` when ``None``.
        optimizer: ``"adamw"``, ``"adamw_8bit"`` of bitsandbytes, ``"adafactor"`` of transformers,
            or ``"sgd"`` without momentum.
        train: ``"full"``, ``"extras"`` for the parameters that the backends add, or ``"lora"`` for
            adapters on all linear layers and extras.
        gpus: GPUs that have ``batch`` rows together; the result is that of one of them.
        sharding: What they shard: ``"fsdp2"`` or ``"zero3"`` of DeepSpeed, weights, gradients and
            optimizer, ``"zero2"``, gradients and optimizer, or ``"ddp"``, nothing.

    Raises:
        AttnzooError: An argument is invalid, or a backend does not support the model.

    Example:
        >>> at_4k, at_8k = (
        ...     attnzoo.estimate_memory(folder, "linear", length=length).cache
        ...     for length in (4096, 8192)
        ... )
        >>> at_4k == at_8k
        True
    """
    return estimate(
        MemoryCase(
            path=str(model),
            spec=None if attention is None else read_spec(attention).to_dict(),
            length=length,
            batch=batch,
            dtype=dtype or dtype_name(saved_dtype(Path(model))),
            optimizer=optimizer,
            train=train,
            gpus=gpus,
            sharding=sharding,
        )
    )


def _tokens_of_a_chunk(case: MemoryCase) -> int:
    """Return the number of tokens whose logits are computed at once."""
    with torch.device("meta"):
        return tokens_per_chunk(build_model(replace(case, length=1)))


def _largest(values: Mapping[int, tuple[int, ...]]) -> Callable[[int], int]:
    """Return the largest of the polynomials through the values of several parts."""
    parts = [
        _polynomial(dict(zip(values, part, strict=True)))
        for part in zip(*values.values(), strict=True)
    ]
    return lambda length: max(part(length) or 0 for part in parts)


def _polynomial(values: Mapping[int, int | None]) -> Callable[[int], int | None]:
    """Return the polynomial of degree two through three values; rounded, at least 0."""
    if None in values.values():
        return lambda length: None

    def value(length: int) -> int:
        total = 0.0
        for n, y in values.items():
            assert y is not None
            term = float(y)
            for other in values:
                if other != n:
                    term *= (length - other) / (n - other)
            total += term
        return max(0, round(total))

    return value
