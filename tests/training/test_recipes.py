"""Settings by name, and rows of another length in distillation."""

import json
import shlex
from functools import partial

import click
import pytest
import torch
import transformers as hf
from typer.main import get_command

from attnzoo.cli import app
from attnzoo.commands.spec_options import spec_of
from attnzoo.errors import ConfigError, SpecError
from attnzoo.training import loop as training_loop
from attnzoo.training import recover as recovery
from attnzoo.training.encoder import EncoderRun
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.optimizer import make_schedule
from attnzoo.training.recipes import CONFIGS, recipe_config, recipe_stages, recipes
from attnzoo.training.recover import RecoverConfig, recover

SWAP = "gated_linear:feature_map=hedgehog,window=4"
SHORT = ["--transfer-steps", 2, "--distil-steps", 2, "--length", 32, "--batch", 2]


# steps, rows, tokens a row, rates, schedule of the published configs
PUBLISHED = {
    "radlads": [
        (100e6, 32, 512, {"extras": 1e-3}, "cosine_with_min_lr, min_lr_rate 0.01", 50),
        (500e6, 96, 512, {"extras": 1e-5, "weights": 1e-5}, "constant_with_warmup", 50),
        (100e6, 96, 16384, {"extras": 1e-5, "weights": 1e-5}, "constant_with_warmup", 50),
    ],
    "lolcats": [
        (20e6, 8, 1024, {"extras": 1e-2}, "constant", 0),
        (20e6, 8, 1024, {"extras": 1e-4, "weights": 1e-4}, "constant", 0),
    ],
    "liger": [(20e6, 8, 1024, {"extras": 1e-3, "weights": 1e-3}, "constant", 0)],
    "kl_guided": [
        (100e6, 96, 512, {"extras": 1e-3}, "cosine", 0),
        (
            *(600e6, 32, 4096, {"extras": 1e-4, "attention": 1e-4, "weights": 7e-6}),
            *("constant", 0),
        ),
    ],
}


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_a_config_of_each_of_its_commands(name):
    recipe = recipes()[name]
    for command in CONFIGS:
        settings = getattr(recipe, command)
        if not settings:
            continue
        config = recipe_config(name, command, seed=3, control=5)
        assert (config.recipe, config.loop.seed, config.control) == (name, 3, 5)
        for field, value in settings.items():
            owner = config.loop if hasattr(config.loop, field) else config
            found = getattr(owner, field)
            assert found == (tuple(value) if isinstance(value, list) else value), field
    assert recipe.source
    assert recipe.commands


@pytest.mark.parametrize("name", PUBLISHED)
def test_stages_have_the_published_values(name):
    stages = recipe_stages(recipes()[name])
    assert len(stages) == len(PUBLISHED[name])
    for stage, (tokens, *expected) in zip(stages, PUBLISHED[name], strict=True):
        assert stage.tokens == pytest.approx(tokens, rel=1e-2)
        found = [stage.rows, stage.length, stage.rates, stage.schedule, stage.warmup]
        assert found == expected
    assert "2" in recipes()[name].source  # an arXiv id
    assert recipes()[name].differences


@pytest.mark.parametrize("name", recipes())
def test_commands_of_a_recipe_are_accepted(name):
    """Every option exists, and the attention can be parsed."""
    group = get_command(app)
    for line in recipes()[name].commands:
        _, command, *arguments = shlex.split(line)
        parser = group.commands[command].make_parser(click.Context(group.commands[command]))
        options, rest, _ = parser.parse_args(list(arguments))
        assert rest == []
        if options.get("attention"):
            spec_of(options["attention"])
    if recipes()[name].attention:
        spec_of(recipes()[name].attention)


def test_a_command_that_a_recipe_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"no stage of `attnzoo recover`; run `attnzoo finetune"):
        recipe_config("liger")
    with pytest.raises(ConfigError, match="no stage of `attnzoo finetune`"):
        recipe_config("quick", "finetune")


def test_students_take_the_tokens_of_quick_with_fewer_rows_in_transfer():
    quick, student = (recipe_stages(recipes()[name]) for name in ("quick", "student"))
    assert [(x.steps, x.rows) for x in quick] == [(60, 8), (100, 8)]
    assert [(x.steps, x.rows) for x in student] == [(240, 2), (100, 8)]
    assert [x.tokens for x in student] == [x.tokens for x in quick] == [60 * 4096, 100 * 4096]


