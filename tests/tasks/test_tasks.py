import json
from dataclasses import replace

import pytest
import torch

from attnzoo.errors import AttnzooError, SpecError
from attnzoo.evaluation.results import FILE
from attnzoo.spec import AttentionSpec
from attnzoo.tasks.recall import IGNORED, SYMBOLS, TASKS, TRIGGER, find_task
from attnzoo.tasks.run import (
    SeedStatistics,
    TaskConfig,
    hashing_specs,
    losses,
    make_model,
    make_optimizers,
    run_tasks,
    sizes_at,
    tabulate,
    tabulate_hash_rounds,
    train,
)


def draw(name, count=8, size=None, seed=0):
    task = find_task(name)
    generator = torch.Generator().manual_seed(seed)
    return task.draw(count, size or task.train_sizes[-1], generator)


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_seeded_and_in_the_vocabulary(name):
    task, rows = find_task(name), draw(name)
    again, other = draw(name), draw(name, seed=1)
    assert torch.equal(rows.tokens, again.tokens)
    assert torch.equal(rows.labels, again.labels)
    assert not torch.equal(rows.tokens, other.tokens)
    assert 0 <= rows.tokens.min() <= rows.tokens.max() < task.vocabulary
    labels = rows.labels[rows.labels != IGNORED]
    assert len(labels) >= 8
    assert 0 <= labels.min() <= labels.max() < task.vocabulary


@pytest.mark.parametrize(("name", "size"), [("mqar", 8), ("mqar64", 64)])
def test_mqar_asks_for_the_value_after_the_key(name, size):
    rows = draw(name, size=size)
    for tokens, labels in zip(rows.tokens.tolist(), rows.labels.tolist(), strict=True):
        pairs = dict(zip(tokens[: 2 * size : 2], tokens[1 : 2 * size : 2], strict=True))
        assert len(pairs) == size
        labelled = [i for i, label in enumerate(labels) if label != IGNORED]
        assert labelled == list(range(2 * size, 4 * size, 2))
        assert all(labels[i] == pairs[tokens[i]] == tokens[i + 1] for i in labelled)


def test_duplication_asks_for_the_word():
    rows = draw("duplication", size=15)
    for tokens, labels in zip(rows.tokens.tolist(), rows.labels.tolist(), strict=True):
        assert tokens[:16] == tokens[16:]
        assert labels[16:31] == tokens[1:16]
        assert set(labels[:16]) == {IGNORED}
        assert labels[31] == IGNORED


def test_induction_asks_for_what_came_after_the_trigger():
    rows = draw("induction", size=16, count=64)
    for tokens, labels in zip(rows.tokens.tolist(), rows.labels.tolist(), strict=True):
        first = tokens.index(TRIGGER)
        assert tokens[-1] == TRIGGER
        assert first < 14
        assert labels[-1] == tokens[first + 1]
        assert tokens.count(TRIGGER) == 2


@pytest.fixture
def few(monkeypatch):
    """Evaluate on a few rows, because these tests do not measure quality."""
    monkeypatch.setattr("attnzoo.tasks.run.TEST_ROWS", 4)
    monkeypatch.setattr("attnzoo.tasks.run.TEST_BATCH", 4)


def test_the_same_seed_is_the_same_model_and_the_same_rows_for_all(few):
    task = replace(find_task("induction"), batch=16)
    flash, linear = AttentionSpec("flash"), AttentionSpec("linear")
    weights = [make_model(task, spec, 3).state_dict() for spec in (flash, linear)]
    assert weights[0].keys() == weights[1].keys()
    for name, x in weights[0].items():
        assert torch.equal(x, weights[1][name]), name
    state = torch.random.get_rng_state()
    first = train(task, flash, seed=3, steps=3)[1]
    second = train(task, flash, seed=3, steps=3)[1]
    assert (first.accuracy, first.loss) == (second.accuracy, second.loss)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_layer_has_no_positions():
    """For one layer, the tokens before those of the convolution are an unordered set."""
    task = find_task("induction")
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
    model = make_model(find_task("induction"), AttentionSpec("flash"), 0)
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
        [names[id(p)] for group in one.param_groups for p in group["params"]]
        for one in make_optimizers(model)
    )
    assert sorted(muon + adamw) == sorted(names.values())
    assert len(muon) == 2 * 7  # four projections and three of the MLP
    assert not [name for name in muon if "attnzoo" in name]


def test_losses_are_of_what_is_asked():
    task = find_task("mqar")
    model = make_model(task, AttentionSpec("flash"), 0)
    rows = draw("mqar", size=8)
    found, _ = losses(model, rows)
    logits = model(rows.tokens).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(
        logits, rows.labels.flatten(), ignore_index=IGNORED
    )
    assert len(found) == 64
    torch.testing.assert_close(found.mean(), expected)


def test_sizes_join_one_by_one():
    task = find_task("mqar")
    assert sizes_at(task, 0) == sizes_at(task, 0.29) == (4,)
    assert sizes_at(task, 0.5) == (4, 8)
    assert sizes_at(task, 0.6) == (4, 8, 16)
    assert sizes_at(task, 0.8) == sizes_at(task, 1) == (4, 8, 16, 32)


def test_runs_are_saved_and_resumed(tmp_path, monkeypatch, few):
    specs = [AttentionSpec("flash"), *hashing_specs()[:1]]
    plan = TaskConfig(task="duplication", specs=specs, seeds=1, steps=1, out=tmp_path)
    rows = run_tasks(plan)
    assert [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()] == rows
    monkeypatch.setattr("attnzoo.tasks.run.train", None)  # a call would raise an error
    assert run_tasks(plan) == rows
    table = tabulate(find_task("duplication"), rows)
    assert table.columns == ["attention", "15 symbols", "31 symbols", "63 symbols", "s per run"]
    assert [row[0] for row in table.rows] == [
        "flash",
        "reformer num_hashes 1 chunk_size 16 window 8",
    ]
    rounds = tabulate_hash_rounds(rows)
    assert rounds.columns[1:] == [f"evaluated with {n}" for n in (1, 2, 4, 8)]
    assert len(rounds.rows) == 1


def test_spread():
    assert str(SeedStatistics(values=(0.9, 1.0, 0.95))) == "95 ± 5"


def test_invalid_arguments_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("attnzoo.tasks.run.train", None)
    out = tmp_path / "out"
    with pytest.raises(SpecError, match="Did you mean 'mqar'"):
        run_tasks(TaskConfig(task="mqra", out=out))
    with pytest.raises(SpecError, match="1 or more"):
        run_tasks(TaskConfig(task="mqar", seeds=0, out=out))
    with pytest.raises(AttnzooError, match="window"):
        run_tasks(TaskConfig(task="mqar", specs=[AttentionSpec("linear", window=0)], out=out))
    assert not out.exists()
    out.mkdir()
    (out / FILE).write_text("{")
    with pytest.raises(SpecError, match="truncated"):
        run_tasks(TaskConfig(task="mqar", out=out))


@pytest.mark.exhaustive
def test_exact_attention_learns_to_look_back_and_a_short_window_does_not():
    task = replace(find_task("induction"), train_sizes=(16,), test_sizes=(16,), batch=64)
    found = {
        name: train(task, AttentionSpec(name, **options), seed=0, steps=200)[1].accuracy[16]
        for name, options in (("flash", {}), ("longformer", {"window": 2}))
    }
    assert found["flash"] > 0.9
    assert found["longformer"] < 0.5
