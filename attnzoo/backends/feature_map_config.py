"""The options that name a feature map and set what it takes, for every backend that has one."""

from __future__ import annotations

from dataclasses import dataclass

from attnzoo.backends import fixed_feature_maps, learned_feature_maps  # noqa: F401  (registers)
from attnzoo.backends.config import BackendConfig
from attnzoo.backends.feature_maps import (  # noqa: F401  (the decorator, for users)
    FEATURE_MAPS,
    feature_map_name,
    get_feature_map,
    register_feature_map,
)
from attnzoo.errors import ConfigError

# What maps can be set by: the smallest value of each
SMALLEST = {"nu": 1, "num_features": 2, "seed": 0, "max_length": 1}


@dataclass(frozen=True, kw_only=True)
class FeatureMapConfig(BackendConfig):
    """Settings of attention through a feature map; what is left out is up to the map.

    Attributes:
        feature_map: phi, by name (see :mod:`attnzoo.backends.feature_maps`), or ``"module:name"``
            of a function or a class; in Python, the function or the class itself.
        nu: Neighbours that ``dpfp`` multiplies an entry with.
        num_features: Features that ``hedgehog_exp`` makes, or ``random``, there an even number.
        seed: Names the draw of either, together with the layer's number.
        max_length: Tokens over which ``cosine`` fades; later ones count as the last.
    """

    feature_map: str = "elu+1"
    nu: int | None = None
    num_features: int | None = None
    seed: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        try:
            if callable(self.feature_map):
                object.__setattr__(self, "feature_map", feature_map_name(self.feature_map))
            super().__post_init__()
            chosen = get_feature_map(self.feature_map)
        except ConfigError as error:
            told = str(error)
            where = "" if told.startswith(name) else f"{name}.feature_map: "
            raise ConfigError(f"{where}{told}") from None
        takes = chosen.options
        for option, smallest in SMALLEST.items():
            value = getattr(self, option)
            if value is None:
                continue
            if option not in takes:
                takers = [repr(n) for n, cls in FEATURE_MAPS.items() if option in cls.options]
                raise ConfigError(
                    f"{name}.{option} goes with feature_map={' or '.join(takers)}, got {value} "
                    f"with feature_map={self.feature_map!r}; leave it out"
                )
            default = "the model's own" if takes[option] is None else takes[option]
            if value < smallest:
                raise ConfigError(
                    f"{name}.{option} must be at least {smallest}, got {value}; leave it out to "
                    f"have {default}"
                )
            if why := chosen.option_reason(option, value):
                raise ConfigError(f"{name}.{option} {why}, got {value}; the default is {default}")
