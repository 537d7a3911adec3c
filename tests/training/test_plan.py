"""Plans: measurements, candidates that are left out, and the choice under each limit."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import ConfigError, SpecError, UnsupportedError
from attnzoo.evaluation.equal_memory import EqualWindow, equal_window
from attnzoo.evaluation.margins import speedup
from attnzoo.evaluation.rows import Rows
from attnzoo.training import plan as module
from attnzoo.training.plan import (
    CacheLimit,
    best_candidate,
    count_exact_layers,
    make_plan,
    read_plan,
    window_candidates,
)
from attnzoo.training.planner import SwapPlanner, beside_window, judge, weights_fingerprint
from attnzoo.training.recover import recover
from tests.training.short_runs import arguments

TOKENS = torch.randint(3, 300, (6, 40), generator=torch.Generator().manual_seed(2))
ROWS = Rows.of_documents(TOKENS)
CANDIDATES = ["longformer:window=16", "linear"]
TOKEN = 2 * 2 * 8 * 4  # bytes of a token in the cache of one layer


@torch.no_grad()
def test_measurements_equal_their_definition(model):
    logits = model(TOKENS).logits
    exact = logits.log_softmax(-1)
    first, second = SwapPlanner(model, ROWS).measure([0, 1], CANDIDATES)
    for measure, number in ((first, 0), (second, 1)):
        assert measure["layer"] == number
        for name in CANDIDATES:
            attnzoo.swap(model, attnzoo.AttentionSpec("flash", layers={str(number): name}))
            swapped = model(TOKENS).logits.log_softmax(-1)
            attnzoo.restore(model)
            kl = (exact.exp() * (exact - swapped)).sum(-1).mean()
            assert measure["alone"][name] == pytest.approx(float(kl), rel=1e-3, abs=1e-6)
    assert torch.equal(model(TOKENS).logits, logits)
    assert not hasattr(model.config, "attnzoo")


def test_count_exact_layers():
    assert [count_exact_layers(x, 8) for x in (0, 0.25, 0.5, 1, 3, 8)] == [0, 2, 4, 1, 3, 8]
    for wrong in (-1, 9, 1.5):
        with pytest.raises(ConfigError, match="must be a fraction of the layers"):
            count_exact_layers(wrong, 8)


def test_a_plan_is_of_one_models_weights(saved, text, tmp_path):
    plan = make_plan(saved, ROWS, CANDIDATES, keep_softmax=1)
    plan.write(tmp_path / "plan.json")
    spec, weights = read_plan(tmp_path / "plan.json")
    assert spec == plan.spec
    assert [spec.for_layer(n).backend for n in (0, 1)].count("flash") == 1
    model = hf.AutoModelForCausalLM.from_pretrained(saved)
    assert weights == weights_fingerprint(model)
    with pytest.raises(SpecError, match="made for a model with other weights"):
        recover(saved, spec, [text], arguments(tmp_path / "other"), weights="0123")
    (tmp_path / "bare.json").write_text(json.dumps(spec.to_dict()))
    assert read_plan(tmp_path / "bare.json") == (spec, None)


def test_weights_fingerprint(model):
    name = weights_fingerprint(model)
    attnzoo.swap(model, "linear", feature_map="hedgehog")
    assert weights_fingerprint(model) == name  # parameters of backends are left out
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert weights_fingerprint(model) != name
    with torch.no_grad():  # the same values in another order
        model.model.layers[1].mlp.up_proj.weight[0, 0] -= 1
        restored = weights_fingerprint(model)
        rows = model.model.layers[1].mlp.up_proj.weight
        rows.copy_(rows.flip(0).clone())
    assert weights_fingerprint(model) != restored


def long_rows(length, count=4):
    generator = torch.Generator().manual_seed(5)
    return Rows.of_documents(torch.randint(3, 300, (count, length), generator=generator))


def windows_of(path, names, length):
    specs = {name: attnzoo.AttentionSpec(name) for name in names}
    return {name: equal_window(path, spec, length) for name, spec in specs.items()}


def test_candidates_that_rows_cannot_judge_are_left_out(model, saved):
    """A window of 32 reads every key of 32 tokens, and half of the tokens of 48 lose nothing."""
    wide, linear = "longformer:window=32", "linear"
    equal = windows_of(saved, [wide, linear], 4096)
    for length, reason in (
        (32, "reads every key of rows of 32 tokens, and its loss there is 0"),
        (48, "only 64 of 192 tokens of rows of 48 tokens have keys that it does not read"),
    ):
        found, left_out = judge(SwapPlanner(model, long_rows(length)), equal, None)
        assert list(found) == [linear]
        assert reason in left_out[wide]
        assert "measure it on rows of" in left_out[wide]
    only = {wide: equal[wide]}
    assert not judge(SwapPlanner(model, long_rows(64)), only, None)[1]
    with pytest.raises(SpecError, match=r"No candidate is left to plan with\. longformer:win"):
        judge(SwapPlanner(model, long_rows(32)), only, None)


def test_candidates_that_save_nothing_are_left_out(model, saved, monkeypatch):
    lsh = "reformer:chunk_size=4,num_hashes=1"
    equal = windows_of(saved, [lsh, "linear"], 256)
    planner = SwapPlanner(model, long_rows(128))
    assert planner.speedup(lsh, 32).count == 6
    rounds = {"slow": [1.0, 1.1] * 3, "fast": [0.1, 0.11] * 3}
    for name, left in (("slow", {lsh}), ("fast", set())):
        same = speedup([1.0, 1.1] * 3, rounds[name])
        monkeypatch.setattr(planner, "speedup", lambda *x, found=same: found)
        assert set(judge(planner, equal, None)[1]) == left


def test_the_window_of_equal_memory_stands_beside_a_candidate(model, saved):
    planner = SwapPlanner(model, long_rows(64))
    equal = windows_of(saved, ["linear"], 1000)["linear"]
    found = beside_window(planner, "linear", equal)
    size = equal.widest
    assert size < 64
    assert found["exact_bytes"] == 2 * 1000 * TOKEN
    assert found["window"] == str(size)
    expected = planner.divergence(dict.fromkeys((0, 1), f"flash:window={size}"))
    assert sum(found["window_rows"]) / 4 == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("size", "kl", "winner"),
    [
        (None, [0.2] * 8, "its cache is as large as softmax's"),
        (900, [0.2] * 8, "the rows are not longer than the window (900)"),
        (28, [0.2, 0.3] * 4, "no difference measured"),
        (28, [0.01] * 8, "the window"),
        (28, [0.4] * 8, "the candidate"),
    ],
)
def test_the_winner_at_equal_memory_is_named(size, kl, winner):
    planner = SimpleNamespace(numbers=[0, 1], rows=ROWS)
    planner.row_divergences = lambda chosen: [0.19, 0.21] * 4 if chosen[0] == "delta" else kl
    equal = EqualWindow(length=4096, windows={0: size, 1: size}, swap_bytes=1, exact_bytes=2)
    assert beside_window(planner, "delta", equal)["winner"] == winner


def test_of_equally_good_candidates_the_cheapest_is_chosen():
    def best(near, linear):
        rows = {"near": near, "linear": linear}
        alone = {name: sum(x) / len(x) for name, x in rows.items()}
        return best_candidate({"alone": alone, "alone_rows": rows}, {"near": 10, "linear": 5})

    assert best([0.1, 0.2, 0.3], [0.11, 0.19, 0.31]) == "linear"
    assert best([0.1, 0.2, 0.3], [0.21, 0.3, 0.41]) == "near"


def test_layers_get_smaller_candidates_at_the_least_kl_per_byte():
    limit = object.__new__(CacheLimit)
    limit.sizes = {x: {0: n, 1: n} for x, n in (("flash", 100), ("wide", 40), ("near", 10))}
    kl = {0: {"flash": 0, "wide": 0.1, "near": 0.5}, 1: {"flash": 0, "wide": 0.2, "near": 0.4}}
    for size, chosen in ((80, ["wide", "wide"]), (50, ["wide", "near"]), (20, ["near", "near"])):
        limit.size = size
        assert limit.shrink({0: "wide", 1: "wide"}, kl) == dict(enumerate(chosen))
    limit.size, limit.length = 19, 400
    with pytest.raises(ConfigError, match=r"smallest candidates use 20 bytes .* the limit of 19"):
        limit.check(["wide", "near"])


def test_one_window_that_changes_the_predictions_least(saved):
    """The oracle tries every size in every set of layers that fits."""
    length = 1000
    tokens = torch.randint(3, 259, (3, 100), generator=torch.Generator().manual_seed(0))
    rows, names = Rows.of_documents(tokens), [f"flash:window={n}" for n in (4, 16, 48)]
    limit = {"cache_bytes": TOKEN * (length + 20), "cache_length": length}
    plan = make_plan(saved, rows, names, **limit, one_for_all=True, target_length=length)
    planner = SwapPlanner(hf.AutoModelForCausalLM.from_pretrained(saved), rows)
    found = {}
    for size, layers in itertools.product((4, 16, 48), ([0], [1], [0, 1])):
        if length * (2 - len(layers)) + size * len(layers) <= length + 20:
            chosen = dict.fromkeys(layers, f"flash:window={size}")
            found[planner.divergence(chosen)] = chosen
    assert plan.chosen == found[min(found)]


def test_a_class_that_cannot_hold_windows_of_some_layers_is_refused():
    assert "flash:window=64" in window_candidates("llama", "granite_swa")
    with pytest.raises(UnsupportedError, match="give one of ministral, granite_swa, qwen2"):
        window_candidates("llama", "mistral")
    with pytest.raises(UnsupportedError, match="give one of qwen3"):
        window_candidates("qwen3", "granite_swa")


def test_a_plan_for_a_class_converts_without_another_option(
    saved, text, tmp_path, attnzoo_command, monkeypatch
):
    monkeypatch.setattr(module, "WINDOWS", (8, 48))
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    limit = ("--cache-bytes", TOKEN * 140, "--cache-length", 120, "--rows", 2)
    given = ("--data", text, "--max-length", 100, "--target-length", 120, "--output-file", plan)
    attnzoo_command("plan", saved, "--to", "granite_swa", *limit, *given)
    assert json.loads(plan.read_text())["spec"]["layers"]
    attnzoo_command("convert", saved, "--to", "granite_swa", "--plan", plan, "--output-dir", out)
    assert "sliding_attention" in hf.AutoConfig.from_pretrained(out).layer_types


def test_invalid_plans_are_refused(saved, tmp_path):
    with pytest.raises(SpecError, match="is not a plan"):
        read_plan(tmp_path / "absent.json")
    (tmp_path / "torn.json").write_text('{"spec": ')
    with pytest.raises(SpecError, match="is not a plan"):
        read_plan(tmp_path / "torn.json")
    with pytest.raises(SpecError, match="at least one candidate"):
        make_plan(saved, ROWS, [])
    with pytest.raises(ConfigError, match=r"target_length must be at most 16,777,216, .*got 100,0"):
        make_plan(saved, ROWS, CANDIDATES, target_length=100_000_000)
    model = hf.AutoModelForCausalLM.from_pretrained(saved)
    attnzoo.swap(model, "linear").save_pretrained(tmp_path / "swapped")
    with pytest.raises(SpecError, match="is already swapped; give the original model"):
        make_plan(tmp_path / "swapped", ROWS, CANDIDATES)
