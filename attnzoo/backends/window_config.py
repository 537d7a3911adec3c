"""The options of a softmax window beside linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from attnzoo.backends.config import BackendConfig
from attnzoo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WindowConfig(BackendConfig):
    """Settings of a softmax window beside linear attention."""

    # The latest keys, or those on each side, that are attended to exactly; None is none
    window: int | None = None
    # What the keys beyond it weigh together beside the window, about, before training. On the
    # embedded model, window 32, nothing trained: 0.1 is below the window's loss for every map and
    # gate, by up to 0.012 bits per byte; 0.3 is above it by up to 0.044 where nothing decays
    far_weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"{name}.window must be at least 1 token, got {self.window}; 32 to 128 is usual, "
                "and None attends to nothing exactly"
            )
        if self.far_weight <= 0:
            raise ConfigError(
                f"{name}.far_weight must be above 0, got {self.far_weight}; it is learned on a "
                "logarithmic scale, and a small start such as 0.1 is close to the window alone"
            )
        if self.window is None and self.far_weight != type(self).far_weight:
            raise ConfigError(
                f"{name}.far_weight goes with a window, got far_weight={self.far_weight} with "
                "window=None; set window, or leave it out"
            )
