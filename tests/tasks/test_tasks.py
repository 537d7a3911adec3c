import json
import math

import pytest
import torch

from attnzoo.errors import AttnzooError, SpecError
from attnzoo.evaluation.results import FILE
from attnzoo.spec import AttentionSpec
from attnzoo.tasks import (
    IGNORED,
    KEYS,
    TRAIN_SIZES,
    TaskOptimizer,
    draw,
    evaluate,
    losses,
    make_model,
    over_seeds,
    run_tasks,
    sizes_at,
    tabulate,
    train,
)


def rows(count=8, size=TRAIN_SIZES[-1], seed=0):
    return draw(count, size, torch.Generator().manual_seed(seed))


def test_rows_are_seeded_and_in_the_vocabulary():
    tokens, labels = rows()
    again, other = rows(), rows(seed=1)
    assert torch.equal(tokens, again[0])
    assert torch.equal(labels, again[1])
    assert not torch.equal(tokens, other[0])
    assert 0 <= tokens.min() <= tokens.max() < 2 * KEYS
    targets = labels[labels != IGNORED]
    assert 0 <= targets.min() <= targets.max() < 2 * KEYS


def test_a_row_asks_for_the_value_after_the_key():
    size = 8
    for tokens, labels in zip(*(x.tolist() for x in rows(size=size)), strict=True):
        pairs = dict(zip(tokens[: 2 * size : 2], tokens[1 : 2 * size : 2], strict=True))
        assert len(pairs) == size
        labelled = [i for i, label in enumerate(labels) if label != IGNORED]
        assert labelled == list(range(2 * size, 4 * size, 2))
        assert all(labels[i] == pairs[tokens[i]] == tokens[i + 1] for i in labelled)


@pytest.fixture
def few(monkeypatch):
    """Evaluate on a few rows, because these tests do not measure quality."""
    monkeypatch.setattr("attnzoo.tasks.TEST_ROWS", 4)
    monkeypatch.setattr("attnzoo.tasks.TEST_BATCH", 4)


def test_the_same_seed_is_the_same_model_and_the_same_rows_for_all(few, tmp_path, monkeypatch):
    monkeypatch.setattr("attnzoo.tasks.BATCH", 16)
    flash, linear = AttentionSpec("flash"), AttentionSpec("linear")
    weights = [make_model(spec, 3).state_dict() for spec in (flash, linear)]
    assert weights[0].keys() == weights[1].keys()
    for name, x in weights[0].items():
        assert torch.equal(x, weights[1][name]), name
    state = torch.random.get_rng_state()
    (one, loss), (other, again) = (train(flash, seed=3, steps=3, out=tmp_path) for _ in range(2))
    assert (loss, evaluate(one)) == (again, evaluate(other))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not list(tmp_path.iterdir())


