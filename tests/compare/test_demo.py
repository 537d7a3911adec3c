"""`attnzoo demo` is a comparison with settings of its own."""

import json

import pytest
import torch
from transformers import BertConfig, BertModel, ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

from attnzoo.commands.compare import compare, demo
from attnzoo.compare.workers import Workers


@pytest.mark.exhaustive
def test_demo(tmp_path, monkeypatch, capsys):
    """Of a model with few positions; what was measured is not measured again."""
    monkeypatch.setattr(
        Workers, "run", lambda self, call, *given, device="cpu": {"status": "ok", **call(*given)}
    )
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 384}
    torch.manual_seed(0)
    monkeypatch.setattr("attnzoo.evaluation.generation.PROMPTS", 2)
    path, out, text = tmp_path / "gpt2", tmp_path / "out", tmp_path / "text.txt"
    GPT2LMHeadModel(GPT2Config(n_positions=300, **sizes)).save_pretrained(path)
    ByT5Tokenizer().save_pretrained(path)
    text.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    out.mkdir()
    (out / "results.jsonl").write_text("earlier")
    demo(path, text, ["longformer"], out, quick=True, fresh=True, as_json=False)
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    costs = [row for row in rows if row["kind"] == "cost"]
    assert {(x["level"], x["mode"], x["T"], x["status"]) for x in costs} == {
        ("model", "decode", 256, "ok")
    }
    assert [x["attention"] for x in costs] == ["flash", "longformer"]
    judged = {x["attention"]: x for x in rows if x["kind"] == "quality"}
    assert judged["flash"]["generation"]["agreement"] == 1
    assert (judged["flash"]["T"], judged["flash"]["B"]) == (300, 40)  # 6 * 2048 tokens
    assert "Quality without training" in printed
    assert "ms @256" in printed
    assert f"Report:  {out}" in printed
    assert (out / "results.jsonl.old").read_text() == "earlier"
    monkeypatch.setattr(Workers, "run", lambda *given, **named: pytest.fail("it was measured"))
    demo(path, text, ["longformer"], out, quick=True, as_json=True)
    assert json.loads(capsys.readouterr().out) == rows
    pictures = {x.stem for x in (out / "pictures").glob("*.png")}
    assert {"time-cpu-model-decode", "memory-cpu-model-decode"} <= pictures


def test_an_encoder_has_presets_of_its_own(tmp_path, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    BertModel(BertConfig(num_hidden_layers=1, vocab_size=99, **sizes)).save_pretrained(tmp_path)
    found = []
    monkeypatch.setattr("attnzoo.commands.compare._compare", lambda *given: found.append(given[0]))
    for attention in (["longformer"], None):
        compare(tmp_path, "64", attention)
        windows = [x.default.options["window"] for x in found[-1].specs if "longformer" in str(x)]
        assert windows == [256]
