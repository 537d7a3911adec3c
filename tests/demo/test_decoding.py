"""Decoding times are measured in alternation."""

from contextlib import nullcontext

import pytest
import torch
import transformers as hf

from attnzoo import demo


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
    )
    return hf.LlamaForCausalLM(config).eval()


class Clock:
    """A clock that each timed token advances by the next of some durations."""

    def __init__(self, durations):
        self.now, self.durations, self.calls = 0.0, durations, 0

    def __call__(self):
        if self.calls % 2:
            self.now += self.durations[self.calls // 2 % len(self.durations)]
        self.calls += 1
        return self.now


STREAM = torch.arange(64)
TOKENS = demo.TIMED_TOKENS


def test_contexts_are_timed_in_alternation(model, monkeypatch):
    monkeypatch.setattr(demo.time, "perf_counter", Clock([1.0, 3.0]))
    contexts = {"a": nullcontext, "b": nullcontext}
    costs = demo.measure_together(model, contexts, STREAM, [8, 40])
    assert costs["a"] == {8: [1000] * TOKENS, 40: [1000] * TOKENS}
    assert costs["b"] == {8: [3000] * TOKENS, 40: [3000] * TOKENS}
