"""Log decays at padding."""

import pytest
import torch

from attnzoo.ops.linear.common import decay_of_real_tokens


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (2, 3, 4, 5)], ids=["head", "token", "channel"])
def test_log_decay_is_zero_at_padding(shape):
    padding_mask = torch.tensor([[False, True, False, True], [True, True, True, False]])
    decay = -torch.rand(shape) - 0.1
    masked = decay_of_real_tokens(decay, torch.zeros(2, 3, 4, 5), padding_mask)
    assert masked.shape == (shape if len(shape) > 1 else (2, 3, 4))
    full = decay[None, :, None].expand(2, 3, 4) if len(shape) == 1 else decay
    for i in range(2):
        for t in range(4):
            expected = full[i, :, t] if padding_mask[i, t] else torch.zeros_like(full[i, :, t])
            assert torch.equal(masked[i, :, t], expected)
