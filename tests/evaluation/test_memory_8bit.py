"""State of an 8-bit AdamW; tests/training/test_optimizer.py compares it with bitsandbytes."""

from torch import nn

from attnzoo.evaluation.memory_8bit import state_bytes


def test_bytes_of_two_moments():
    model = nn.ModuleDict(
        {"table": nn.Embedding(100, 64), "large": nn.Linear(64, 65), "small": nn.Linear(8, 8)}
    )
    in_32_bits = 100 * 64 + 65 + 8 * 8 + 8  # an embedding, and what has fewer than 4,096 weights
    in_8_bits, blocks = 64 * 65, 17  # of 256 weights, the last one incomplete
    levels = 2 * 256 * 4
    expected = 2 * (4 * in_32_bits + in_8_bits + 4 * blocks) + levels
    assert state_bytes(model, model.parameters()) == expected
    assert state_bytes(model, model["small"].parameters()) == 2 * 4 * (8 * 8 + 8)
