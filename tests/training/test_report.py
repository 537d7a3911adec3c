"""The table and the model card of a run."""

from attnzoo.training.report import card, results_table

VERDICT = "The result is worse than its window alone: recall is <1.6>"
ABOUT = {
    **{"attnzoo": "0.1", "base_model": "org/base", "base_name": "org/base", "metadata": {}},
    **{"data": ["text.txt"], "datasets": [], "rows": 70, "row_length": 16, "held_out_rows": 9},
    **{"steps": {"transfer": 3}, "batch": 2, "name": "out"},
}


def line(loss, recall=None):
    return {"loss": loss, "recall": recall, "loss_share": 0.5, "recall_share": None}


RESULTS = {
    "verdict": VERDICT,
    "window": 32,
    "lines": {"softmax": line(1.0, 0.5), "window alone": line(1.5), "result": line(1.25)},
    "longer": {"64": {"result": line(1.125)}},
    "about": ABOUT,
    "spec": {"version": 1, "backend": "linear"},
    "config": {"seed": 3},
}


def test_a_column_is_there_if_a_line_has_its_number():
    generated = {"agreement": 0.63, "equal_tokens": 32.31, "copies": 0.73, "needles": None}
    lines = {name: {**row, **generated} for name, row in RESULTS["lines"].items()}
    table = results_table({**RESULTS, "lines": lines})
    names = ("loss", "recovered", "recall", "equal tokens", "before a difference", "copies")
    assert table.columns == ("", *names)
    assert table.rows[1] == ["window alone (32)", "1.500", "50%", "-", "63%", "32.3", "73%"]
    assert table.rows[3] == ["result @ 64", "1.125", "50%", "-", "-", "-", "-"]
    assert results_table(RESULTS).columns == ("", *names[:3])


def test_results_of_an_encoder_are_cosines():
    names = ("softmax", "window alone", "raw swap", "result")
    lines = {name: {"cosine": 0.9 - n / 10, "least": 0.5} for n, name in enumerate(names)}
    results = {**RESULTS, "lines": lines, "longer": {}}
    text = card(results)
    assert "pipeline_tag: feature-extraction" in text
    assert "| window alone (32) | 0.800 | 0.500 |" in text
    assert "Bits per byte" not in text
    table = results_table(results)
    assert table.columns == ("", "mean cosine", "least")
    assert [row[1] for row in table.rows] == ["0.900", "0.800", "0.700", "0.600"]


def test_card_begins_with_the_verdict():
    text = card(RESULTS)
    body = text.split("---\n")[2]
    assert body.strip().splitlines()[2] == f"**{VERDICT}**"
    assert "| window alone (32) | 1.500 | 50% | - |" in text
    assert "[org/base](https://huggingface.co/org/base)" in text
    assert '"backend": "linear"' in text
    assert '"seed": 3' in text
