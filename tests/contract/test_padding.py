"""Filling at padding equals ``masked_fill``, whichever way it takes."""

import pytest
import torch

from attnzoo.contract.padding import fill_padding, padding_if_any

B, H, S = 2, 3, 5
REAL = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]).bool()


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("shape", "token_dim"), [((B, H, S), 2), ((B, H, S, 4), 2), ((B, H, S, 4, 2), 2), ((B, S), 1)]
)
def test_values_and_gradients(shape, token_dim, compiled, rows, monkeypatch):
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: compiled)
    x, upstream = torch.randn(2, *shape)
    padding = REAL[:rows]
    view = [rows, *(1 for _ in shape[1:])]
    view[token_dim] = S
    expected = x.masked_fill(~padding.view(view), 0.5)
    given = x.masked_fill(~padding.view(view), torch.nan).requires_grad_()
    found = fill_padding(given, padding, 0.5, token_dim=token_dim)
    (found * upstream).sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(given.grad, upstream.masked_fill(~padding.view(view), 0))


def test_expanded_and_transformed_tensors():
    x = torch.randn(H, 1).expand(B, H, S)
    expected = x.masked_fill(~REAL[:, None], 0)
    assert torch.equal(fill_padding(x, REAL), expected)
    assert torch.equal(torch.vmap(lambda x: fill_padding(x, REAL))(x[None])[0], expected)
    assert fill_padding(x.to("meta"), REAL.to("meta")).shape == x.shape


def test_nothing_is_copied_without_padding():
    x = torch.randn(B, H, S)
    assert fill_padding(x, None) is x
    assert fill_padding(x, torch.ones(B, S, dtype=torch.bool)) is x


def test_padding_if_any(monkeypatch):
    real = torch.ones(B, S, dtype=torch.bool)
    assert padding_if_any(None) is None
    assert padding_if_any(REAL) is REAL
    assert padding_if_any(real) is None
    assert padding_if_any(real[:, :0]) is None
    on_meta = real.to("meta")
    assert padding_if_any(on_meta) is on_meta  # no values, as under torch.compile
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    assert padding_if_any(real) is real
