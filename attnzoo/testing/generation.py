"""Check that a swapped model generates what one pass without a cache computes.

Other letters: T prompt tokens, N new tokens, V vocabulary size.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.backend import AttentionBackend
from attnzoo.hf import seam
from attnzoo.hf.models.rows import has_rotary_positions, takes_positions
from attnzoo.hf.seam import cache_argument, output_cache
from attnzoo.testing.trial import Broken, ConformanceError


class _Prompts(NamedTuple):
    """Prompts with left padding; one has none, and one has a single token."""

    ids: Tensor  # [B, T]
    mask: Tensor  # [B, T], 0 at padding
    new_tokens: int  # N


def check_generation(
    model: Any,
    spec: Any | None = None,
    *,
    batch: int = 3,
    length: int = 12,
    new_tokens: int = 6,
    beams: int = 3,
) -> None:
    """Check that generation with a cache equals one pass without a cache.

    Draws prompts and compares logits of greedy generation with left padding, of each prompt without
    the other prompts, of a prompt that is split at every position into two calls, of padded rows
    with and without ``position_ids``, and the scores of beam search::

        def test_generation():
            check_generation(tiny_llama(), AttentionSpec("my_backend", window=16))

    Args:
        model: A decoder-only model in float32 or float64. It is not changed.
        spec: The spec to swap a copy of the model with, as for :func:`attnzoo.swap`; ``None``
            checks a model that is swapped already.
        batch: B, number of prompts.
        length: T, tokens of the longest prompt.
        new_tokens: N, tokens to generate.
        beams: Beams of beam search.

    Raises:
        ConformanceError: Generation differs from one pass; the message says where and by how much.
        ValueError: The model cannot be checked; the message says why.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"check_generation takes a decoder-only model, got {type(model).__name__}")
    if model.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"check_generation takes a model in float32 or float64, got {model.dtype}, in which "
            "rounding hides errors; convert it with model.float()"
        )
    model = deepcopy(model).eval()
    if spec is not None:
        from attnzoo.hf.swap import swap

        swap(model, spec)
    if any(isinstance(m, AttentionBackend) and m.capabilities.exact_steps for m in model.modules()):
        raise ValueError(
            "the spec decodes with exact attention by design, so generation differs from one pass; "
            "check reformer with decoding='hashed'"
        )
    prompts = _prompts(model, batch, length, new_tokens)
    try:
        with torch.no_grad():
            steps = _greedy(model, prompts)
            _check_greedy(model, prompts, steps)
            _check_single_prompts(model, prompts, steps)
            _check_split_prompts(model, prompts)
            _check_without_positions(model, prompts)
            _check_beams(model, prompts, beams)
    except Broken as error:
        raise ConformanceError("generation", f"generation differs from one pass: {error}") from None


def _prompts(model: Any, batch: int, length: int, new_tokens: int) -> _Prompts:
    generator = torch.Generator().manual_seed(1)
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (batch, length), generator=generator)
    lengths = torch.linspace(length, 1, batch).round().long()
    mask = (torch.arange(length) >= length - lengths[:, None]).long()
    return _Prompts(ids.to(model.device), mask.to(model.device), new_tokens)


def _greedy(model: Any, prompts: _Prompts) -> Any:
    """Return generated tokens and the logits of each step."""
    return model.generate(
        prompts.ids,
        attention_mask=prompts.mask,
        max_new_tokens=prompts.new_tokens,
        min_new_tokens=prompts.new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def _one_pass(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Any:
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options = {"use_cache": False, **options}
    return model(ids, attention_mask=mask, position_ids=positions, **options)


def _check_greedy(model: Any, prompts: _Prompts, steps: Any) -> None:
    """Compare the logits of every step with one pass over prompt and generated tokens."""
    new = prompts.mask.new_ones(len(prompts.mask), prompts.new_tokens)
    mask = torch.cat([prompts.mask, new], 1)
    expected = _one_pass(model, steps.sequences, mask).logits[:, prompts.ids.shape[1] - 1 : -1]
    _compare("greedy generation with left padding", torch.stack(steps.logits, 1), expected)


def _check_single_prompts(model: Any, prompts: _Prompts, steps: Any) -> None:
    """Compare each row of the batch with generation from its prompt only."""
    for row, kept in enumerate(prompts.mask.bool()):
        prompt = prompts.ids[row : row + 1, kept]
        single = _greedy(model, _Prompts(prompt, torch.ones_like(prompt), prompts.new_tokens))
        for step, (ours, expected) in enumerate(zip(steps.logits, single.logits, strict=True)):
            _compare(
                f"step {step} of a prompt of {prompt.shape[1]} tokens in a batch with padding",
                ours[row],
                expected[0],
            )
            if ours[row].argmax() != expected[0].argmax():
                break  # equal up to rounding, after which the prompts differ


def _check_split_prompts(model: Any, prompts: _Prompts) -> None:
    """Compare a prompt in two calls, split at every position, with the same prompt in one call."""
    ids, mask = prompts.ids, prompts.mask
    expected = _one_pass(model, ids, mask).logits
    for cut in range(1, ids.shape[1]):
        first = _one_pass(model, ids[:, :cut], mask[:, :cut], use_cache=True)
        rest = _one_pass(
            model, ids[:, cut:], mask, use_cache=True, **cache_argument(output_cache(first))
        )
        ours = torch.cat([first.logits, rest.logits], 1)
        _compare(f"a prompt split after token {cut}", ours[mask.bool()], expected[mask.bool()])


def _check_without_positions(model: Any, prompts: _Prompts) -> None:
    """Compare rows with padding for which no positions are given; learned ones may differ."""
    owners = filter(takes_positions, seam.pretrained_models(model))
    if not any(map(has_rotary_positions, owners)):
        return
    ids, mask = prompts.ids, prompts.mask
    ours = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    expected = _one_pass(model, ids, mask).logits[mask.bool()]
    _compare("left padding without position_ids", ours, expected)


def _check_beams(model: Any, prompts: _Prompts, beams: int) -> None:
    """Compare beam search with a cache with beam search without one."""
    options = {
        "attention_mask": prompts.mask,
        "num_beams": beams,
        "max_new_tokens": prompts.new_tokens,
        "min_new_tokens": prompts.new_tokens,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    cached = model.generate(prompts.ids, **options)
    expected = model.generate(prompts.ids, **options, use_cache=False)
    _compare("beam search", cached.sequences_scores, expected.sequences_scores)


def _compare(what: str, ours: Tensor, expected: Tensor) -> None:
    """Raise :class:`Broken` if logits differ by more than rounding in the model's dtype."""
    budget = 1024 * torch.finfo(expected.dtype).eps * max(1.0, float(expected.abs().max()))
    error = float((ours - expected).abs().max())
    if not error <= budget:
        raise Broken(f"{what}: the largest error of the logits is {error:.2e}, over {budget:.2e}")
