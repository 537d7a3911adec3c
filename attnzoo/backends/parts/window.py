"""The options of a softmax window next to linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from attnzoo.contract.config import BackendConfig, check_num_sinks
from attnzoo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WindowConfig(BackendConfig):
    """Options of a softmax window next to linear attention.

    Attributes:
        window: Keys with exact softmax weights: the latest ones in a causal layer, else so many on
            each side. ``None`` means none.
        num_sinks: Number of leading tokens of each sequence with exact softmax weights also outside
            the window of a causal layer (arXiv:2309.17453). Keys keep their positions.
        far_weight: Initial weight of all keys outside the window, relative to the window's.
    """

    window: int | None = None
    num_sinks: int = 0
    # On the embedded model with window 32, before training: 0.1 lowers the loss of the window alone
    # for every map and gate, by up to 0.012 bits per byte; 0.3 raises it by up to 0.044 without
    # decay
    far_weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"{name}.window must be at least 1 token, got {self.window}; 32 to 128 is usual, "
                "and None disables the window"
            )
        check_num_sinks(self, self.num_sinks, self.window)
        if self.far_weight <= 0:
            raise ConfigError(
                f"{name}.far_weight must be above 0, got {self.far_weight}; it is learned on a "
                "logarithmic scale, and a small initial value such as 0.1 is close to the window "
                "alone"
            )
        if self.window is None and self.far_weight != type(self).far_weight:
            raise ConfigError(
                f"{name}.far_weight needs a window, got far_weight={self.far_weight} with "
                "window=None; set window, or leave far_weight out"
            )
