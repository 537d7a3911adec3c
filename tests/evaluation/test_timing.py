"""Timing of a call: how often it is repeated."""

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
