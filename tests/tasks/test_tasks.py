import json
import math
from dataclasses import replace

import pytest
import torch

from attnzoo.errors import AttnzooError, SpecError
from attnzoo.evaluation.results import FILE
from attnzoo.spec import AttentionSpec
from attnzoo.tasks import (
    IGNORED,
    SYMBOLS,
    TASKS,
    TaskOptimizer,
    evaluate,
    find_task,
    losses,
    make_model,
    over_seeds,
    run_tasks,
    sizes_at,
    tabulate,
    train,
)


def draw(name, count=8, size=None, seed=0):
    task = find_task(name)
    generator = torch.Generator().manual_seed(seed)
    return task.draw(count, size or task.train_sizes[-1], generator)


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_seeded_and_in_the_vocabulary(name):
    task, (tokens, labels) = find_task(name), draw(name)
    again, other = draw(name), draw(name, seed=1)
    assert torch.equal(tokens, again[0])
    assert torch.equal(labels, again[1])
    assert not torch.equal(tokens, other[0])
    assert 0 <= tokens.min() <= tokens.max() < task.vocabulary
    targets = labels[labels != IGNORED]
    assert 0 <= targets.min() <= targets.max() < task.vocabulary


def test_mqar_asks_for_the_value_after_the_key():
    size = 8
    for tokens, labels in zip(*(x.tolist() for x in draw("mqar", size=size)), strict=True):
        pairs = dict(zip(tokens[: 2 * size : 2], tokens[1 : 2 * size : 2], strict=True))
        assert len(pairs) == size
        labelled = [i for i, label in enumerate(labels) if label != IGNORED]
        assert labelled == list(range(2 * size, 4 * size, 2))
        assert all(labels[i] == pairs[tokens[i]] == tokens[i + 1] for i in labelled)


def test_duplication_asks_for_the_word():
    for tokens, labels in zip(*(x.tolist() for x in draw("duplication", size=15)), strict=True):
        assert tokens[:16] == tokens[16:]
        assert labels[16:31] == tokens[1:16]
        assert set(labels[:16]) == {IGNORED}
        assert labels[31] == IGNORED


@pytest.fixture
def few(monkeypatch):
    """Evaluate on a few rows, because these tests do not measure quality."""
    monkeypatch.setattr("attnzoo.tasks.TEST_ROWS", 4)
    monkeypatch.setattr("attnzoo.tasks.TEST_BATCH", 4)


def test_the_same_seed_is_the_same_model_and_the_same_rows_for_all(few, tmp_path):
    task = replace(find_task("mqar"), batch=16)
    flash, linear = AttentionSpec("flash"), AttentionSpec("linear")
    weights = [make_model(task, spec, 3).state_dict() for spec in (flash, linear)]
    assert weights[0].keys() == weights[1].keys()
    for name, x in weights[0].items():
        assert torch.equal(x, weights[1][name]), name
    state = torch.random.get_rng_state()
    (one, loss), (other, again) = (
        train(task, flash, seed=3, steps=3, out=tmp_path) for _ in range(2)
    )
    assert (loss, evaluate(one, task)) == (again, evaluate(other, task))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not list(tmp_path.iterdir())


