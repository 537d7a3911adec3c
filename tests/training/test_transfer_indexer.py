"""Attention transfer of block_sparse's indexer: its own loss, frozen weights, and recovery."""

import copy
import warnings

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import UntrainedWarning
from attnzoo.training.recover import recover
from attnzoo.training.transfer import Transfer, extras, output_extras, swapped_layers
from tests.training.short_runs import arguments

IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))
INDEXER = {"score": "indexer", "window": 3, "top_k": 4, "block_size": 1, "num_sinks": 0}


@pytest.mark.parametrize("target", ["output", "attention"])
def test_steps_lower_the_divergence_and_freeze_the_model(model, target):
    attnzoo.swap(model, "block_sparse", **INDEXER)
    before = copy.deepcopy(model.state_dict())
    trained = extras(model)
    optimizer, losses = torch.optim.Adam(trained.values(), lr=0.02), []
    with Transfer(model, target=target) as transfer:
        for _ in range(25):
            model(IDS)
            loss = transfer.loss()
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is None for n, p in model.named_parameters() if n not in trained)
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    after = model.state_dict()
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert changed == set(trained)
    for backend in swapped_layers(model).values():
        assert backend.on_index is None


def test_padding_and_packed_rows_are_left_out(model):
    """The loss of rows with padding, or of sequences packed in one row, is that of each alone."""
    attnzoo.swap(model, "block_sparse", **INDEXER)
    with torch.no_grad():
        for p in extras(model).values():
            p.add_(0.3 * torch.randn_like(p))
    lengths, ids = (40, 25), IDS.clone()
    mask = torch.ones_like(ids)
    mask[1, : 40 - lengths[1]] = 0
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = torch.cat([ids[0], ids[1, 40 - lengths[1] :]])[None]
    found = []
    with Transfer(model) as transfer, torch.no_grad():
        for given in (
            {"input_ids": ids, "attention_mask": mask},
            {"input_ids": packed, "position_ids": positions},
            {"input_ids": ids[:1]},
            {"input_ids": ids[1:, 40 - lengths[1] :]},
        ):
            model(**given, use_cache=False)
            found.append(transfer.loss())
    padded, packed, first, second = found
    expected = (40 * first + 25 * second) / 65
    torch.testing.assert_close(padded, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.exhaustive
def test_recovery(saved, text, tmp_path):
    """Distillation trains the weights of the model, and no indexer."""
    logged = []
    steps = {"max_steps": 3, "weight_decay": 0.1}
    steps["eval_strategy"] = "no"  # five steps need not be better than none
    spec = attnzoo.AttentionSpec("block_sparse", **INDEXER)
    models = {}
    for train in ("extras", "lora"):
        args = arguments(tmp_path / train, **steps, train=train)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UntrainedWarning)  # the raw swap has no trained indexer
            results = recover(saved, spec, [text], args, log=logged.append)
        models[train] = hf.AutoModelForCausalLM.from_pretrained(tmp_path / train)
        assert [*results["losses"]] == (
            ["transfer"] if train == "extras" else ["transfer", "distil"]
        )
    assert sum("distillation is skipped" in line for line in logged) == 1
    frozen, distilled = (model.state_dict() for model in models.values())
    stock = hf.AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert all(torch.equal(frozen[name], x) for name, x in stock.items())
    assert not all(torch.equal(distilled[name], x) for name, x in stock.items())
    indexers = extras(models["lora"])
    assert all(torch.equal(frozen[name], distilled[name]) for name in indexers)
    assert all(b.indexer.is_trained for b in swapped_layers(models["lora"]).values())
    assert indexers
    assert not output_extras(models["lora"])
