"""Rules on capabilities: declared ones have an effect, and all others are refused."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.testing.trial import Sequence, Trial, seed_torch


def refusals(trial: Trial) -> str | None:
    """Inputs that need an undeclared capability are refused, not ignored."""
    can, x = trial.backend.capabilities, trial.sequence(1, 6)
    square = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=trial.device)
    zeros = torch.zeros(1, 1, 6, 6, dtype=trial.dtype, device=trial.device)
    sinks = torch.zeros(trial.geometry.num_heads, dtype=trial.dtype, device=trial.device)
    for supported, what, options in (
        (can.arbitrary_mask, "a mask function", {"function": lambda: square}),
        (can.windowed, "a sliding window", {"window": (2, 2)}),
        (can.additive_bias, "an additive bias", {"bias": zeros}),
        (can.softcap, "a soft cap", {"softcap": 30.0}),
        (can.sinks, "attention sinks", {"sinks": sinks}),
        (can.recurrent, "a state", {"return_state": True}),
        (can.causal, "a causal mask", {"causal": True}),
        (can.bidirectional, "a mask that is not causal", {"causal": False}),
    ):
        if not supported:
            _refused(trial, what, x, **options)
    short = x._replace(q=x.q[:, :, 4:])
    if not (can.cross_attention or trial.backend.continues_from_keys):
        _refused(trial, "fewer queries than keys", short, q_offset=4)
    if can.needs_hidden_states:
        _refused(trial, "a call without hidden states", x, hidden_states=None)
    for dtype in (torch.int64, torch.complex64):
        changed = x.map(lambda t, dtype=dtype: t.to(dtype))  # type: ignore[misc]
        _refused(trial, f"dtype {dtype}", changed)
    heads = trial.geometry.num_key_heads + 1
    odd = torch.cat([x.q, x.q], 1)[:, : 2 * heads + 1]
    _refused(
        trial,
        f"{odd.shape[1]} query heads over {heads} key heads",
        x._replace(q=odd, k=torch.cat([x.k, x.k], 1)[:, :heads]),
    )
    return None


def _refused(trial: Trial, what: str, x: Sequence, **options: Any) -> None:
    """Check that a call raises ``UnsupportedError``."""
    mask = {k: options.pop(k) for k in ("function", "window", "causal", "q_offset") if k in options}
    options = {"hidden_states": x.hidden, **options}
    try:
        trial.backend(*x[:3], mask=trial.mask(**mask), **options)
    except UnsupportedError:
        return
    trial.fail(f"{what} is not refused, though the backend does not state that it can honour it")


def statements(trial: Trial) -> str | None:
    """Declared capabilities change the output."""
    can, length = trial.backend.capabilities, trial.chunk + 9
    x = trial.sequence(2, length)
    plain, declares_some = trial.run(x).out, False
    heads, last = trial.geometry.num_heads, length - 1
    if can.windowed:
        declares_some = True
        window = (3, 0 if trial.geometry.causal else 3)
        place = torch.arange(length, device=trial.device)[None]
        far = (place < last - 3) & (place >= _num_sinks(trial))
        _ignores(trial, "outside the sliding window", x, far, window=window)
        if getattr(trial.config, "window", None) is None:  # it may be narrower
            first = x.fill((place == last - 3).expand(len(x.q), -1), 3.0)._replace(q=x.q)
            outs = [trial.run(given, window=window).out[:, :, -1] for given in (x, first)]
            if torch.equal(*outs):
                trial.fail("the first key of the sliding window has no effect")
    if can.arbitrary_mask:
        declares_some = True
        seen = trial.mask().dense(length, length, trial.device)
        hidden = (torch.arange(length, device=trial.device) % 3 == 1)[None]
        whole = ~hidden[:, None, None] if seen is None else seen & ~hidden[:, None, None]
        _ignores(trial, "hidden by the mask function", x, hidden, function=lambda: whole)
    bias = trial.sequence(2, length, seed=7).q[:, :1, :, :1].transpose(2, 3)
    sinks = torch.linspace(0, 1, heads, dtype=trial.dtype, device=trial.device)
    for supported, what, options in (
        (can.additive_bias, "an additive bias", {"bias": bias.expand(-1, -1, length, -1)}),
        (can.softcap, "a soft cap", {"softcap": 0.5}),
        (can.sinks, "attention sinks", {"sinks": sinks}),
    ):
        if supported and not can.exact:  # see exactness
            declares_some = True
            if torch.equal(trial.run(x, **options).out, plain):
                trial.fail(f"{what} has no effect, though the backend states that it can honour it")
    return (
        None
        if declares_some
        else "the backend declares no capability beyond padding, packing and its state"
    )


def _ignores(trial: Trial, what: str, x: Sequence, where: Tensor, **mask: Any) -> None:
    """Check that keys and values at ``[1, T]`` do not change the output of the last query."""
    scaled = x.fill(where.expand(len(x.q), -1), 3.0)
    outs = [
        trial.run(given._replace(q=x.q), **mask).out[:, :, -1].to(trial.wide)
        for given in (x, scaled)
    ]
    trial.agree(f"changing keys and values {what}", *outs)


def exactness(trial: Trial) -> str | None:
    """An exact backend computes softmax attention, with every declared capability."""
    can = trial.backend.capabilities
    if not can.exact:
        return "it does not state that it is exact"
    length, causal = trial.length, trial.geometry.causal
    x = trial.sequence(2, length)
    heads, draw = trial.geometry.num_heads, torch.Generator().manual_seed(8)
    real = (torch.arange(length) >= torch.tensor([[0], [5]])).to(trial.device)
    ids = (torch.arange(length) >= length // 3).long().expand(2, -1).to(trial.device)
    bias = torch.randn(1, heads, length, length, generator=draw).to(x.q)
    sinks = torch.randn(heads, generator=draw).to(x.q)
    random = torch.rand(2, 1, length, length, generator=draw).to(trial.device) < 0.5
    cases: list[tuple[str, bool, dict[str, Any]]] = [
        ("the plain mask", True, {}),
        ("left padding", True, {"padding": real}),
        ("packed segments", True, {"segment_ids": ids}),
        ("another scale", True, {"scale": 0.3}),
        ("a narrow window", can.windowed, {"window": (3, 0 if causal else 2)}),
        ("a wide window", can.windowed, {"window": (70, 0 if causal else 70)}),
        ("a window and padding", can.windowed, {"window": (9, 9), "padding": real}),
        ("a window and segments", can.windowed, {"window": (9, 9), "segment_ids": ids}),
        ("a bias", can.additive_bias, {"bias": bias}),
        ("a bias and padding", can.additive_bias, {"bias": bias[:, :1], "padding": real}),
        ("sinks", can.sinks, {"sinks": sinks}),
        ("sinks and padding", can.sinks, {"sinks": sinks, "padding": real}),
        ("a soft cap", can.softcap, {"softcap": 2.0}),
        ("a mask function", can.arbitrary_mask, {"function": lambda: random}),
    ]
    for name, supported, options in cases:
        if supported:
            outs = [trial.run(x, **options).out, *_dense_twice(trial, x, **options)]
            if "padding" in options:  # outputs at padding are unspecified
                outs = [out.transpose(1, 2)[real] for out in outs]
            trial.agree(f"{name}, against the dense formula", *outs)
    if can.cross_attention:
        crossed = x._replace(q=x.q[:, :, :7])
        ours = trial.run(crossed, causal=False).out
        trial.agree("cross-attention", ours, *_dense_twice(trial, crossed, causal=False))
    return None


def _dense_twice(trial: Trial, x: Sequence, **options: Any) -> tuple[Tensor, Tensor]:
    """Return dense attention in the widest dtype and, for the budget, in the dtype of the trial."""
    wide = x.map(lambda t: t.to(trial.wide))
    return dense(trial, wide, **options), dense(trial, x, **options)


def dense(
    trial: Trial,
    x: Sequence,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **fields: Any,
) -> Tensor:
    """Return dense softmax attention, with the window of the backend if it has one."""
    g, mask = trial.geometry, trial.mask(**fields)
    length, keys, groups = x.q.shape[2], x.k.shape[2], g.num_heads // g.num_key_heads
    k, v = (t.repeat_interleave(groups, 1) for t in (x.k, x.v))
    scale = g.head_dim**-0.5 if scale is None else scale
    scores = torch.einsum("bhtd,bhsd->bhts", x.q, k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias.to(scores)
    scores = scores.masked_fill(~_seen(trial, mask, length, keys), -torch.inf)
    if sinks is not None:
        column = sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1).nan_to_num()[..., :keys]
    return torch.einsum("bhts,bhse->bhte", weights, v)


def _seen(trial: Trial, mask: AttentionMask, length: int, keys: int) -> Tensor:
    """Return the dense mask, ``[B, 1, T, S]``, independently of ``AttentionMask.dense``."""
    t = torch.arange(length, device=trial.device)[:, None]
    s = torch.arange(keys, device=trial.device)[None]
    seen = torch.ones(1, 1, length, keys, dtype=torch.bool, device=trial.device)
    if mask.function is not None:
        seen = seen & mask.function()
    elif mask.causal:
        seen = seen & (s <= t)
    own = getattr(trial.backend, "window", None)
    reach = [] if own is None else [(own - 1, 0) if mask.causal else (own, own)]
    first = _first_tokens(mask, _num_sinks(trial), keys, trial.device)[:, None, None]
    first = first & (s <= t) if mask.causal else first
    for before, after in [*reach, *([] if mask.window is None else [mask.window])]:
        seen = seen & (((s >= t - before) & (s <= t + after)) | first)
    if mask.padding is not None:
        seen = seen & mask.padding[:, None, None, :]
    if mask.segment_ids is not None:
        ids = mask.segment_ids
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    return seen


def _num_sinks(trial: Trial) -> int:
    """Return the number of first tokens that the backend's options add to every window."""
    return getattr(trial.backend.config, "num_sinks", 0)


