"""torch.jit.trace would record the values of a mask, so it is refused."""

import pytest
import torch

from attnzoo import swap
from attnzoo.errors import UnsupportedError


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_tracing_a_model_with_a_mask_is_refused(llama, ids):
    model = llama()
    swap(model, "flash").requires_grad_(False)  # tracing makes weights constants

    def logits(ids, mask=None):
        return model(ids, attention_mask=mask, use_cache=False).logits

    with torch.no_grad():
        with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace records .* attention_mask"):
            torch.jit.trace(logits, (ids, torch.ones_like(ids)), check_trace=False)
        traced = torch.jit.trace(logits, (ids,), check_trace=False)
        torch.testing.assert_close(traced(ids.flip(1)), logits(ids.flip(1)))
