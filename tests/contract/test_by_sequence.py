"""Packed rows that become one sequence per row."""

import torch

from attnzoo.contract.by_sequence import unpack_and_attend
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput


def test_inputs_are_zero_after_the_end_of_a_sequence():
    given = []

    def attend(inputs):
        given.append(inputs)
        return AttentionOutput(inputs.v)

    x = torch.rand(3, 1, 2, 6, 4) + 1
    mask = AttentionMask(causal=True, segment_ids=torch.tensor([[0, 0, 0, 0, 1, 1]]))
    hidden = torch.rand(1, 6, 5) + 1
    inputs = AttentionInputs(*x, mask, 1.0, hidden_states=hidden)
    assert torch.equal(unpack_and_attend(attend, inputs).out, x[2])
    (unpacked,) = given
    assert unpacked.mask.padding.tolist() == [[True] * 4, [True, True, False, False]]
    for tensor in (unpacked.q, unpacked.k, unpacked.v):
        assert not tensor[1, :, 2:].any()
        assert tensor[1, :, :2].all()
    assert not unpacked.hidden_states[1, 2:].any()
