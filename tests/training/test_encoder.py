"""Recovery of a tiny BERT: results, trained weights, refused arguments."""

import json

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.embeddings import Texts, embeddings
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.hf.mixins import stock_class
from attnzoo.training import evaluator
from attnzoo.training.data import (
    DataError,
    RowOptions,
    load_documents,
    split_documents,
    tokenize_texts,
)
from attnzoo.training.loading import is_encoder
from attnzoo.training.recover import recover
from attnzoo.training.verdict import encoder_verdict
from tests.training.short_runs import arguments, losses

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "alpha", "beta", "gamma", "delta"]
SPEC = attnzoo.AttentionSpec("linear", feature_map="hedgehog", window=2)


@pytest.fixture
def encoder(tmp_path):
    """The folder of a tiny encoder, with dropout, and a tokenizer of four words."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.5,
        attention_probs_dropout_prob=0.5,
    )
    model = hf.BertForMaskedLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # attention is far from uniform
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    tokens = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    path = tmp_path / "encoder"
    model.save_pretrained(path)
    hf.PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(path)
    return path


@pytest.fixture
def lines(tmp_path):
    """A file of texts of 3 to 40 words."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "texts.jsonl"
    texts = []
    for _ in range(48):
        count = int(torch.randint(3, 41, (), generator=generator))
        picks = torch.randint(4, 8, (count,), generator=generator).tolist()
        texts.append(json.dumps({"text": " ".join(WORDS[n] for n in picks)}))
    path.write_text("\n".join(texts))
    return path


def config(out, **options):
    given = {"transfer_steps": 4, "max_steps": 4, "max_length": 16, "save_steps": 2}
    return arguments(out, **{**given, "per_device_train_batch_size": 8, **options})


def test_frozen_weights_in_bfloat16_are_no_part_of_the_result(encoder, lines, tmp_path):
    recover(encoder, SPEC, [lines], config(out := tmp_path / "out", dtype="bfloat16"))
    saved, exact = (hf.AutoModelForMaskedLM.from_pretrained(p).state_dict() for p in (out, encoder))
    frozen = [n for n in exact if "LayerNorm" in n or "embeddings" in n]
    assert frozen
    for name in frozen:
        assert torch.equal(saved[name], exact[name]), name
    assert any(not torch.equal(saved[name], x) for name, x in exact.items())


def test_texts_of_a_command_are_as_alone(encoder, lines, attnzoo_command, tmp_path, monkeypatch):
    """Short texts of JSON lines, padded beside longer ones, against each text without padding."""
    monkeypatch.setattr(evaluator, "ROWS", 32)
    out, swap = tmp_path / "out", {"feature_map": "hedgehog", "window": 2}
    given = ["--attention", "linear:feature_map=hedgehog,window=2"]
    steps = ["--transfer-steps", "1", "--max-steps", "1", "--max-length", "32"]
    attnzoo_command("recover", encoder, "--data", lines, "--output-dir", out, *given, *steps)
    found = json.loads((out / "recovery.json").read_text())["lines"]["raw swap"]["cosine"]
    tokenizer = hf.AutoTokenizer.from_pretrained(encoder)
    held_out = [*split_documents(load_documents([lines], RowOptions(), None))[1]["text"]]
    parts = {"truncation": True, "max_length": 32, "return_overflowing_tokens": True}
    means = []
    for spec in (None, attnzoo.AttentionSpec("linear", **swap)):
        model = hf.BertModel.from_pretrained(encoder, dtype=torch.float64).eval()
        if spec is not None:
            attnzoo.swap(model, spec)
        rows = [torch.tensor([x]) for x in tokenizer(held_out, **parts)["input_ids"]]
        with torch.no_grad():
            means.append(torch.cat([model(x).last_hidden_state.mean(1) for x in rows]))
    assert len({x.shape[1] for x in rows}) > 1
    assert found == pytest.approx(float(torch.cosine_similarity(*means).mean()), rel=1e-5)
    assert found < 0.999


@pytest.mark.exhaustive
@pytest.mark.parametrize("train", ["lora", "full"])
def test_trained_weights_and_results(encoder, lines, tmp_path, train):
    out, dtype = tmp_path / "out", torch.bfloat16 if train == "full" else torch.float32
    hf.BertForMaskedLM.from_pretrained(encoder, dtype=dtype).save_pretrained(encoder)
    results = recover(encoder, SPEC, [lines], config(out, train=train))
    assert results == json.loads((out / "recovery.json").read_text())
    assert results["lines"]["softmax"]["cosine"] == pytest.approx(1, abs=1e-6)
    assert set(results["lines"]) >= {"raw swap", "window alone", "result"}
    saved, exact = (hf.AutoModelForMaskedLM.from_pretrained(p) for p in (out, encoder))
    assert stock_class(type(saved)) is hf.BertForMaskedLM
    assert {x.dtype for x in saved.parameters()} == {dtype}
    changed = {
        name
        for name, x in exact.state_dict().items()
        if not torch.equal(x, saved.state_dict()[name])
    }
    assert any("query" in name for name in changed)
    assert any("word_embeddings" in name for name in changed) == (train == "full")
    assert "mean cosine" in (out / "README.md").read_text()


