"""Settings by name, and rows of another length in distillation."""

import json
from functools import partial

import pytest

from attnzoo.errors import ConfigError, SpecError
from attnzoo.training import recover as recovery
from attnzoo.training.encoder import EncoderRun
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.recover import RECIPES, RecoverConfig, recipe_config, recover

SWAP = "gated_linear:feature_map=hedgehog,window=4"
SHORT = ["--transfer-steps", 2, "--distil-steps", 2, "--length", 32, "--batch", 2]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_config(name):
    config = recipe_config(name, seed=3, top_k=5)
    assert (config.recipe, config.loop.seed, config.top_k) == (name, 3, 5)
    for field, value in RECIPES[name].options.items():
        assert getattr(config, field) == value
    for field, value in RECIPES[name].loop.items():
        assert getattr(config.loop, field) == value


def test_the_token_budgets_of_radlads():
    config = recipe_config("radlads")
    batch = config.loop.batch_size
    assert config.transfer_steps * batch * config.row_length == pytest.approx(100e6, rel=1e-3)
    assert config.distil_steps * batch * config.distil_length == pytest.approx(600e6, rel=1e-3)


def test_unknown_recipe():
    with pytest.raises(
        ConfigError, match=r"called 'quik'. Did you mean 'quick'\? Available: quick"
    ):
        recipe_config("quik")


def test_options_override_a_recipe_and_the_card_shows_all(saved, text, tmp_path, attnzoo_command):
    out = tmp_path / "out"
    attnzoo_command(
        *("recover", saved, "--data", text, "--out", out, "--attention", SWAP),
        *("--recipe", "radlads", *SHORT, "--distil-length", 48, "--precision", "no"),
    )
    config = json.loads((out / "recovery.json").read_text())["config"]
    assert (config["recipe"], config["distil_length"], config["row_length"]) == ("radlads", 48, 32)
    assert (config["attention_lr"], config["weights_lr"]) == (1e-4, 7e-6)
    assert (config["loop"]["batch_size"], config["loop"]["precision"]) == (2, "no")
    assert config["gradient_checkpointing"]
    card = (out / "README.md").read_text()
    settings = json.loads(card.partition("All settings of the run:")[2].split("```")[1][4:])
    assert settings == config


def config(**changes):
    options = {"transfer_steps": 3, "distil_steps": 4, "distil_length": 48, "row_length": 32}
    options |= {"judged_rows": 2, "cross_entropy": 0.5, "train": "full", "distil_batch": 2}
    options["evaluate_every"] = 0
    loop = LoopConfig(batch_size=4, checkpoint_every=2)
    return RecoverConfig(**{**options, **changes}, loop=loop)


def test_distillation_in_batches_of_another_shape(
    saved, text, spec, tmp_path, monkeypatch, interrupt
):
    """The stages have batches of their own shape, and a resumed run has the same losses."""
    shapes = []

    def record(make, *arguments, **options):
        loss = make(*arguments, **options)

        def recorded(model, batch):
            shapes.append(tuple(batch["input_ids"].shape))
            return loss(model, batch)

        return recorded

    for name in ("_distil_loss", "transfer_loss"):
        monkeypatch.setattr(recovery, name, partial(record, getattr(recovery, name)))
    recover(saved, spec, [text], tmp_path / "whole", config())
    assert shapes == [(2, 48)] * 4 + [(4, 32)] * 3 + [(2, 48)] * 4  # softmax tuned is the first
    interrupt(9, recover, saved, spec, [text], tmp_path / "parts", config())
    recover(saved, spec, [text], tmp_path / "parts", config(), resume=True)
    assert read_losses(tmp_path / "parts") == read_losses(tmp_path / "whole")


def test_invalid_shapes_are_refused():
    with pytest.raises(ConfigError, match="distil_length must be at least 8 tokens"):
        config(distil_length=4)
    with pytest.raises(ConfigError, match="distil_batch must be at least 1 row"):
        config(distil_batch=0)
    with pytest.raises(SpecError, match="each row of an encoder is one text"):
        EncoderRun.rows_of_length(None, 48)
    assert EncoderRun.rows_of_length(None, None) is None
