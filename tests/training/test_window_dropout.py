"""Window dropout: which heads it draws."""

from dataclasses import replace

import torch

from attnzoo.contract.config import Geometry
from attnzoo.training.window_dropout import draw_heads

LAYER = Geometry(num_heads=400, num_key_heads=1, head_dim=4, layer=3)


def test_heads_depend_on_the_seed_and_the_layer_only():
    heads = draw_heads(0.3, 7, LAYER)
    assert 90 < heads.sum() < 150
    torch.manual_seed(5)
    assert torch.equal(draw_heads(0.3, 7, LAYER), heads)
    assert not torch.equal(draw_heads(0.3, 8, LAYER), heads)
    assert not torch.equal(draw_heads(0.3, 7, replace(LAYER, layer=4)), heads)


def test_no_heads_and_all_heads():
    assert draw_heads(0.0, 7, LAYER) is None
    assert draw_heads(1.0, 7, LAYER).all()
