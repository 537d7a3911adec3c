"""The rates of distillation follow from the distance between student and teacher."""

import json

import pytest
import torch

import attnzoo
from attnzoo.evaluation.rows import Rows
from attnzoo.training import recover as recovery
from attnzoo.training.loop import LoopConfig
from attnzoo.training.rates import FAR, LEAST, held_out_divergence, rate_factor
from attnzoo.training.recipes import recipe_config
from attnzoo.training.recover import RecoverConfig, recover

TOKENS = torch.randint(3, 300, (3, 40), generator=torch.Generator().manual_seed(2))


def test_factor_falls_with_the_distance():
    assert rate_factor(2 * FAR) == rate_factor(FAR) == 1
    assert rate_factor(-1e-9) == LEAST  # rounding of equal models
    assert rate_factor(FAR / 16) == pytest.approx(0.125)
    assert rate_factor(0.0) == LEAST


@torch.no_grad()
def test_distance_equals_its_definition(model):
    exact = model(TOKENS).logits.double().log_softmax(-1)
    attnzoo.swap(model, "flash", window=4)
    swapped = model(TOKENS).logits.double().log_softmax(-1)
    kl = (exact.exp() * (exact - swapped)).sum(-1).mean()
    assert held_out_divergence(model, Rows.of_documents(TOKENS)) == pytest.approx(
        float(kl), rel=1e-4
    )


def test_given_rates_are_taken_as_they_are():
    assert RecoverConfig().rate_factor is None
    assert RecoverConfig(weights_lr=1e-3).rate_factor == 1
    assert RecoverConfig(extras_lr=1e-3).rate_factor == 1
    assert RecoverConfig(weights_lr=1e-3, rate_factor=0.5).rate_factor == 0.5
    assert recipe_config("quick").rate_factor is None
    assert recipe_config("quick", weights_lr=1e-4).rate_factor == 1
    assert recipe_config("radlads").rate_factor == 1


def test_a_run_scales_its_rates_and_a_resumed_run_has_the_same(
    saved, text, spec, tmp_path, monkeypatch, interrupt
):
    used = []
    train = recovery.Run.train

    def spy(self, *args, **options):
        used.append(options.get("rate_factor"))
        return train(self, *args, **options)

    monkeypatch.setattr(recovery.Run, "train", spy)
    loop = LoopConfig(batch_size=4, checkpoint_every=2)
    config = RecoverConfig(
        transfer_steps=2, distil_steps=4, row_length=32, judged_rows=4, train="full", loop=loop
    )
    run = saved, spec, [text], tmp_path / "out", config
    interrupt(5, recover, *run)
    known = json.loads((tmp_path / "out" / "checkpoints" / "rates.json").read_text())
    assert known["factor"] == rate_factor(known["kl"])
    recover(*run, resume=True)
    assert used == [known["factor"]] * 2