def test_recovery_raises_the_cosine(encoder, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "ROWS", 8)
    results = recover(
        encoder,
        SPEC,
        [lines],
        config(tmp_path / "out", transfer_steps=30, max_steps=30, train="full", learning_rate=3e-3),
    )
    raw, result = (results["lines"][name]["cosine"] for name in ("raw swap", "result"))
    assert 1 - result < 0.5 * (1 - raw)


def test_dropout_is_disabled(encoder, lines, tmp_path):
    """Without dropout, the loss of an exact swap is 0."""
    flash = attnzoo.AttentionSpec("flash")
    options = config(tmp_path / "out", transfer_steps=0, max_steps=2, train="lora")
    assert all(x < 1e-9 for _, _, x in losses(recover(encoder, flash, [lines], options)))


def test_tokenize_texts_splits_and_pads(encoder):
    fast = hf.AutoTokenizer.from_pretrained(encoder)
    texts = tokenize_texts(
        ["alpha beta gamma delta alpha", "beta"], fast, row_length=5, vocab_size=8
    )
    assert texts.tokens.tolist() == [[1, 4, 5, 6, 2], [1, 7, 4, 2, 0], [1, 5, 2, 0, 0]]
    assert texts.attention_mask.tolist() == [[1] * 5, [1] * 4 + [0], [1] * 3 + [0] * 2]
    slow = hf.AutoTokenizer.from_pretrained(embedded_model_path())
    texts = tokenize_texts(["abcd"], slow, row_length=3, vocab_size=384)
    assert texts.tokens.tolist() == [[100, 101, 1], [102, 103, 1]]
    with pytest.raises(DataError, match="returns token 7, but the model's vocabulary has 6"):
        tokenize_texts(["delta"], fast, row_length=5, vocab_size=6)
    fast.pad_token = None
    with pytest.raises(DataError, match="no padding token"):
        tokenize_texts(["delta"], fast, row_length=5, vocab_size=8)


def test_embeddings_are_means_without_padding(encoder):
    model = hf.AutoModel.from_pretrained(encoder).train()
    tokens = torch.tensor([[1, 4, 5, 2, 0, 0], [1, 6, 2, 0, 0, 0]])
    found = embeddings(model, Texts(tokens=tokens, attention_mask=(tokens != 0).long()))
    assert model.training
    model.eval()
    for row, count in ((0, 4), (1, 3)):
        expected = model(tokens[row : row + 1, :count]).last_hidden_state.mean(1)[0]
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-4)


def test_verdict_begins_with_a_result_worse_than_its_window():
    cosines = {"window alone": 0.8, "raw swap": 0.5, "result": 0.7}
    lines = {name: {"rows": [cosine] * 4} for name, cosine in cosines.items()}
    assert encoder_verdict(lines).startswith("The result is worse than its window alone")
    lines["result"] = {"rows": [0.9] * 4}
    text = encoder_verdict(lines)
    assert "0.900 ± 0.000 to softmax's; the raw swap 0.500 ± 0.000, the window alone 0.800" in text
    lines["result"] = {"rows": [0.6, 0.9, 0.8, 0.85]}
    assert "No difference from the window alone is certain: -0.013 ± " in encoder_verdict(lines)


def test_invalid_arguments_are_refused(encoder, lines, saved, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="cross_entropy has no effect: an encoder"):
        recover(encoder, SPEC, [lines], config(out, cross_entropy=0.5))
    with pytest.raises(ConfigError, match="hidden_states has no effect: an encoder"):
        recover(encoder, SPEC, [lines], config(out, hidden_states=1.0))
    with pytest.raises(DataError, match="a document of 33, and the model has 32 positions"):
        recover(encoder, SPEC, [lines], config(out, max_length=33))
    assert not out.exists()
    assert is_encoder(encoder)
    assert not is_encoder(saved)
    both = hf.T5Config(
        vocab_size=8, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, pad_token_id=0
    )
    hf.T5ForConditionalGeneration(both).save_pretrained(tmp_path / "both")
    with pytest.raises(SpecError, match="causal and bidirectional attention layers"):
        is_encoder(tmp_path / "both")
