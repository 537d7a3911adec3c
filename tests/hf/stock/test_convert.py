"""Exact models in stock classes: bit for bit, or refused with the class that would do."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.cli import main
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf.stock import convert as module
from attnzoo.hf.stock.classes import STOCK_CLASSES, Windows, classes_for
from attnzoo.hf.stock.convert import convert_files
from tests.helpers import add_noise

W = 5
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,  # a multiple of 32: AVX-512 rounds SiLU otherwise in a remainder
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
MORE = {
    "llama": {"rope_parameters": ROPE},
    "qwen2": {"rope_parameters": ROPE},
    "qwen3": {"head_dim": 8, "rope_parameters": ROPE},
    "gemma2": {"head_dim": 8, "sliding_window": 40},
    "gemma3_text": {"head_dim": 8, "sliding_window": 40},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mellum": {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "sliding_window": 40},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "mistral": {"sliding_window": None, "rope_parameters": ROPE},
    "ministral": {"head_dim": 8, "rope_parameters": ROPE, "layer_types": ["full_attention"] * 3},
    "phi3": {"sliding_window": None},
}
TOKENS = torch.randint(2, 99, (2, 24), generator=torch.Generator().manual_seed(0))
SOME = attnzoo.AttentionSpec("flash", impl="sdpa", layers={"0,2": f"flash:window={W},impl=sdpa"})
ALL = attnzoo.AttentionSpec("flash", impl="sdpa", window=W)
FULL = attnzoo.AttentionSpec("flash", impl="sdpa")
PAIRS = [(family, x.family) for x in STOCK_CLASSES.values() for family in sorted(x.takes)]


def model_of(family, **changes):
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(family, **{**SIZES, **MORE.get(family, {}), **changes})
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    add_noise(model, 0.3)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("norm.weight"):
                x.clamp_(min=0.5)  # below, Qwen 3.5 rounds w - 1
    return model


def logits(model, implementation=None, **inputs):
    if implementation:
        model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(TOKENS, use_cache=False, **inputs).logits


def window_mask(window):
    """Return a 4-D mask that adds minus infinity outside of a causal window."""
    distance = torch.arange(24)[:, None] - torch.arange(24)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(24, 24).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.parametrize(("family", "to"), PAIRS)
def test_windows_move_between_families_bit_for_bit(family, to):
    """The oracle is the stock class with the window as a mask that is written here."""
    original = model_of(family)
    original.generation_config.top_k = 7
    if STOCK_CLASSES[to].windows is Windows.NONE:
        expected = logits(original, "eager")
        converted = attnzoo.convert(original, to)
    else:
        full = attnzoo.convert(original, "llama") if family == "ministral" else original
        mask = window_mask(W).expand(2, 1, 24, 24)
        expected = logits(full, "eager", attention_mask=mask)
        assert not torch.equal(expected, logits(full, "eager"))
        full.set_attn_implementation("sdpa")
        converted = attnzoo.convert(original, to, ALL)
    assert converted.config.model_type == to
    assert not any("attnzoo" in name for name in converted.state_dict())
    assert torch.equal(logits(converted, "eager"), expected)
    fields = ["vocab_size", "max_position_embeddings", "rms_norm_eps"]
    fields += ["pad_token_id", "bos_token_id", "eos_token_id"]
    for name in fields:
        assert getattr(converted.config, name) == getattr(original.config, name), name
    is_tied = converted.get_input_embeddings().weight is converted.lm_head.weight
    assert is_tied == converted.config.tie_word_embeddings == (to != "mellum")
    assert converted.generation_config.top_k == 7


@pytest.mark.parametrize(
    ("family", "to"), [("llama", "qwen2"), ("llama", "ministral"), ("qwen3", "mellum")]
)
def test_windows_of_some_layers_are_those_of_the_swap(family, to):
    swapped = attnzoo.swap(model_of(family), SOME)
    converted = attnzoo.convert(swapped, to)
    assert [x.geometry.window for x in module.attention_layers(converted)] == [W, None, W]
    assert torch.equal(logits(converted), logits(swapped))  # both by PyTorch's fused kernels
    assert attnzoo.describe(swapped).layers[0].backend == "flash"  # it is not changed
    tokens = [x.generate(TOKENS, max_new_tokens=12, do_sample=False) for x in (converted, swapped)]
    assert torch.equal(*tokens)


def test_attention_sinks_without_weight_change_nothing():
    """Granite has no fused kernel in transformers: the oracle is another class under eager."""
    swapped = attnzoo.swap(model_of("llama"), SOME)
    first, second = (attnzoo.convert(swapped, to) for to in ("granite_swa", "qwen2"))
    assert torch.equal(logits(first, "eager"), logits(second, "eager"))
    assert torch.equal(
        first.half().state_dict()["model.layers.0.self_attn.sinks"].exp(), torch.zeros(4).half()
    )


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "ministral", "gemma2", "gpt_oss", "smollm3", "granite_swa"]
)
def test_a_family_with_windows_holds_its_own(family):
    model = model_of(family, layer_types=["full_attention"] * 3)
    spec = attnzoo.AttentionSpec("softmax", layers={"0,2": f"softmax:window={W}"})
    swapped = attnzoo.swap(model, spec)
    converted = attnzoo.convert(swapped, family)
    assert type(converted) is type(model_of(family))
    assert [x.geometry.window for x in module.attention_layers(converted)] == [W, None, W]
    torch.testing.assert_close(logits(converted, "eager"), logits(swapped), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "phi3", "starcoder2", "mistral"])
def test_a_window_of_all_layers(family):
    swapped = attnzoo.swap(model_of(family), attnzoo.AttentionSpec("softmax", window=W))
    converted = attnzoo.convert(swapped, family)
    assert converted.config.sliding_window == W
    torch.testing.assert_close(logits(converted, "eager"), logits(swapped), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "mellum", "olmo3", "cohere2"])
def test_layers_whose_positions_depend_on_the_window_keep_their_kind(family):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = model_of(family, layer_types=kinds, sliding_window=40)
    smaller = attnzoo.AttentionSpec("softmax", layers={"0,2": f"softmax:window={W}"})
    converted = attnzoo.convert(attnzoo.swap(model, smaller), family)
    assert converted.config.sliding_window == W
    assert converted.config.layer_types == kinds
    torch.testing.assert_close(logits(converted, "eager"), logits(model), rtol=1e-4, atol=1e-4)
    attnzoo.swap(model, "softmax", window=40)
    with pytest.raises(UnsupportedError, match="other positions"):
        attnzoo.convert(model, family)


def test_softmax_goes_back_to_any_class():
    config = hf.BertConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"})
    model = hf.BertModel(config).eval()
    inputs = {"input_ids": TOKENS}
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        converted = attnzoo.convert(attnzoo.swap(model, "flash"), "bert")
        assert torch.equal(converted(**inputs).last_hidden_state, expected)
    assert getattr(converted.config, "attnzoo", None) is None


REFUSED = {
    "another mechanism": (attnzoo.AttentionSpec("linear"), "qwen2", "linear is not softmax"),
    "first tokens": (attnzoo.AttentionSpec("flash", window=W, num_sinks=2), "qwen2", "num_sinks=2"),
    "global tokens": (attnzoo.AttentionSpec("longformer", num_global=1), "qwen2", "global tokens"),
    "dilation": (attnzoo.AttentionSpec("longformer", dilation=2), "qwen2", "dilated"),
    "two windows": (
        attnzoo.AttentionSpec("flash", window=4, layers={"0": "flash:window=5"}),
        "qwen2",
        r"windows of 4, 5 tokens\. No stock class of the table can",
    ),
    "no windows": (SOME, "llama", "no windows. Classes that can: ministral, granite_swa, qwen2$"),
    "all or none": (SOME, "mistral", "some layers of the model have none. Classes that can: min"),
    "norms of heads": (FULL, "qwen3", "weights of llama. Classes that can: llama, mistral"),
    "no need": (FULL, "granite_swa", "this one has none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_class_cannot_hold_is_refused(name):
    spec, to, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        attnzoo.convert(model_of("llama"), to, spec)


def test_a_longformer_window_is_a_sliding_window():
    swapped = attnzoo.swap(model_of("llama"), "longformer", window=W)
    converted = attnzoo.convert(swapped, "mistral")
    torch.testing.assert_close(logits(converted), logits(swapped), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "to", "message"),
    [
        ({"attention_bias": True}, "qwen2", "attention_bias"),
        ({"mlp_bias": True}, "ministral", "mlp_bias"),
        ({"head_dim": 6}, "qwen2", "heads of 6 features"),
    ],
)
def test_biases_and_sizes_that_a_class_lacks_are_refused(changes, to, message):
    model = model_of("llama", **changes)
    with pytest.raises(UnsupportedError, match=message):
        attnzoo.convert(model, to, SOME)
    converted = attnzoo.convert(model, "granite_swa", SOME)
    torch.testing.assert_close(logits(converted), logits(model), rtol=1e-4, atol=1e-4)


def test_scaled_positions_move_or_are_refused():
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    model = model_of("llama", rope_parameters=scaled)
    converted = attnzoo.convert(attnzoo.swap(model, SOME), "granite_swa")
    torch.testing.assert_close(logits(converted), logits(model), rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedError, match="RoPE of type 'linear'"):
        attnzoo.convert(model_of("qwen3", rope_parameters=scaled), "mellum", SOME)


def test_wrong_weights_are_found_before_they_are_returned(monkeypatch):
    def scaled(state, *args):
        return {k: x * 1.01 if "k_proj" in k else x for k, x in state.items()}

    monkeypatch.setattr(module, "other_weights", scaled)
    with pytest.raises(UnsupportedError, match="computes other logits"):
        attnzoo.convert(model_of("llama"), "mistral", ALL)


def test_wrong_windows_are_found_before_they_are_returned(monkeypatch):
    monkeypatch.setattr(module, "_set_windows", lambda *args: None)
    with pytest.raises(UnsupportedError, match="would have the windows"):
        attnzoo.convert(model_of("llama"), "ministral", SOME)


def test_an_unknown_class_is_refused_with_those_that_there_are():
    with pytest.raises(SpecError, match=r"Did you mean .*Classes for this llama: llama, mi"):
        attnzoo.convert(model_of("llama"), "qwen_2")


def test_pruned_heads_are_refused():
    model = model_of("llama")
    attnzoo.prune_heads(model, {"model.layers.0.self_attn": [0, 1]})
    with pytest.raises(SpecError, match="pruned heads"):
        attnzoo.convert(model, "llama")


def test_every_class_says_what_engines_do_with_its_windows():
    for entry in classes_for("llama") + classes_for("qwen3"):
        assert entry.windows is Windows.NONE or entry.engines.keys() == {"vllm", "llama.cpp"}


def test_the_page_has_every_class():
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text("utf-8")
    table = page.partition("| `--to` |")[2].partition('"Right" means')[0]
    missing = [name for name in STOCK_CLASSES if f"`{name}`" not in table]
    assert not missing
    for entry in STOCK_CLASSES.values():
        if entry.engines and entry.family != "qwen3":  # as qwen2
            (row,) = (x for x in table.splitlines() if x.startswith(f"| `{entry.family}` |"))
            assert row.endswith("| " + " | ".join(entry.engines.values()) + " |")
            assert all(f"`{name}`" in row for name in entry.takes)


def save(model, folder):
    from attnzoo.evaluation.models import embedded_model_path

    model.save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(folder)
    card = "---\nlicense: mit\nlanguage: de\ntags: [x]\n---\n# Mine\n"
    (folder / "README.md").write_text(card)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code


def generate_elsewhere(fresh_python, folder, *missing):
    """Return what a saved model generates after TOKENS in a process that lacks some packages."""
    program = (
        f"import sys\nsys.modules |= dict.fromkeys({missing!r})\nimport torch, transformers\n"
        f"m = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        f"x = torch.tensor({TOKENS.tolist()})\n"
        "print(m.generate(x, max_new_tokens=8, do_sample=False).tolist())"
    )
    done = fresh_python(program, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_command(tmp_path, monkeypatch, capsys, fresh_python):
    """The result runs where attnzoo cannot be imported, and its card names the engines."""
    source, plan, out = tmp_path / "source", tmp_path / "plan.json", tmp_path / "out"
    model = model_of("llama", vocab_size=384)
    save(model, source)
    plan.write_text(json.dumps({"spec": SOME.to_dict()}))
    given = ("convert", source, "--plan", plan, "--output-dir", out)
    assert run(monkeypatch, *given, "--to", "llama") == 2
    assert "Classes that can" in capsys.readouterr().err
    assert not out.exists()
    assert run(monkeypatch, *given, "--to", "granite_swa") == 0
    assert "window 5, full, window 5" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["GraniteSWAForCausalLM"]
    assert "attnzoo" not in json.dumps(config)
    card = (out / "README.md").read_text()
    assert "license: mit" in card
    assert "Mine" not in card
    assert "| 0 | the latest 5 keys |" in card
    assert "| llama.cpp b11549 | right |" in card
    expected = attnzoo.swap(model, SOME).generate(TOKENS, max_new_tokens=8, do_sample=False)
    assert generate_elsewhere(fresh_python, out, "attnzoo") == expected.tolist()


def test_a_swapped_folder_has_its_own_plan(tmp_path):
    source = tmp_path / "source"
    save(attnzoo.swap(model_of("llama", vocab_size=384), SOME), source)
    with pytest.raises(SpecError, match="has its own plan"):
        convert_files(source, "ministral", tmp_path / "out", SOME)
    assert convert_files(source, "granite_swa", tmp_path / "out")[1] == "full"


def test_a_class_whose_tokenizer_would_be_another_is_refused(tmp_path):
    source = tmp_path / "source"
    save(attnzoo.swap(model_of("llama", vocab_size=384), SOME), source)
    with pytest.raises(UnsupportedError, match="Beside a qwen2 model, transformers loads"):
        convert_files(source, "qwen2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_vllm_can_see_that_some_layers_have_windows():
    """Its own class ignores `layer_types`, but refuses these two numbers if they differ."""
    config = attnzoo.convert(model_of("qwen3"), "qwen3", SOME).config
    assert config.max_window_layers != config.num_hidden_layers
