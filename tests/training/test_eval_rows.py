"""Rows for evaluation: where they begin."""

import itertools

import datasets
import torch

from attnzoo.evaluation.quality import evaluate_rows
from attnzoo.evaluation.rows import Rows
from attnzoo.training.data import pack
from attnzoo.training.evaluator import rows_to_eval_batch, select_rows


class Words:
    """A tokenizer of one token per word, a number."""

    eos_token_id = 1

    def __call__(self, texts, **_):
        return {"input_ids": [[int(x) for x in text.split()] for text in texts]}


def documents(*lengths):
    """Documents whose tokens are 1000 times the document's number plus the position."""
    texts = [" ".join(str(1000 * (n + 1) + i) for i in range(x)) for n, x in enumerate(lengths)]
    return pack(datasets.Dataset.from_dict({"text": texts}), Words(), 32)


def test_rows_begin_with_documents():
    rows = documents(100, 75, 50, 90)
    chosen = select_rows(rows, 4)
    tokens, positions = chosen.tokens, chosen.positions
    assert tokens[:, 0].tolist() == [1000, 2000, 3000, 4000]
    assert tokens[1].tolist() == list(range(2000, 2032))
    assert torch.equal(positions, torch.arange(32).expand(4, -1))
    batch = rows_to_eval_batch(rows, 4)
    assert torch.equal(batch.rows.tokens, tokens)
    assert not batch.rows.is_packed


def test_other_rows_are_spread_over_the_text_and_do_not_overlap():
    rows = documents(200, 200, 200)
    flat = rows.tokens.flatten().tolist()
    tokens = select_rows(rows, 9).tokens
    firsts = [flat.index(x) for x in tokens[:, 0].tolist()]
    assert {0, 201, 402} <= set(firsts)
    assert all(b - a >= 32 for a, b in itertools.pairwise(firsts))
    assert firsts[-1] > 450
    assert len(select_rows(rows, 100)) <= rows.tokens.numel() // 32


def test_short_documents_restart_positions(model):
    rows = documents(*[12] * 20)
    chosen = select_rows(rows, 3)
    tokens, positions = chosen.tokens, chosen.positions
    assert (tokens[:, 0] % 1000 == 0).all()
    for row, place in zip(tokens, positions, strict=True):
        starts = (row % 1000 == 0) & (row >= 1000)
        assert torch.equal(place == 0, starts)
    short = Rows(
        tokens=rows.tokens.long() % 300 + 3,
        positions=rows.positions,
        bytes_per_token=1.0,
        starts=rows.starts,
    )
    batch = rows_to_eval_batch(short, 3)
    assert batch.rows.is_packed
    assert (batch.rows.targets[positions == 0] == -100).all()
    found = evaluate_rows(model, batch)
    losses = []  # each document alone
    for row, place in zip(batch.rows.tokens, positions, strict=True):
        bounds = [*(place == 0).nonzero()[:, 0].tolist(), 32]
        for first, last in itertools.pairwise(bounds):
            one = row[None, first:last]
            logits = model(one).logits.detach()[0, :-1].double().log_softmax(-1)
            losses.append(-logits.gather(-1, one[0, 1:, None])[:, 0])
    exact = float(torch.cat(losses).mean()) / torch.log(torch.tensor(2.0)).item()
    assert abs(found.loss - exact) < 1e-4
    assert abs(sum(found.loss_rows) / 3 - found.loss) < 1e-5
