"""Cosine attention (arXiv:2010.04245) as a backend of attnzoo."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from attnzoo.backends.base import AttentionBackend, register
from attnzoo.backends.config import BackendConfig
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.errors import ConfigError
from attnzoo.ops.softmax import softmax_attention
from attnzoo.state import AttentionOutput


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
    """Softmax over the cosines of queries and keys, so that no score grows without bound."""

    config_class = CosineConfig
    config: CosineConfig
    impls = ("reference",)
    windowed = True  # the dense mask below has the model's sliding window in it

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Normalise queries and keys, then attend as usual."""
        q, k = F.normalize(inputs.q, dim=-1), F.normalize(inputs.k, dim=-1)
        mask = inputs.mask.dense(q.shape[2], k.shape[2], q.device)
        self.record("reference", "the only one")
        return softmax_attention(q, k, inputs.v, scale=1 / self.config.temperature, mask=mask)