def test_training_is_that_of_a_plain_loop(tmp_path):
    """The rates of both optimizers follow the schedule, and gradients are clipped."""
    task, steps = replace(find_task("duplication"), batch=6), 8
    trained, _ = train(task, AttentionSpec("flash"), seed=2, steps=steps, out=tmp_path)
    model, generator = make_model(task, AttentionSpec("flash"), 2), torch.Generator()
    muon, adamw = TaskOptimizer(model).both
    generator.manual_seed(1002)
    for step in range(steps):
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = (
            rate * (0.5 + 0.5 * math.cos(math.pi * step / steps)) for rate in (0.02, 3e-3)
        )
        sizes = sizes_at(task, step / steps)
        size = sizes[step % len(sizes)]
        model.zero_grad()
        losses(model, *task.draw(6 * 15 // size, size, generator))[0].mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, trained.state_dict()[name], rtol=0, atol=1e-6, msg=name)


def test_a_layer_has_no_positions():
    """For one layer, the tokens before those of the convolution are an unordered set."""
    task = find_task("mqar")
    model = make_model(task, AttentionSpec("flash"), 0).eval()
    model.model.layers = model.model.layers[:1]
    tokens = torch.randint(SYMBOLS, (1, 12), generator=torch.Generator().manual_seed(0))
    moved = tokens[:, [3, 4, 5, 6, 0, 1, 2, 7, 8, 9, 10, 11]]
    alike, other = (model.model(x).last_hidden_state[0, -1] for x in (tokens, moved))
    assert (alike - other).abs().max() > 0  # the convolution at the seams
    model.model.embed_tokens.convolution.weight.data.zero_()
    alike, other = (model.model(x).last_hidden_state[0, -1] for x in (tokens, moved))
    torch.testing.assert_close(alike, other)


def test_the_convolution_is_causal():
    model = make_model(find_task("mqar"), AttentionSpec("flash"), 0)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    later = tokens.clone()
    later[:, 5] = 1
    changed = (model.model.embed_tokens(tokens) != model.model.embed_tokens(later)).any(-1)[0]
    assert changed.tolist() == [False] * 5 + [True] * 3  # the token and the two after it


def test_muon_has_the_models_own_matrices_and_nothing_that_a_backend_adds():
    spec = AttentionSpec("gated_linear", gate="gla", feature_map="hedgehog")
    model = make_model(find_task("mqar"), spec, 0)
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = (
        [names[id(p)] for p in group["params"]] for group in TaskOptimizer(model).param_groups
    )
    assert sorted(muon + adamw) == sorted(names.values())
    assert len(muon) == 2 * 7  # four projections and three of the MLP
    assert not [name for name in muon if "attnzoo" in name]


def test_losses_are_of_what_is_asked():
    model = make_model(find_task("mqar"), AttentionSpec("flash"), 0)
    tokens, labels = draw("mqar", size=8)
    found, _ = losses(model, tokens, labels)
    logits = model(tokens).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    assert len(found) == 64
    torch.testing.assert_close(found.mean(), expected)


def test_sizes_join_one_by_one():
    task = find_task("mqar")
    assert sizes_at(task, 0) == sizes_at(task, 0.29) == (4,)
    assert sizes_at(task, 0.5) == (4, 8)
    assert sizes_at(task, 0.6) == (4, 8, 16)
    assert sizes_at(task, 0.8) == sizes_at(task, 1) == (4, 8, 16, 32)


def test_runs_are_saved_and_resumed(tmp_path, monkeypatch, few):
    specs = [AttentionSpec("flash"), AttentionSpec("reformer", chunk_size=16)]
    options = {"specs": specs, "seeds": 1, "steps": 1}
    rows = run_tasks("duplication", tmp_path, **options)
    assert [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()] == rows
    monkeypatch.setattr("attnzoo.tasks.train", None)  # a call would raise an error
    assert run_tasks("duplication", tmp_path, **options) == rows
    table = tabulate(find_task("duplication"), rows)
    assert table.columns == ["attention", "15 symbols", "31 symbols", "63 symbols", "s per run"]
    assert [row[0] for row in table.rows] == ["flash", "reformer chunk_size 16"]
    assert over_seeds((0.9, 1.0, 0.95)) == "95 ± 5"


def test_a_model_that_diverges_has_no_loss(tmp_path, monkeypatch, few):
    monkeypatch.setattr("attnzoo.tasks.ADAMW_LR", 1e30)
    options = {"specs": [AttentionSpec("flash")], "seeds": 1, "steps": 3}
    (row,) = run_tasks("duplication", tmp_path, **options)
    assert row["loss"] is None


def test_invalid_arguments_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("attnzoo.tasks.train", None)
    out = tmp_path / "out"
    with pytest.raises(SpecError, match="Did you mean 'mqar'"):
        run_tasks("mqra", out)
    with pytest.raises(SpecError, match="1 or more"):
        run_tasks("mqar", out, seeds=0)
    with pytest.raises(AttnzooError, match="window"):
        run_tasks("mqar", out, specs=[AttentionSpec("linear", window=0)])
    assert not out.exists()


@pytest.mark.exhaustive
def test_exact_attention_learns_to_look_back_and_a_short_window_does_not(tmp_path):
    task = replace(find_task("duplication"), train_sizes=(15,), test_sizes=(15,), batch=64)
    found = {}
    for name, options in (("flash", {}), ("longformer", {"window": 2})):
        spec = AttentionSpec(name, **options)
        model, _ = train(task, spec, seed=0, steps=200, out=tmp_path)
        found[name] = evaluate(model, task)[15]
    assert found["flash"] > 0.9
    assert found["longformer"] < 0.5
