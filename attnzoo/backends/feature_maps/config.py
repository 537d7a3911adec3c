"""The options that select and configure a feature map, for every backend that has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from attnzoo.backends.feature_maps.base import (
    FEATURE_MAPS,
    feature_map_name,
    get_feature_map,
    import_feature_map,
)
from attnzoo.backends.feature_maps.base import register_feature_map as register_feature_map
from attnzoo.contract.config import BackendConfig
from attnzoo.errors import ConfigError

# The smallest value of each option of a map
MINIMUM = {"nu": 1, "num_features": 2, "seed": 0, "max_length": 1}


@dataclass(frozen=True, kw_only=True)
class FeatureMapConfig(BackendConfig):
    """Settings of attention through a feature map.

    An option that is left out gets the map's default, so that saved specs contain it.

    Attributes:
        feature_map: phi, a name (see :mod:`attnzoo.backends.feature_maps.base`); in Python,
            a function or a class, or in an ``AttentionSpec`` its ``"module:name"``.
        nu: The number of offsets of ``dpfp``.
        num_features: The number of features of ``hedgehog_exp``, ``squared_relu`` or ``random``,
            where it is even.
        seed: Seed of the draw of these, together with the layer's index.
        max_length: M of ``cosine``, in tokens; later positions count as the last. ``None`` means
            that of the model.
    """

    largest: ClassVar[Mapping[str, int]] = {
        **BackendConfig.largest,
        "num_features": 2**16,
        "nu": 2**16,
    }
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
            feature_map = get_feature_map(self.feature_map)
        except ConfigError as error:
            message = str(error)
            where = "" if message.startswith(name) else f"{name}.feature_map: "
            raise ConfigError(f"{where}{message}") from None
        for option, minimum in MINIMUM.items():
            value = getattr(self, option)
            if value is None:
                object.__setattr__(self, option, feature_map.options.get(option))
                continue
            if option not in feature_map.options:
                names = [repr(n) for n, cls in FEATURE_MAPS.items() if option in cls.options]
                raise ConfigError(
                    f"{name}.{option} is an option of feature_map={' or '.join(names)}, got "
                    f"{value} with feature_map={self.feature_map!r}; leave it out"
                )
            default = feature_map.options[option]
            default_text = "the model's own" if default is None else default
            if value < minimum:
                raise ConfigError(
                    f"{name}.{option} must be at least {minimum}, got {value}; leave it out to "
                    f"have {default_text}"
                )
            if reason := feature_map.option_reason(option, value):
                raise ConfigError(
                    f"{name}.{option} {reason}, got {value}; the default is {default_text}"
                )

    def changed_options(self) -> dict[str, Any]:
        """Return the options that differ from the defaults of the backend and of the map."""
        of_map = get_feature_map(self.feature_map).options
        changed = super().changed_options()
        return {key: x for key, x in changed.items() if key not in of_map or x != of_map[key]}

    @classmethod
    def import_options(cls, options: Mapping[str, Any]) -> None:
        """Import and register the feature map that a Python caller names as ``"module:name"``."""
        name = options.get("feature_map")
        if not isinstance(name, str) or ":" not in name:
            return
        try:
            import_feature_map(name)
        except ConfigError as error:
            raise ConfigError(f"{cls.__name__}.feature_map: {error}") from None
