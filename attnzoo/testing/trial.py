"""A trial: one backend with one geometry and dtype, its inputs, and comparison of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput

CHUNK = 128  # tokens per parallel step, where the config does not name its own
HIDDEN_SIZE = 24


class Broken(AssertionError):
    """A rule is broken; the message says how."""


class ConformanceError(AssertionError):
    """A backend breaks a rule.

    Attributes:
        rule: Name of the rule.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class Sequence(NamedTuple):
    """Queries, keys, values and hidden states of some tokens."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    hidden: Tensor  # [B, T, M]

    def map(self, change: Callable[[Tensor], Tensor]) -> Sequence:
        """Apply ``change`` to each tensor."""
        return Sequence._make(change(x) for x in self)

    def rows(self, index: Any) -> Sequence:
        """Return some rows of the batch."""
        return self.map(lambda x: x[index])

    def tokens(self, index: Any) -> Sequence:
        """Return some tokens of every row: a slice, or a mask ``[T]``."""
        return Sequence._make((*(x[:, :, index] for x in self[:3]), self.hidden[:, index]))

    def fill(self, where: Tensor, value: float) -> Sequence:
        """Return a copy with ``value`` at the tokens where ``[B, T]`` is true."""
        heads = (x.masked_fill(where[:, None, :, None], value) for x in self[:3])
        return Sequence._make((*heads, self.hidden.masked_fill(where[:, :, None], value)))

    def join(self, later: Sequence) -> Sequence:
        """Return these tokens followed by those of ``later``."""
        heads = (torch.cat([x, y], 2) for x, y in zip(self[:3], later[:3], strict=True))
        return Sequence._make((*heads, torch.cat([self.hidden, later.hidden], 1)))

    @property
    def length(self) -> int:
        """T."""
        return self.q.shape[2]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One backend with one geometry and dtype."""

    cls: type[AttentionBackend]
    config: BackendConfig
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    low_dtypes: tuple[torch.dtype, ...] = ()  # those whose precision is checked

    def __str__(self) -> str:
        """Return geometry and dtype, for messages."""
        g = self.geometry
        kind = "causal" if g.causal else "bidirectional"
        sizes = f"H={g.num_heads}, Hkv={g.num_key_heads}, D={g.head_dim}, E={g.value_dim}"
        return f"{kind}, {sizes}, {str(self.dtype).removeprefix('torch.')}"

    # -- calls -----------------------------------------------------------------------------------

    def make(self, seed: int = 0) -> AttentionBackend:
        """Return the backend, built as in a model, with its own seed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # the backend is built on the CPU
            return self.cls(self.config, self.geometry).to(self.device)

    @property
    def wide(self) -> torch.dtype:
        """The widest dtype that the backend supports, in which rounding is negligible."""
        return torch.float64 if torch.float64 in self.cls.dtypes else torch.float32

    @cached_property
    def unrounded(self) -> AttentionBackend:
        """The backend in the widest dtype, with noise added to its parameters."""
        backend = self.make().to(self.wide).eval()
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for extra in backend.parameters():
                extra.add_(0.1 * torch.randn(extra.shape, generator=noise).to(extra))
        return backend

    @cached_property
    def backend(self) -> AttentionBackend:
        """The backend in the dtype of the trial."""
        return deepcopy(self.unrounded).to(self.dtype)

    @cached_property
    def oracle(self) -> AttentionBackend:
        """The backend in the widest dtype, its parameters rounded to the dtype of the trial."""
        return deepcopy(self.unrounded).to(self.dtype).to(self.wide)

    def sequence(self, batch: int, length: int, seed: int = 2, mean: float = 0.0) -> Sequence:
        """Return random inputs; the values have the given mean."""
        g, generator = self.geometry, torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return drawn.to(self.device, self.dtype)

        assert g.value_dim is not None
        return Sequence(
            draw(batch, g.num_heads, length, g.head_dim),
            draw(batch, g.num_key_heads, length, g.head_dim),
            draw(batch, g.num_key_heads, length, g.value_dim) + mean,
            draw(batch, length, HIDDEN_SIZE),
        )

    def mask(self, **fields: Any) -> AttentionMask:
        """Return the mask of the layer, with some fields replaced."""
        return AttentionMask(**{"causal": self.geometry.causal, **fields})

    def run(
        self, x: Sequence, backend: AttentionBackend | None = None, **options: Any
    ) -> AttentionOutput:
        """Call the backend or the oracle; fields of the mask are options too."""
        fields = {
            name: options.pop(name)
            for name in ("causal", "padding", "segment_ids", "window", "q_offset", "function")
            if name in options
        }
        if backend is not None and backend is not self.backend:
            x = x.map(lambda t: t.to(self.wide))
        output: AttentionOutput = (backend or self.backend)(
            x.q, x.k, x.v, hidden_states=x.hidden, mask=self.mask(**fields), **options
        )
        if output.out.dtype != x.v.dtype:
            given, made = (str(y.dtype).removeprefix("torch.") for y in (x.v, output.out))
            self.fail(f"the output is {made} and the values are {given}; return out.to(v.dtype)")
        return output

    def exact_and_plain(self, x: Sequence) -> tuple[Tensor, Tensor]:
        """Return the outputs of the oracle and of the backend; in the widest dtype they are one."""
        exact = self.run(x, self.oracle).out
        return exact, exact if self.dtype is self.wide else self.run(x).out

    @property
    def chunk(self) -> int:
        """Tokens per parallel step."""
        size = getattr(self.config, "chunk_size", None)
        if isinstance(size, int):
            return size
        return CHUNK // 2 if self.cls.capabilities.exact else CHUNK

    @property
    def length(self) -> int:
        """A length of two chunks and three tokens."""
        return 2 * self.chunk + 3

    @property
    def carries_state(self) -> bool:
        """Whether a later call can continue from a state."""
        return self.backend.capabilities.recurrent and self.geometry.causal

    # -- comparisons -----------------------------------------------------------------------------

    def slack(self, size: float) -> float:
        """Return the rounding error to allow for an output of this size."""
        if self.dtype is torch.float64:  # in which rounding is negligible
            return 1e-9 * max(size, 1.0)
        eps = torch.finfo(self.dtype).eps
        if self.dtype is torch.float32:  # sums accumulate rounding errors
            return 256 * eps * max(size, 1.0)
        return 4 * eps * size

    def agree(self, what: str, ours: Tensor, exact: Tensor, plain: Tensor | None = None) -> None:
        """Fail if the error of ``ours`` exceeds twice that of ``plain`` plus rounding."""
        ours, exact = ours.detach(), exact.detach().to(self.wide)
        budget = self.slack(float(exact.abs().max())) if exact.numel() else 0.0
        if plain is not None:
            budget += 2 * float((plain.detach().to(self.wide) - exact).abs().max())
        worst = float((ours.to(self.wide) - exact).abs().max()) if exact.numel() else 0.0
        if not worst <= budget:
            size = float(exact.abs().max()) if exact.numel() else 0.0
            is_rounded = worst <= 256 * torch.finfo(torch.float32).eps * max(size, 1.0)
            why = ""
            if self.dtype is torch.float64 and is_rounded:
                why = ", as of float32: a part may return float32, though its inputs are float64"
            raise Broken(f"{what}: the worst error is {worst:.2e}, the budget {budget:.2e}{why}")

    def fail(self, message: str) -> NoReturn:
        """Raise :class:`Broken`."""
        raise Broken(message)


def seed_torch(seed: int) -> None:
    """Seed torch's global generators.

    Without an accelerator this seeds the CPU's alone: ``torch.manual_seed`` would format a stack
    trace for each kind of device that is absent, which takes longer than most calls of a layer.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def isolated() -> Iterator[None]:
    """Restore torch's global generator afterwards, and run on one thread, as layers are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        torch.set_num_threads(threads)
