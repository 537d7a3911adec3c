import json
import sys

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import attnzoo
from attnzoo.cli import main
from attnzoo.commands import terminal
from attnzoo.errors import SpecError
from attnzoo.evaluation.heads import HeadStudyModel, entropy, head_rows_of_text, study_heads
from attnzoo.evaluation.rows import Rows
from attnzoo.report import page
from tests.helpers import add_noise

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 384,
}
IDS = torch.arange(3, 43).view(4, 10)
ROWS = Rows.of_documents(IDS)


def llama(**changes):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **changes)
    return LlamaForCausalLM(config).double().eval()


def gpt2():
    """A model that computes in float64 throughout."""
    torch.manual_seed(0)
    return (
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)).double().eval()
    )


def bert():
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES), add_pooling_layer=False).double().eval()
    add_noise(model, 0.1)
    return model


def test_gradient_importance_is_the_slope_of_the_loss():
    study = HeadStudyModel(gpt2(), ROWS)
    found = study.gradient_importance()
    name, step = "transformer.h.1.attn", 1e-5
    for head in range(4):
        losses = []
        for sign in (-1, 1):
            mask = torch.ones(4, dtype=torch.float64)
            mask[head] += sign * step
            with study.masked({name: mask}), torch.no_grad():
                losses.append(study.losses())
        slope = ((losses[1] - losses[0]) / (2 * step)).abs().mean()
        assert found[name][head] == pytest.approx(float(slope), rel=1e-4)


def test_gradient_importance_of_embeddings():
    """The mean square along random directions is that of all directions, up to its variance."""
    study = HeadStudyModel(bert(), ROWS)
    found = study.gradient_importance()
    name, step = "encoder.layer.0.attention.self", 1e-5
    exact = []
    for head in range(4):
        vectors = []
        for sign in (-1, 1):
            mask = torch.ones(4, dtype=torch.float64)
            mask[head] += sign * step
            with study.masked({name: mask}), torch.no_grad():
                vectors.append(study.embeddings())
        exact.append(float(((vectors[1] - vectors[0]) / (2 * step)).norm(dim=1).mean()))
    assert found[name] == pytest.approx(exact, rel=0.5)


@torch.no_grad()
def test_quality_without_heads_is_that_of_the_pruned_model():
    study, pruned = HeadStudyModel(llama(), ROWS), {"model.layers.0.self_attn": [0, 3]}
    with study.without(pruned):
        found = study.quality()
    expected = HeadStudyModel(attnzoo.prune_heads(llama(), pruned), ROWS).quality()
    assert found == pytest.approx(expected, abs=1e-9)
    assert found != pytest.approx(study.quality(), abs=1e-6)


@torch.no_grad()
def test_attention_statistics():
    model = llama()
    study = HeadStudyModel(model, ROWS)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()  # every query weighs all earlier keys equally
    found = study.attention_statistics()
    rows = [torch.ones(t + 1) / (t + 1) for t in range(10)]
    expected = {
        "entropy": sum(float((t.new_tensor(len(t))).log2()) for t in rows) / 10,
        "distance": sum(t / 2 for t in range(10)) / 10,
    }
    for name, value in expected.items():
        assert found[name]["model.layers.0.self_attn"] == pytest.approx([value] * 4, rel=1e-5)
    assert not hasattr(model.config, "attnzoo")
    attnzoo.swap(model, "flash", window=2)
    assert max(study.attention_statistics()["distance"]["model.layers.0.self_attn"]) < 0.5
    assert entropy(torch.tensor([0.5, 0.5, -1.0])) == 1


def test_the_least_important_heads_are_chosen():
    study = HeadStudyModel(llama(num_key_value_heads=2), ROWS)
    importance = {
        "model.layers.0.self_attn": [1.0, 5.0, 0.1, 0.2],  # groups of 3.0 and 0.15
        "model.layers.1.self_attn": [9.0, 9.0, 2.0, 2.0],
    }
    assert study.choose(0.25, importance) == {"model.layers.0.self_attn": [2, 3]}
    both = study.choose(0.9, importance)  # each layer keeps a group
    assert both == {name: [2, 3] for name in importance}
    assert study.choose(0.1, importance) == {}  # a head, but groups have two


def test_a_study_has_every_measure():
    study = HeadStudyModel(llama(), ROWS)
    found = study_heads(study, [0.0, 0.5])
    assert found.quality == "loss"
    assert found.curve[0.0] == study.quality() != found.curve[0.5]
    assert set(found.measures) == {"gradient", "entropy", "distance"}
    for values in found.measures.values():
        assert [len(values[name]) for name in found.layers] == [4, 4]


def test_command(tmp_path, monkeypatch, capsys):
    model, text = tmp_path / "model", tmp_path / "text.txt"
    llama(num_key_value_heads=2).float().save_pretrained(model)
    ByT5Tokenizer().save_pretrained(model)
    text.write_text("some words of a text " * 20)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnzoo", "heads", *map(str, arguments)])
        monkeypatch.setattr(terminal.console, "width", 200)
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code, captured.err if stop.value.code else captured.out

    size = model, "--data", text, "--rows", 2, "--max-length", 16, "--output-dir", tmp_path / "out"
    code, out = run(*size, "--prune", 0.25, "--save", tmp_path / "pruned")
    assert code == 0
    assert "by gradient" in out
    assert "without 2 heads" in out
    assert (tmp_path / "out" / "heads.html").read_text().count("<img") == 3
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "pruned")
    (name, heads), *rest = saved.config.attnzoo_pruned_heads.items()
    assert not rest
    assert len(heads) == 2
    assert saved.get_submodule(name).q_proj.out_features == 16
    assert (tmp_path / "pruned" / "tokenizer_config.json").is_file()
    monkeypatch.setattr(page, "can_draw", lambda: False)
    code, out = run(*size, "--overwrite", "--json")
    assert code == 0
    assert json.loads(out)["pruned"] == {}
    for wrong, message in (
        (["--prune", 0.5], "belong together"),
        (["--prune", 2, "--save", tmp_path / "x"], "below 1"),
        (["--prune", 0.01, "--save", tmp_path / "x", "--overwrite"], "of 8 heads removes none"),
        (["--max-length", 1], "greater than or equal to 2"),
        ([], "exists; give --overwrite"),
    ):
        code, out = run(*size, *wrong)
        assert code == 2
        assert message in out
    attnzoo.swap(saved, "linear").save_pretrained(model)
    code, out = run(*size, "--prune", 0.5, "--save", tmp_path / "x", "--overwrite")
    assert code == 2
    assert "A swapped model is not pruned" in out


def test_a_text_has_at_most_the_models_positions(tmp_path):
    gpt2().config.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="at most the model's 1024 positions, got 1025"):
        head_rows_of_text(tmp_path, None, [], rows=1, length=1025)