def test_unknown_recipe():
    with pytest.raises(
        ConfigError, match=r"called 'quik'. Did you mean 'quick'\? Available: kl_guided"
    ):
        recipe_config("quik")


def test_a_warmup_as_long_as_a_stage_is_refused():
    with pytest.raises(ConfigError, match="stage 'distil' has 40 steps, all of them warmup"):
        recipe_config("radlads", distil_steps=40)
    assert recipe_config("radlads", distil_steps=0).loop.warmup_steps(7) == 50
    assert LoopConfig(warmup=0.25).warmup_steps(8) == 2
    with pytest.raises(ConfigError, match="or a whole number of steps"):
        LoopConfig(warmup=1.5)


def test_each_stage_has_the_schedule_of_the_recipe(saved, text, spec, tmp_path, monkeypatch):
    made = []

    def record(name, options, optimizer, **steps):
        made.append((name, dict(options), steps["warmup"], steps["steps"]))
        return make_schedule(name, options, optimizer, **steps)

    monkeypatch.setattr(training_loop, "make_schedule", record)
    short = {"transfer_steps": 3, "distil_steps": 4, "warmup": 1, "row_length": 32}
    short |= {"batch_size": 2, "distil_batch": 2, "precision": "no", "judged_rows": 2}
    recover(saved, spec, [text], tmp_path / "out", recipe_config("radlads", **short))
    assert made == [
        ("cosine_with_min_lr", {"min_lr_rate": 0.01}, 1, 3),
        ("constant_with_warmup", {}, 1, 4),
    ]


def test_a_recipe_over_two_commands(saved, text, tmp_path, attnzoo_command):
    """LoLCATs: transfer, then adapters of the attention's projections by cross-entropy."""
    short = ["--length", 32, "--batch", 2, "--precision", "no", "--evaluate-every", 0]
    first, last = tmp_path / "first", tmp_path / "last"
    recipe = ["--recipe", "lolcats", "--data", text, *short]
    attnzoo_command("recover", saved, *recipe, "--out", first, "--transfer-steps", 2)
    attnzoo_command("finetune", first, *recipe, "--out", last, "--steps", 2)
    spec = json.loads((last / "config.json").read_text())["attnzoo"]
    assert (spec["backend"], spec["options"]["window"]) == ("linear", 64)
    written = json.loads((last / "finetuning.json").read_text())["config"]
    assert (written["recipe"], written["lora_rank"], written["lora_alpha"]) == ("lolcats", 8, 16)
    before, after = (
        hf.AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (first, last)
    )
    changed = [n for n, x in before.items() if not torch.equal(x, after[n])]
    own = {n.split(".")[-2] for n in changed if ".attnzoo." not in n}
    assert own == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_the_command_shows_source_and_differences(attnzoo_command, capsys):
    attnzoo_command("recipes", "radlads")
    shown = capsys.readouterr().out
    for part in ("arXiv:2505.03005", "100.0M", "96 x 16,384", "What differs here", "--evaluate-"):
        assert part in shown
    attnzoo_command("recipes", "--json")
    data = json.loads(capsys.readouterr().out)
    assert [x["name"] for x in data] == [*recipes()]
    (radlads,) = (x for x in data if x["name"] == "radlads")
    assert radlads["stages"][0]["tokens"] == 6104 * 32 * 512


def test_options_override_a_recipe_and_the_card_shows_all(saved, text, tmp_path, attnzoo_command):
    out = tmp_path / "out"
    attnzoo_command(
        *("recover", saved, "--data", text, "--out", out, "--attention", SWAP),
        *("--recipe", "radlads", *SHORT, "--distil-length", 48, "--precision", "no"),
        *("--warmup", 0.1, "--distil-batch", 2),
    )
    config = json.loads((out / "recovery.json").read_text())["config"]
    assert (config["recipe"], config["distil_length"], config["row_length"]) == ("radlads", 48, 32)
    assert (config["extras_lr"], config["weights_lr"]) == (1e-5, 1e-5)
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
