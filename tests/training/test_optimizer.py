"""Muon for matrices beside AdamW for the rest."""

import copy

import pytest
import torch
from torch import nn

import attnzoo
from attnzoo.errors import ConfigError
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.optimizer import MuonWithAdamW, make_optimizer
from attnzoo.training.transfer import extras


def groups_of(model, use_muon):
    return [{"params": list(model.parameters()), "lr": 1e-2, "use_muon": use_muon}]


def train(models, optimizer, steps, first=0):
    for step in range(first, first + steps):
        torch.manual_seed(step)
        x = torch.randn(3, 4)
        optimizer.zero_grad()
        models[1](models[0](x).tanh()).square().sum().backward()
        optimizer.step()


def test_equals_both_optimizers_and_continues_from_its_saved_state():
    torch.manual_seed(0)
    mine = nn.Linear(4, 6, bias=False), nn.Linear(6, 2)
    theirs, resumed = copy.deepcopy(mine), copy.deepcopy(mine)
    both = MuonWithAdamW(groups_of(mine[0], True) + groups_of(mine[1], False), weight_decay=0.1)
    train(mine, both, 2)
    saved = copy.deepcopy(both.state_dict())
    weights = copy.deepcopy([model.state_dict() for model in mine])
    train(mine, both, 3, first=2)

    muon = torch.optim.Muon(
        theirs[0].parameters(), lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(theirs[1].parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(5):
        adamw.zero_grad()
        train(theirs, muon, 1, first=step)
        adamw.step()

    for model, state in zip(resumed, weights, strict=True):
        model.load_state_dict(state)
    again = MuonWithAdamW(
        groups_of(resumed[0], True) + groups_of(resumed[1], False), weight_decay=0.1
    )
    again.load_state_dict(saved)
    train(resumed, again, 3, first=2)
    for other in (theirs, resumed):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


def test_muon_has_the_matrices_of_the_models_own_layers(model):
    attnzoo.swap(model, "delta", window=4)
    rate = {"params": list(model.parameters()), "lr": 1e-3}
    optimizer = make_optimizer("muon", model, [rate], weight_decay=0.0)
    muon, adamw = ({id(p) for g in x.param_groups for p in g["params"]} for x in optimizer.parts)
    added = {id(p) for p in extras(model).values()}
    for name, p in model.named_parameters():
        matrix = name.endswith("proj.weight") and id(p) not in added
        assert (id(p) in muon, id(p) in adamw) == (matrix, not matrix), name
    assert any(p.ndim == 2 for p in extras(model).values())


def test_a_resumed_run_has_the_same_losses(saved, text, spec, tmp_path, interrupt):
    loop = LoopConfig(batch_size=4, checkpoint_every=3, optim="muon")
    config = FinetuneConfig(
        steps=6, row_length=32, judged_rows=2, train="full", tune_softmax=False, loop=loop
    )
    finetune(saved, spec, [text], tmp_path / "whole", config)
    interrupt(5, finetune, saved, spec, [text], tmp_path / "parts", config)
    finetune(saved, spec, [text], tmp_path / "parts", config, resume=True)
    assert read_losses(tmp_path / "parts") == read_losses(tmp_path / "whole")


def test_unknown_optimizer():
    with pytest.raises(ConfigError, match=r"optim must be one of .* Did you mean 'muon'"):
        LoopConfig(optim="muonn")
