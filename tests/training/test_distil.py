"""The KL divergence of distillation."""

import pytest
import torch

from attnzoo.training.distil import divergence

MASK = torch.ones(2, 5)


def logits(seed):
    return torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_top_k_divergence_has_one_outcome_for_all_other_tokens():
    student, teacher = logits(0), logits(1)
    p, q = teacher.softmax(-1), student.softmax(-1)
    full = (p * (p / q).log()).sum(-1).mean()
    assert float(divergence(student, teacher, MASK)) == pytest.approx(float(full), rel=1e-5)
    places = p.topk(3, -1).indices
    top_p, top_q = p.gather(-1, places), q.gather(-1, places)
    rest_p, rest_q = 1 - top_p.sum(-1), 1 - top_q.sum(-1)
    some = (top_p * (top_p / top_q).log()).sum(-1) + rest_p * (rest_p / rest_q).log()
    found = float(divergence(student, teacher, MASK, top_k=3))
    assert found == pytest.approx(float(some.mean()), rel=1e-4)
    assert found < float(full)
    assert float(divergence(student, teacher, MASK, top_k=11)) == pytest.approx(float(full))
    assert float(divergence(teacher, teacher, MASK, top_k=3)) == pytest.approx(0, abs=1e-6)


def test_divergence_leaves_masked_tokens_out():
    student, teacher, mask = logits(0), logits(1), MASK.clone()
    mask[1] = 0
    expected = divergence(student[:1], teacher[:1], MASK[:1], top_k=2)
    torch.testing.assert_close(divergence(student, teacher, mask, top_k=2), expected)
