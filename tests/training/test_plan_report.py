"""How plans are presented."""

from attnzoo import AttentionSpec
from attnzoo.training.candidates import Candidate
from attnzoo.training.plan import LayerMeasure, Plan
from attnzoo.training.plan_report import candidates_table, choice_text

NAMES = (
    "longformer:window=128",
    "gated_linear:feature_map=hedgehog,window=32",
    "delta:feature_map=squared_relu,window=32",
    "reformer:chunk_size=16",
)


def made(count):
    """A plan for a model of so many layers, of which each second one stays exact."""
    layers = []
    for n in range(count):
        rows = {x: [0.01 * (i + 1) * (n + 1) * k for k in (0.9, 1.1)] for i, x in enumerate(NAMES)}
        alone = {name: sum(x) / 2 for name, x in rows.items()}
        layers.append(
            LayerMeasure(
                layer=n, beyond=0.3, entropy=4.2, alone=alone, restored=alone, alone_rows=rows
            )
        )
    entry = {"backend": "delta", "options": {"feature_map": "squared_relu", "window": 32}}
    spec = AttentionSpec("flash", layers={str(n): entry for n in range(0, count, 2)})
    windows = ((None, []), (65, [0.2, 0.3] * 4), (288, [0.01] * 8), (900, []))
    candidates = [
        Candidate(
            name=name,
            length=4096,
            cache_bytes=2**20,
            exact_bytes=2**24,
            kl_rows=[0.19, 0.21] * 4,
            window=window,
            window_rows=rows,
        )
        for name, (window, rows) in zip(NAMES, windows, strict=True)
    ]
    return Plan(
        spec=spec,
        divergence=0.0123,
        divergence_error=0.001,
        window=32,
        layers=layers,
        weights="0",
        candidates=candidates,
        left_out={"longformer:window=4096": "it reads every key of rows of 512 tokens"},
    )


def test_the_winner_at_equal_memory_is_named():
    rows = [row[-1] for row in candidates_table(made(4)).rows]
    assert rows == [
        "its cache is as large as softmax's",
        "no difference measured",
        "the window",
        "the rows are not longer than the window (900)",
    ]


def test_choices_are_words():
    plan = made(4)
    assert choice_text(plan, 0) == "delta, feature map squared_relu, window 32"
    assert choice_text(plan, 1) == "softmax (flash)"
