import pytest
import torch

from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.training import transfer as module
from attnzoo.training.transfer import key_indicators, softmax_output, softmax_teachers


def inputs(heads, length):
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.randn(2, heads, length, 8, generator=generator).double()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", ["kernel", "packed", "padded", "without kernel"])
def test_output_and_weights(monkeypatch, causal, form):
    """19 keys and 8 columns: the steps take every third key, and some columns are unused."""
    if form == "without kernel":
        monkeypatch.setattr(module, "band_cpp_reasons", lambda: ["not built"])
    q, k, v = inputs(4, 19), inputs(2, 19) / 2, inputs(2, 19)
    mask = AttentionMask(causal=causal)
    real = torch.ones(2, 19, dtype=torch.bool)
    if form == "padded":
        real[1, 15:] = False
        mask = AttentionMask(causal=causal, padding=real)
    see = real[:, None, None] & (torch.ones(19, 19).tril() > 0 if causal else torch.tensor(True))
    if form == "packed":
        ids = (torch.arange(19) >= torch.tensor([[5], [19]])).long()
        mask = AttentionMask(causal=causal, segment_ids=ids)
        see = see & (ids[:, :, None] == ids[:, None])[:, None]
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)  # not run
    geometry = Geometry(num_heads=4, num_key_heads=2, head_dim=8, causal=causal, scale=0.5)
    teachers = softmax_teachers(geometry)
    scores = 0.5 * q @ k.repeat_interleave(2, 1).mT
    exact = scores.masked_fill(~see, -torch.inf).softmax(-1)
    queries = real[:, None, :, None]
    for step in (0, 4, 5):
        columns = key_indicators(19, 8, step).to(v).expand_as(v)
        weights = softmax_output(teachers, q, k, columns, {"mask": mask})
        chosen = exact @ columns[:, :1]
        torch.testing.assert_close(weights * queries, chosen * queries)
    out = softmax_output(teachers, q, k, v, {"mask": mask})
    torch.testing.assert_close(out * queries, exact @ v.repeat_interleave(2, 1) * queries)
