import json
from itertools import combinations

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.margins import speedup
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.evaluation.quality import make_eval_batch
from attnzoo.evaluation.rows import Rows
from attnzoo.training import plan as plan_module
from attnzoo.training.budget import layer_sizes
from attnzoo.training.candidates import forward_speedup
from attnzoo.training.plan import (
    LayerMeasure,
    Planner,
    count_exact_layers,
    make_plan,
    read_plan,
    weights_fingerprint,
)
from attnzoo.training.recover import recover
from tests.training.short_runs import arguments

TOKENS = torch.randint(3, 300, (6, 40), generator=torch.Generator().manual_seed(2))
ROWS = Rows.of_documents(TOKENS)
CANDIDATES = {
    "near": attnzoo.AttentionSpec("longformer", window=16),
    "linear": attnzoo.AttentionSpec("linear"),
}


@torch.no_grad()
def test_measurements_equal_their_definition(model):
    exact = model(TOKENS).logits.log_softmax(-1)
    planner = Planner(model, ROWS, CANDIDATES, window=5)
    first, second = planner.measure()
    for measure, alone, other in ((first, 0, 1), (second, 1, 0)):
        assert measure.layer == alone
        for name, spec in CANDIDATES.items():
            data = spec.default.to_dict()
            for found, number in ((measure.alone[name], alone), (measure.restored[name], other)):
                attnzoo.swap(model, attnzoo.AttentionSpec("flash", layers={str(number): data}))
                swapped = model(TOKENS).logits.log_softmax(-1)
                attnzoo.restore(model)
                kl = (exact.exp() * (exact - swapped)).sum(-1).mean()
                assert found == pytest.approx(float(kl), rel=1e-3, abs=1e-6)


def test_attention_beyond_the_window_and_entropy(model):
    attnzoo.swap(model, "softmax")
    weights = model(TOKENS, output_attentions=True, use_cache=False).attentions
    attnzoo.restore(model)
    statistics = Planner(model, ROWS, CANDIDATES, window=5).attention_statistics()
    for number, weight in enumerate(weights):
        beyond = [weight[:, :, t, : t - 4].sum(-1) for t in range(5, 40)]
        entropy = -(weight * weight.clamp(min=1e-30).log2()).sum(-1).mean()
        assert statistics[number][0] == pytest.approx(float(torch.stack(beyond).mean()), abs=1e-5)
        assert statistics[number][1] == pytest.approx(float(entropy), abs=1e-4)


def test_planner_restores_the_model(model):
    before = model(TOKENS).logits
    Planner(model, ROWS, CANDIDATES, window=5).measure()
    assert torch.equal(model(TOKENS).logits, before)
    assert not hasattr(model.config, "attnzoo")


def test_greedy_choice_is_optimal_for_the_embedded_model():
    """No other choice of as many exact layers has a smaller KL."""
    path = embedded_model_path()
    model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = make_eval_batch(path, None, rows=3, row_length=384).repeated
    candidates = {"window": attnzoo.AttentionSpec("flash", window=32)}
    planner = Planner(model, rows, candidates)
    measured = planner.measure()
    for kept in (1, 2):
        found = planner.divergence(planner.choose(measured, kept))
        every = [
            planner.divergence(dict.fromkeys(swapped, "window"))
            for swapped in combinations(range(4), 4 - kept)
        ]
        assert found == pytest.approx(min(every), rel=1e-6)
        assert found < 0.5 * max(every)


def test_count_exact_layers():
    assert [count_exact_layers(x, 8) for x in (0, 0.25, 0.5, 1, 3, 8)] == [0, 2, 4, 1, 3, 8]
    for wrong in (-1, 9, 1.5):
        with pytest.raises(ConfigError, match="must be a fraction of the layers"):
            count_exact_layers(wrong, 8)


def test_recovery_by_a_saved_plan(saved, text, tmp_path):
    plan = make_plan(saved, ROWS, CANDIDATES, keep_softmax=1, window=5)
    plan.write(tmp_path / "plan.json")
    spec, weights = read_plan(tmp_path / "plan.json")
    assert spec.to_dict() == plan.spec.to_dict()
    assert [spec.for_layer(n).backend for n in (0, 1)].count("flash") == 1
    args = arguments(tmp_path / "out", transfer_steps=0, max_steps=2)
    recover(saved, spec, [text], args, weights=weights)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.attnzoo == spec.to_dict(defaults=True)
    with pytest.raises(SpecError, match="made for a model with other weights"):
        recover(saved, spec, [text], arguments(tmp_path / "other"), weights="0123")
    (tmp_path / "bare.json").write_text(json.dumps(spec.to_dict()))
    assert read_plan(tmp_path / "bare.json")[1] is None


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


