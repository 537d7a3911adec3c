"""The tables and the model card of a run."""

from attnzoo.training.report import card, generation_table, results_table

VERDICT = "The result is worse than its window alone: recall is <1.6>"


def line(loss, recall=None):
    return {"loss": loss, "recall": recall, "loss_share": 0.5, "recall_share": None}


RESULTS = {
    "verdict": VERDICT,
    "window": 32,
    "lines": {"softmax": line(1.0, 0.5), "window alone": line(1.5), "result": line(1.25)},
    "decoding": {
        name: {"milliseconds": {256: 1.5, 1024: 2.5}, "cache_bytes": {256: 2048, 1024: size}}
        for name, size in (("softmax", 8192), ("result", 2048))
    },
    "spec": {"version": 1, "backend": "linear"},
}


def test_generation_has_a_table_of_its_own():
    generated = {"agreement": 0.63, "equal_tokens": 32.31, "copies": 0.73, "needles": None}
    lines = {name: {**row, **generated} for name, row in RESULTS["lines"].items()}
    results = {**RESULTS, "lines": lines}
    assert generation_table(results).rows[1] == ["window alone (32)", "63%", "32.3", "73%", "-"]
    assert "| result | 63% | 32.3 | 73% | - |" in card(results, "recover")
    assert generation_table(RESULTS) is None
    assert "Greedy generation" not in card(RESULTS, "recover")


def test_results_of_an_encoder_are_cosines():
    names = ("softmax", "window alone", "raw swap", "result")
    lines = {name: {"cosine": 0.9 - n / 10, "least": 0.5} for n, name in enumerate(names)}
    results = {**RESULTS, "lines": lines, "decoding": {}}
    text = card(results, "recover")
    assert "pipeline_tag: feature-extraction" in text
    assert "|  | mean cosine | least |" in text
    assert "| window alone (32) | 0.800 | 0.500 |" in text
    assert "Bits per byte" not in text
    assert "Bits per byte" in card(RESULTS, "recover")
    table = results_table(results)
    assert table.columns == ("", "mean cosine", "least")
    assert [row[1] for row in table.rows] == ["0.900", "0.800", "0.700", "0.600"]


def test_card_begins_with_the_verdict():
    text = card(RESULTS, "recover")
    body = text.split("---\n")[2]
    assert body.strip().splitlines()[2] == f"**{VERDICT}**"
    assert "| window alone (32) | 1.500 | 50% | - |  |" in text
    assert "| 1024 | 2.5 | 2.5 | 8.0 KiB | 2.0 KiB |" in text
    assert '"backend": "linear"' in text