def test_training_is_that_of_a_plain_loop(tmp_path, monkeypatch):
    """The rates of both optimizers follow the schedule, and gradients are clipped."""
    steps = 8
    monkeypatch.setattr("attnzoo.tasks.BATCH", 12)
    trained, _ = train(AttentionSpec("flash"), seed=2, steps=steps, out=tmp_path)
    model, generator = make_model(AttentionSpec("flash"), 2), torch.Generator()
    muon, adamw = TaskOptimizer(model).both
    generator.manual_seed(1002)
    for step in range(steps):
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = (
            rate * (0.5 + 0.5 * math.cos(math.pi * step / steps)) for rate in (0.02, 3e-3)
        )
        sizes = sizes_at(step / steps)
        size = sizes[step % len(sizes)]
        model.zero_grad()
        losses(model, *draw(12 * 4 // size, size, generator))[0].mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, trained.state_dict()[name], rtol=0, atol=1e-6, msg=name)


def test_a_layer_has_no_positions():
    """For one layer, the tokens before those of the convolution are an unordered set."""
    model = make_model(AttentionSpec("flash"), 0).eval()
    model.model.layers = model.model.layers[:1]
    tokens = torch.randint(2 * KEYS, (1, 12), generator=torch.Generator().manual_seed(0))
    moved = tokens[:, [3, 4, 5, 6, 0, 1, 2, 7, 8, 9, 10, 11]]
    alike, other = (model.model(x).last_hidden_state[0, -1] for x in (tokens, moved))
    assert (alike - other).abs().max() > 0  # the convolution at the seams
    model.model.embed_tokens.convolution.weight.data.zero_()
    alike, other = (model.model(x).last_hidden_state[0, -1] for x in (tokens, moved))
    torch.testing.assert_close(alike, other)


def test_the_convolution_is_causal():
    model = make_model(AttentionSpec("flash"), 0)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    later = tokens.clone()
    later[:, 5] = 1
    changed = (model.model.embed_tokens(tokens) != model.model.embed_tokens(later)).any(-1)[0]
    assert changed.tolist() == [False] * 5 + [True] * 3  # the token and the two after it


def test_muon_has_the_models_own_matrices_and_nothing_that_a_backend_adds():
    spec = AttentionSpec("gated_linear", gate="gla", feature_map="hedgehog")
    model = make_model(spec, 0)
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = (
        [names[id(p)] for p in group["params"]] for group in TaskOptimizer(model).param_groups
    )
    assert sorted(muon + adamw) == sorted(names.values())
    assert len(muon) == 2 * 7  # four projections and three of the MLP
    assert not [name for name in muon if "attnzoo" in name]


def test_losses_are_of_what_is_asked():
    model = make_model(AttentionSpec("flash"), 0)
    tokens, labels = rows(size=8)
    found, _ = losses(model, tokens, labels)
    logits = model(tokens).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    assert len(found) == 64
    torch.testing.assert_close(found.mean(), expected)


def test_sizes_join_one_by_one():
    assert sizes_at(0) == sizes_at(0.29) == (4,)
    assert sizes_at(0.5) == (4, 8)
    assert sizes_at(0.6) == (4, 8, 16)
    assert sizes_at(0.8) == sizes_at(1) == (4, 8, 16, 32)


def test_runs_are_saved_and_resumed(tmp_path, monkeypatch, few):
    specs = [AttentionSpec("flash"), AttentionSpec("reformer", chunk_size=16)]
    options = {"specs": specs, "seeds": 1, "steps": 1}
    rows = run_tasks(tmp_path, **options)
    assert [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()] == rows
    monkeypatch.setattr("attnzoo.tasks.train", None)  # a call would raise an error
    assert run_tasks(tmp_path, **options) == rows
    table = tabulate(rows)
    assert table.columns == ["attention", "8 pairs", "16 pairs", "32 pairs", "s per run"]
    assert [row[0] for row in table.rows] == ["flash", "reformer chunk_size 16"]
    assert over_seeds((0.9, 1.0, 0.95)) == "95 ± 5"


def test_a_model_that_diverges_has_no_loss(tmp_path, monkeypatch, few):
    monkeypatch.setattr("attnzoo.tasks.ADAMW_LR", 1e30)
    options = {"specs": [AttentionSpec("flash")], "seeds": 1, "steps": 3}
    (row,) = run_tasks(tmp_path, **options)
    assert row["loss"] is None


def test_invalid_arguments_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("attnzoo.tasks.train", None)
    out = tmp_path / "out"
    with pytest.raises(SpecError, match="1 or more"):
        run_tasks(out, seeds=0)
    with pytest.raises(AttnzooError, match="window"):
        run_tasks(out, specs=[AttentionSpec("linear", window=0)])
    assert not out.exists()


@pytest.mark.exhaustive
def test_exact_attention_learns_to_look_back_and_a_short_window_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("attnzoo.tasks.TRAIN_SIZES", (4,))
    monkeypatch.setattr("attnzoo.tasks.TEST_SIZES", (4,))
    found = {}
    for name, options in (("flash", {}), ("longformer", {"window": 2})):
        spec = AttentionSpec(name, **options)
        model, _ = train(spec, seed=0, steps=200, out=tmp_path)
        found[name] = evaluate(model)[4]
    assert found["flash"] > 0.9
    assert found["longformer"] < 0.5
