"""Timing of a call: how often it is repeated, and times that cannot be right."""

import pytest

from attnzoo.evaluation import timing


@pytest.mark.parametrize(
    ("call_seconds", "min_run_time", "rounds", "calls"),
    [
        (0.25, 1.0, 4, 4),
        (0.25, 0.5, 2, 2),
        (2**-10, 0.9, 9, 918),  # many calls in a round
        (2**-10, 9 * 2**-10, 9, 9),
        (3.0, 0.5, 2, 1),  # the estimate is the other round
    ],
)
def test_calls_are_repeated_for_the_requested_time(
    monkeypatch, call_seconds, min_run_time, rounds, calls
):
    clock, made = [0.0], []

    def run():
        clock[0] += call_seconds
        made.append(call_seconds)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "peak_bytes", lambda run, device, warm: run() or 7)
    measured, peak = timing.measure(run, min_run_time=min_run_time)
    warm_up = 1 if call_seconds >= min_run_time / 2 else 2  # memory is measured again
    assert len(made) - warm_up - 1 == calls  # one more estimates the duration
    assert len(measured.rounds_ms) == rounds
    assert measured.median_ms == pytest.approx(1e3 * call_seconds)
    assert peak == 7


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
    assert timing.contradicted(times, all_tokens=all_tokens) == wrong
