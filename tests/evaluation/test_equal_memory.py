"""Bytes of caches, and windows of equal memory, against the tensors of caches that models fill."""

import json
import sys

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo import AttentionSpec
from attnzoo.cli import main
from attnzoo.compare.cases import CostCase, cache_size, default_specs
from attnzoo.compare.run import read_model_info
from attnzoo.evaluation import equal_memory
from attnzoo.evaluation.equal_memory import cache_bytes, equal_window, saved_cache_bytes
from attnzoo.evaluation.models import spec_label
from attnzoo.training.planner import SwapPlanner


def save(path, dtype, config=None, layers=3):
    torch.manual_seed(0)
    config = config or hf.LlamaConfig(
        **{"vocab_size": 384, "hidden_size": 32, "intermediate_size": 32},
        num_hidden_layers=layers,
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    )
    hf.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), torch.float32)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The same model with two layers, saved in bfloat16, with a tokenizer of bytes."""
    path = save(tmp_path_factory.mktemp("half"), torch.bfloat16, layers=2)
    hf.ByT5Tokenizer().save_pretrained(path)
    return path


KEY = 2 * 2 * 8 * 4  # bytes of a token's keys and values in a layer


@torch.no_grad()
def filled(path, spec, length):
    """The layers of a cache that the model has filled."""
    model = hf.AutoModelForCausalLM.from_pretrained(path).eval()
    if spec is not None:
        attnzoo.swap(model, spec)
    cache = hf.DynamicCache(config=model.config)
    model(torch.zeros(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
    return cache.layers


def kept(path, spec, length):
    return {n: cache_bytes(layer) for n, layer in enumerate(filled(path, spec, length))}


def tensors(x):
    """Every tensor that an object holds, by its id."""
    if isinstance(x, torch.Tensor):
        return {id(x): x}
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    parts = vars(x).values() if hasattr(x, "__dict__") else parts
    return {key: y for part in parts for key, y in tensors(part).items()}


def allocated(path, spec, length):
    """The bytes of all tensors of a cache that the model has filled."""
    held = tensors(filled(path, spec, length)).values()
    return sum(x.numel() * x.element_size() for x in held)


INDEXER = {"score": "indexer", "block_size": 12, "query_block": 2, "top_k": 3, "window": 20}
SPECS = {spec_label(spec): spec for spec in default_specs(None)} | {
    "dilated": AttentionSpec("longformer", window=400, dilation=3, num_global=5),
    "wide": AttentionSpec("flash", window=1500, num_sinks=3),
    "indexer": AttentionSpec("block_sparse", **INDEXER),
    "short convolution": AttentionSpec("delta", short_convolution=3, window=7, num_sinks=2),
    "blocks of 24": AttentionSpec("linformer", num_rows=3, block=24),
    "mixed": AttentionSpec("flash", layers={"1": {"backend": "delta", "options": {"window": 4}}}),
}


INDEXER_WARNING = "ignore:block_sparse. the indexer is not trained"


@pytest.mark.parametrize(
    "name",
    [
        *("mixed", "dilated", "indexer", "blocks of 24", "linear hedgehog window 32"),
        *("delta window 32", "reformer num_hashes 4"),
    ],
)
@pytest.mark.filterwarnings(INDEXER_WARNING)
def test_bytes_are_those_allocated(half, name):
    """Those of all specs, at a length that follows from shorter ones, is a test below."""
    spec = SPECS[name]
    assert sum(saved_cache_bytes(half, spec, 300).values()) == allocated(half, spec, 300)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("blocks of 24", 310),
        *(pytest.param(name, 3077, marks=pytest.mark.exhaustive) for name in SPECS),
    ],
)
@pytest.mark.filterwarnings(INDEXER_WARNING)
def test_all_that_count_bytes_give_those_allocated(half, name, length, monkeypatch):
    """Of a model in bfloat16: what plan, memory, compare and the window of equal memory count."""
    monkeypatch.setattr(equal_memory, "STEP", min(1024, length // 5))  # beyond a window and two
    spec = SPECS[name]
    case = CostCase.of(spec, length, mode="decode")
    found = {
        "plan": sum(saved_cache_bytes(half, spec, length).values()),
        "memory": attnzoo.estimate_memory(half, spec, length=length).cache,
        "compare": cache_size(case, read_model_info(half)),
        "equal memory": equal_window(half, spec, length).swap_bytes,
    }
    assert found == dict.fromkeys(found, allocated(half, spec, length))


FAMILIES = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "gemma3_text": {"sliding_window": 40, "head_dim": 8},
    "mixtral": {"num_local_experts": 3},
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_head": 4, "n_layer": 2},
}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((x, torch.bfloat16) for x in FAMILIES), ("mixtral", torch.half)],
)
def test_all_layers_count(tmp_path, family, dtype):
    """Convolutions, windows of stock layers, layers with experts; beyond the positions, too."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {} if family == "gpt2" else sizes
    config = hf.AutoConfig.for_model(family, **(sizes | FAMILIES[family]))
    save(tmp_path, dtype, config)
    for spec in (None, AttentionSpec("flash", window=17)):
        found = saved_cache_bytes(tmp_path, spec, 60)
        assert sum(found.values()) == allocated(tmp_path, spec, 60)
        assert list(found) == [0, 1]
        if family == "gpt2" and spec is None:
            assert sum(saved_cache_bytes(tmp_path, spec, 6000).values()) == 6000 * 2 * 2 * 32 * 2


