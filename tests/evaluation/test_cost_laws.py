"""Times that cannot be right are found, and times that can be right are not."""

import pytest

from attnzoo.evaluation.cost_laws import contradicted


@pytest.mark.parametrize(
    ("times", "all_tokens", "wrong"),
    [
        ({256: 440, 1024: 182, 4096: 35}, False, [256, 1024]),  # decoding on a busy GPU
        ({256: 35, 1024: 35.5, 4096: 34.8}, False, []),  # constant
        ({256: 0.14, 1024: 0.69, 4096: 0.6}, False, []),  # noise
        ({1024: 50, 4096: 50 * 4**0.55}, True, [1024]),  # T^0.55
        ({1024: 50, 2048: 100, 4096: 200}, True, []),  # linear
        ({1024: 50, 2048: 200, 4096: 800}, True, []),  # quadratic
        ({1024: 2, 2048: 2.1, 4096: 2.2}, True, []),  # overhead
        ({1024: 20, 2048: 21, 4096: 22}, False, []),  # a GPU that waits for launches
        ({1024: 900, 2048: 100, 4096: 200}, True, [1024]),
    ],
)
def test_times_that_longer_inputs_contradict(times, all_tokens, wrong):
    assert contradicted(times, all_tokens=all_tokens) == wrong
