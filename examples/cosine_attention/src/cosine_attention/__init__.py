"""Cosine attention (arXiv:2010.04245) as a backend of attnzoo."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from attnzoo.contract import (
    AttentionBackend,
    AttentionInputs,
    AttentionOutput,
    BackendConfig,
    Capabilities,
    register,
)
from attnzoo.errors import ConfigError
from attnzoo.ops import softmax_attention


@dataclass(frozen=True, kw_only=True)
class CosineConfig(BackendConfig):
    """Settings of cosine attention."""

    temperature: float = 0.1  # divides the cosines; smaller is sharper

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise ConfigError(
                f"CosineConfig.temperature must be above 0, got {self.temperature}; "
                "0.05 to 0.2 is usual"
            )


@register("cosine")
class CosineBackend(AttentionBackend):
    """Softmax over the cosines of queries and keys, which bounds the scores."""

    config_class = CosineConfig
    config: CosineConfig
    capabilities = Capabilities(windowed=True)  # softmax_attention supports the mask's window

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Normalise queries and keys, then compute softmax attention."""
        q, k = F.normalize(inputs.q, dim=-1), F.normalize(inputs.k, dim=-1)
        scale = 1 / self.config.temperature
        return softmax_attention(q, k, inputs.v, scale=scale, mask=inputs.mask)