def test_plans_keep_the_limit_of_the_cache_in_use(half, tmp_path, monkeypatch, capsys):
    """A limit as large as the cache swaps nothing; the smallest cache is known before a run."""

    def plan(size):
        size = ("--cache-bytes", size, "--cache-length", 400, "--output-file", out, "--overwrite")
        monkeypatch.setattr(sys, "argv", [str(x) for x in ("attnzoo", "plan", half, *given, *size)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code

    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} has {i * i} in it\n" for i in range(400)))
    limit = allocated(half, "flash", 400)
    given = ("--candidate", "longformer:window=8", "--data", text, "--max-length", 64, "--rows", 2)
    out = tmp_path / "plan.json"
    for share, swapped in ((1, 0), (0.7, 1)):
        assert not plan(int(share * limit))
        spec = json.loads(out.read_text())["spec"]
        assert len(spec.get("layers", ())) == swapped
        assert allocated(half, AttentionSpec.from_dict(spec), 400) <= share * limit
    monkeypatch.setattr(SwapPlanner, "__init__", None)  # nothing is measured
    assert plan(899)
    assert "The smallest candidates use" in capsys.readouterr().err


def test_windows_need_as_much_memory_as_the_swap(folder):
    """Layers that stay exact stay so; the caches are equal to one key."""
    entry = {"backend": "delta", "options": {"window": 4}}
    spec = AttentionSpec("flash", layers={"1-2": entry})
    found = equal_window(folder, spec, 60)
    assert set(found.windows) == {1, 2}
    assert found.widest
    assert found.spec.for_layer(0).options.get("window") is None
    swap, window = kept(folder, spec, 60), kept(folder, found.spec, 60)
    assert window[0] == swap[0] == 60 * KEY
    for layer in (1, 2):
        assert abs(window[layer] - swap[layer]) <= 2 * KEY
    assert found.swap_bytes == sum(swap.values())
    assert found.exact_bytes == 3 * 60 * KEY
    assert str(found) == str(found.windows[1])


def test_a_cache_of_all_keys_is_softmax(folder):
    found = equal_window(folder, AttentionSpec("reformer", chunk_size=4), 60)
    assert set(found.windows.values()) == {None}
    assert not found.widest


def test_the_equal_of_a_window_is_itself(folder):
    for name, options, size in (
        ("flash", {"window": 17}, 17),
        ("flash", {"window": 9, "num_sinks": 4}, 13),
        ("softmax", {"window": 60}, 0),
        ("longformer", {"window": 21}, 21),
    ):
        assert equal_window(folder, AttentionSpec(name, **options), 60).widest == size
    short = equal_window(folder, AttentionSpec("longformer", window=64), 32)
    assert not short.widest


def test_bytes_follow_the_saved_dtype(folder, half):
    """A state is float32, keys are bfloat16: the window is nearly twice as wide."""
    wide, narrow = (equal_window(x, AttentionSpec("linear"), 900).widest for x in (half, folder))
    assert wide == pytest.approx(2 * narrow, abs=2)
    given = equal_window(half, AttentionSpec("linear"), 900, torch.float32)
    assert given.widest == narrow
