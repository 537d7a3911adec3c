import json
import math
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnzoo
from attnzoo.evaluation.corpus import read_documents, string_tokenizer
from attnzoo.evaluation.generation import Needles, correct_tokens
from attnzoo.evaluation.models import embedded_model_path, load_swapped
from attnzoo.evaluation.quality import evaluate_rows, make_eval_batch
from attnzoo.spec import AttentionSpec

MEGABYTE = 1e6


@pytest.fixture(scope="module")
def short_measurement():
    """Return a function that measures a swap on a few rows: (bits per byte, those of recall)."""
    path = embedded_model_path()
    batch = make_eval_batch(path, None, rows=12, row_length=512)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @cache
    def measure(backend, options=()):
        attnzoo.swap(model, backend, **dict(options))
        result = evaluate_rows(model, batch)
        return result.loss, result.recall

    return lambda backend, **options: measure(backend, tuple(options.items()))


@pytest.mark.parametrize("name", ["embedded", "embedded-long"])
def test_it_is_small_and_complete(name):
    path = embedded_model_path(name)
    assert sum(f.stat().st_size for f in path.iterdir()) <= 8 * MEGABYTE
    card = (path / "README.md").read_text()
    for fact in ("licen", "Python standard library", "steps", "bits per byte"):
        assert fact in card
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] in ("bfloat16", "float16")
    assert 4 <= config["num_hidden_layers"] <= 6
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["head_dim"] == 64
    assert config["max_position_embeddings"] >= 512


def test_it_has_two_to_four_million_parameters():
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path())
    assert 2e6 <= model.num_parameters() <= 4e6


@pytest.mark.exhaustive
def test_it_predicts_held_out_text_and_recalls_beyond_a_window(short_measurement):
    loss, recall = short_measurement("softmax")
    window, window_recall = short_measurement("flash", window=32)
    assert loss <= 1.75
    assert recall <= 1.30
    assert window - loss >= 0.2
    assert window_recall - recall >= 0.6


@pytest.mark.exhaustive
def test_a_raw_hybrid_is_not_far_worse_than_its_window(short_measurement):
    window, window_recall = short_measurement("flash", window=32)
    hybrid, hybrid_recall = short_measurement("linear", window=32, feature_map="hedgehog")
    assert hybrid <= window + 0.01
    assert hybrid_recall <= window_recall + 0.01


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "options", "least_loss", "least_recall"),
    [
        ("reformer", {"num_hashes": 8, "window": 32, "chunk_size": 16}, 0.95, 0.93),
        ("block_sparse", {"top_k": 10}, 0.98, 0.96),
    ],
)
def test_selected_keys_close_the_loss_gap_of_a_window(
    short_measurement, backend, options, least_loss, least_recall
):
    """The gap to softmax; reformer attends to at most 164 of 512 keys, block_sparse to 123."""
    whole, window = short_measurement("softmax"), short_measurement("flash", window=32)
    found = short_measurement(backend, **options)
    loss, recall = ((window[i] - found[i]) / (window[i] - whole[i]) for i in (0, 1))
    assert loss >= least_loss
    assert recall >= least_recall


def test_bits_per_byte_is_the_loss_that_transformers_reports():
    path = embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    batch = make_eval_batch(path, None, rows=8, row_length=128)
    result = evaluate_rows(model, batch)
    with torch.no_grad():
        loss = model(batch.rows.tokens, labels=batch.rows.tokens).loss.item()
    assert result.loss == pytest.approx(loss / math.log(2), abs=1e-4)


@pytest.mark.exhaustive
def test_the_long_model_repeats_numbers_that_a_window_loses():
    path = embedded_model_path("embedded-long")
    tokenizer = string_tokenizer(path)
    tokens = tokenizer(read_documents(None)[0])
    distance, rows = 1024, 4
    needles = Needles(tokenizer, rows)
    prompts = needles.rows([tokens], distance, torch.Generator().manual_seed(0))
    found = {}
    for window in (None, 256):
        model = load_swapped(path, AttentionSpec("flash", window=window))
        right = correct_tokens(model, prompts, needles.answer_tokens)
        found[window] = int(right.all(1).sum())
    assert found[None] >= 3
    assert found[256] == 0


def test_it_writes_python():
    path = embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("import os\nimport sy", add_special_tokens=False, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(out[0]).startswith("import os\nimport sys")
