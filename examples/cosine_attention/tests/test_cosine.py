"""The conformance suite of attnzoo on this backend, and its formula."""

import pytest
import torch
from cosine_attention import CosineBackend, CosineConfig

from attnzoo.contract.config import Geometry
from attnzoo.errors import ConfigError
from attnzoo.testing import check_backend


def test_conformance():
    check_backend(CosineBackend)


def test_equals_softmax_over_cosines():
    geometry = Geometry(num_heads=2, num_key_heads=2, head_dim=8)
    backend = CosineBackend(CosineConfig(temperature=0.5), geometry).double()
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    cosines = torch.nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = (cosines / 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(backend(q, k, v).out, expected)


def test_non_positive_temperature_raises():
    with pytest.raises(ConfigError, match="above 0"):
        CosineConfig(temperature=0.0)