def _first_tokens(mask: AttentionMask, number: int, keys: int, device: torch.device) -> Tensor:
    """Return the first real tokens of each sequence, ``[1 or B, S]`` bool, counted one by one."""
    given = [x for x in (mask.padding, mask.segment_ids) if x is not None]
    rows = len(given[0]) if given else 1
    real = [[True] * keys] * rows if mask.padding is None else mask.padding.tolist()
    names = [[0] * keys] * rows if mask.segment_ids is None else mask.segment_ids.tolist()
    first = []
    for row in range(rows):
        found: Counter[int] = Counter()
        for s, name in enumerate(names[row]):
            found[name] += real[row][s]
            first.append(real[row][s] and found[name] <= number)
    return torch.tensor(first, dtype=torch.bool, device=device).view(rows, keys)


def weights(trial: Trial) -> str | None:
    """The matrix from ``return_weights`` times the values equals the output."""
    if not trial.backend.capabilities.has_weights:
        _refused(trial, "a call for weights", trial.sequence(1, 6), return_weights=True)
        return "it states that there is no one matrix of weights"
    length = trial.chunk + 3
    x = trial.sequence(2, length)
    real = (torch.arange(length) >= torch.tensor([[0], [5]])).to(trial.device)
    ids = (torch.arange(length) >= length // 3).long().expand(2, -1).to(trial.device)
    groups = trial.geometry.num_heads // trial.geometry.num_key_heads
    masks: list[tuple[str, dict[str, Any]]] = [
        ("the layer's own mask", {}),
        ("padding", {"padding": real}),
        ("packing", {"segment_ids": ids}),
    ]
    for name, mask in masks:
        output = trial.run(x, return_weights=True, **mask)
        shape = (2, trial.geometry.num_heads, length, length)
        if output.weights is None or tuple(output.weights.shape) != shape:
            got = None if output.weights is None else tuple(output.weights.shape)
            trial.fail(f"the weights are {got}, not {shape}")
        values = x.v.masked_fill(~real[:, None, :, None], 0) if "padding" in mask else x.v
        applied = output.weights @ values.repeat_interleave(groups, 1)
        exact = trial.run(x, trial.oracle, **mask).out
        trial.agree(f"weights applied to the values, with {name}", applied, exact, output.out)
    if trial.backend.dropout_form != "off":
        seed_torch(9)
        output = trial.run(x, return_weights=True, dropout=0.5)
        assert output.weights is not None
        applied = output.weights @ x.v.repeat_interleave(groups, 1)
        if not torch.allclose(applied, output.out, rtol=1e-3, atol=1e-3):
            trial.fail("with dropout, the weights are not those that gave the output")
    return None


def dropout(trial: Trial) -> str | None:
    """Attention dropout keeps the expected output, follows torch's seed, and can be disabled."""
    p, draws, x = 0.4, 256, trial.sequence(1, 9)
    plain = trial.run(x).out.detach()
    disabled = deepcopy(trial.backend)
    disabled.config = replace(disabled.config, attention_dropout="off")
    change = (trial.run(x, disabled, dropout=p).out - plain).abs().max()
    if not bool(change <= trial.slack(float(plain.abs().max()))):  # rounding depends on alignment
        trial.fail("attention_dropout='off' does not disable attention dropout")
    if trial.backend.dropout_form == "off":
        return "its config disables attention dropout"
    rows, outs = x.map(lambda t: t.expand(draws, *t.shape[1:])), []
    for seed in (3, 3, 4):
        seed_torch(seed)
        outs.append(trial.run(rows, dropout=p).out.detach())
    if not torch.equal(outs[0], outs[1]):
        trial.fail("one seed gives two outputs with attention dropout")
    if torch.equal(outs[0], outs[2]):
        trial.fail("attention dropout does not draw from torch's global generator")
    error = (outs[0].mean(0) - plain[0]).abs()
    bound = 6 * outs[0].std(0) / draws**0.5 + trial.slack(float(plain.abs().max()))
    if not bool((error <= bound).all()):
        trial.fail(
            f"the mean output over {draws} draws of attention dropout differs from that without "
            f"by {float((error / bound).max()):.1f} times 6 standard errors"
        )
    return None
