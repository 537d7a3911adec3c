"""Calibration of gates before transfer, and where it is reported."""

import json

import torch

import attnzoo
from attnzoo.evaluation.rows import Rows
from attnzoo.training.calibrate import calibrate
from attnzoo.training.recover import recover
from tests.training.test_reuse import config

DELTA = {"window": 4, "chunk_size": 8}


def test_calibration_starts_the_mixing_weights_at_the_far_shares(model):
    """Only delta's gates change; the model's inputs and its mode stay as they are."""
    rows = Rows.of_documents(torch.arange(3, 67).repeat(3, 1))
    attnzoo.swap(model, "delta", layers={"1": "linear"}, **DELTA)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    (row,) = calibrate(model, rows)
    changed = {n for n, x in model.state_dict().items() if not torch.equal(x, before[n])}
    assert row["layer"] == "model.layers.0.self_attn"
    assert {name.rsplit(".", 1)[1] for name in changed} == {
        *("write_weight", "write_bias", "mix_weight", "mix_lse", "far_log_weight", "bias")
    }
    assert all(name.startswith("model.layers.0.self_attn.attnzoo.") for name in changed)
    assert 0 < row["beyond"] < 1
    assert 4 <= row["age"] < 64
    assert not model.training
    assert calibrate(model, Rows.of_documents(rows.tokens[:, :4])) == []


def test_recovery_reports_the_attention_that_gates_start_from(saved, text, tmp_path):
    spec = attnzoo.AttentionSpec("delta", layers={"1": "flash"}, **DELTA)
    lines = []
    out = tmp_path / "out"
    results = recover(saved, spec, [text], config(out), calibrate=True, log=lines.append)
    (row,) = results["calibration"]
    assert any(line.startswith(f"{row['layer']}: {row['beyond']:.0%} of the at") for line in lines)
    assert json.loads((out / "recovery.json").read_text())["calibration"] == [row]
    assert f"| {row['layer']} | {row['beyond']:.0%} |" in (out / "README.md").read_text()
    plain = recover(saved, spec, [text], config(tmp_path / "plain"))
    assert "calibration" not in plain
    assert plain["lines"]["raw swap"] == results["lines"]["raw swap"]
    assert plain["lines"]["result"] != results["lines"]["result"]
