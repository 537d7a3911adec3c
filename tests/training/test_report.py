"""The table and the model card of a run."""

from pathlib import Path
from types import SimpleNamespace

from attnzoo.training.report import card, results_table

VERDICT = "The result is worse than its window alone: recall is <1.6>"


def run(tmp_path, **changes):
    """A run of 3 steps, from a model in the cache of the Hub."""
    args = {"max_length": 16, "train_batch_size": 2, "gradient_accumulation_steps": 3}
    return SimpleNamespace(
        **{
            "path": Path("cache/models--a--b--c/snapshots/1"),
            "data": [tmp_path, Path("org/corpus:english")],
            "args": SimpleNamespace(**args, world_size=4, cp_size=2, hub_model_id=None),
            **{"rows": [0] * 70, "held_out": [0] * 9},
            "stages": {"transfer": [{"step": 1}, {"step": 5}], "softmax": [{"step": 3}]},
            "folder": SimpleNamespace(out=tmp_path / "out"),
            **changes,
        }
    )


def line(loss, recall=None):
    return {"loss": loss, "recall": recall, "loss_share": 0.5, "recall_share": None}


RESULTS = {
    "verdict": VERDICT,
    "window": 32,
    "lines": {"softmax": line(1.0, 0.5), "window alone": line(1.5), "result": line(1.25)},
    "longer": {"64": {"result": line(1.125)}},
    "spec": {"version": 1, "backend": "linear"},
    "config": {"seed": 3},
}


def test_a_column_is_there_if_a_line_has_its_number():
    generated = {"agreement": 0.63, "equal_tokens": 32.31}
    lines = {name: {**row, **generated} for name, row in RESULTS["lines"].items()}
    table = results_table({**RESULTS, "lines": lines})
    names = ("loss", "recovered", "recall", "equal tokens", "before a difference")
    assert table.columns == ("", *names)
    assert table.rows[1] == ["window alone (32)", "1.500", "50%", "-", "63%", "32.3"]
    assert table.rows[3] == ["result @ 64", "1.125", "50%", "-", "-", "-"]
    assert results_table(RESULTS).columns == ("", *names[:3])


def test_results_of_an_encoder_are_cosines(tmp_path):
    names = ("softmax", "window alone", "raw swap", "result")
    lines = {name: {"cosine": 0.9 - n / 10, "least": 0.5} for n, name in enumerate(names)}
    results = {**RESULTS, "lines": lines, "longer": {}}
    text = card(run(tmp_path), results)
    assert "pipeline_tag: feature-extraction" in text
    assert "| window alone (32) | 0.800 | 0.500 |" in text
    assert "Bits per byte" not in text
    table = results_table(results)
    assert table.columns == ("", "mean cosine", "least")
    assert [row[1] for row in table.rows] == ["0.900", "0.800", "0.700", "0.600"]


def test_card_begins_with_the_verdict(tmp_path):
    text = card(run(tmp_path), RESULTS)
    body = text.split("---\n")[2]
    assert body.strip().splitlines()[2] == f"**{VERDICT}**"
    assert "| window alone (32) | 1.500 | 50% | - |" in text
    assert "from [a/b--c](https://huggingface.co/a/b--c) by" in text
    assert "in 5 steps (5 of transfer) with 12 rows a step, of 70 rows of 16 tokens from" in text
    assert f"{tmp_path.name}, org/corpus:english. Of another 9 rows, which" in text
    assert "held out, 2 are measured" in text
    assert "datasets:\n- org/corpus\n" in text
    assert str(tmp_path) not in text
    assert '"backend": "linear"' in text
    assert '"seed": 3' in text
