"""The device of the Triton kernel tests."""

import pytest

from attnzoo.runtime.triton_interpreter import interpreted
from tests.kernel_device import float32_slack, interpret_kernels, kernel_device


@pytest.mark.parametrize(
    ("setting", "has_gpu", "expected"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"TRITON_INTERPRET": "1"}, True, True),
        ({"TRITON_INTERPRET": "0"}, True, False),
        ({"TRITON_INTERPRET": "0"}, False, True),
    ],
)
def test_kernels_are_interpreted_without_a_gpu_or_on_request(setting, has_gpu, expected):
    assert interpret_kernels(setting, has_gpu) == expected


def test_this_session_runs_kernels_where_it_should():
    assert interpreted() == interpret_kernels()
    assert (kernel_device().type, float32_slack()) == (
        ("cpu", 1.0) if interpreted() else ("cuda", 10.0)
    )