def test_candidates_that_rows_cannot_judge_are_left_out(model):
    """A window of 32 reads every key of 32 tokens, and half of the tokens of 48 lose nothing."""
    wide = attnzoo.AttentionSpec("longformer", window=32)
    for length, reason in (
        (32, "reads every key of rows of 32 tokens, and its loss there is 0"),
        (48, "only 64 of 192 tokens of rows of 48 tokens have keys that it does not read"),
    ):
        planner = Planner(model, long_rows(length), {"wide": wide, "near": CANDIDATES["linear"]})
        planner.judge(4096)
        assert list(planner.candidates) == ["near"]
        assert reason in planner.left_out["wide"]
        assert "measure it on rows of" in planner.left_out["wide"]
    planner = Planner(model, long_rows(64), {"wide": wide})
    planner.judge(4096)
    assert not planner.left_out
    with pytest.raises(
        SpecError, match=r"No candidate is left to plan with\. wide: it reads every"
    ):
        Planner(model, long_rows(32), {"wide": wide}).judge(4096)


def test_a_vacuous_plan_is_refused(saved):
    """Rows of 40 tokens cannot tell a window of 64 from softmax, whose KL there is 0."""
    candidates = {"longformer:window=64": attnzoo.AttentionSpec("longformer", window=64)}
    with pytest.raises(SpecError, match="rows of 81 tokens or more"):
        make_plan(saved, ROWS, candidates)


def test_candidates_that_save_nothing_are_left_out(model, monkeypatch):
    spec = attnzoo.AttentionSpec("reformer", chunk_size=4, num_hashes=1)
    candidates = {"lsh": spec, "near": CANDIDATES["linear"]}
    rounds = {"slow": [1.0, 1.1] * 3, "fast": [0.1, 0.11] * 3}
    for name, left in (("slow", {"lsh"}), ("fast", set())):
        same = speedup([1.0, 1.1] * 3, rounds[name])
        monkeypatch.setattr(plan_module, "forward_speedup", lambda *x, found=same: found)
        planner = Planner(model, long_rows(128), candidates)
        planner.judge(256)
        assert set(planner.left_out) == left
    assert forward_speedup(model, "flash", "flash", long_rows(64).tokens, 32).count == 6


def test_the_window_of_equal_memory_stands_beside_a_candidate(model):
    planner = Planner(model, long_rows(64), {"linear": CANDIDATES["linear"]})
    planner.judge(1000)
    (found,) = planner.summaries
    sizes = layer_sizes(planner, "linear", 1000), layer_sizes(planner, "flash", 1000)
    assert (found.cache_bytes, found.exact_bytes) == tuple(sum(x.values()) for x in sizes)
    assert found.window == found.cache_bytes * 1000 // found.exact_bytes < 64
    equal = Planner(
        model, long_rows(64), {"w": attnzoo.AttentionSpec("flash", window=found.window)}
    )
    assert sum(found.window_rows) / 4 == pytest.approx(equal.divergence({0: "w", 1: "w"}), rel=1e-4)
    assert found.winner() in ("the window", "the candidate", "no difference measured")


def test_of_equally_good_candidates_the_cheapest_is_chosen(model):
    planner = Planner(model, ROWS, CANDIDATES)
    planner.cache_bytes = {"near": 10, "linear": 5}

    def measure(near, linear):
        rows = {"near": near, "linear": linear}
        alone = {name: sum(x) / len(x) for name, x in rows.items()}
        return LayerMeasure(
            layer=0, beyond=0.0, entropy=0.0, alone=alone, restored=alone, alone_rows=rows
        )

    assert planner.best(measure([0.1, 0.2, 0.3], [0.11, 0.19, 0.31])) == "linear"
    assert planner.best(measure([0.1, 0.2, 0.3], [0.21, 0.3, 0.41])) == "near"


def test_invalid_plans_are_refused(model, tmp_path):
    with pytest.raises(SpecError, match="is not a plan"):
        read_plan(tmp_path / "absent.json")
    (tmp_path / "torn.json").write_text('{"spec": ')
    with pytest.raises(SpecError, match="is not a plan"):
        read_plan(tmp_path / "torn.json")
    with pytest.raises(SpecError, match="at least one candidate"):
        Planner(model, ROWS, {})
