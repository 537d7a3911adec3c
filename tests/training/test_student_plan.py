"""The choice of a student's recurrent layers after transfer."""

import inspect
import itertools
import json
import sys

import pytest
import torch
import transformers as hf
from transformers.models.qwen3_5 import modeling_qwen3_5

import attnzoo
from attnzoo.cli import main
from attnzoo.errors import ConfigError, SpecError
from attnzoo.hf.models.speed_up import RULES
from attnzoo.hf.stock.recurrent import recurrent_layers
from attnzoo.training.student_plan import StudentPlanner, plan_student
from tests.training.student_pair import load, write_pair

ROWS = torch.randint(3, 259, (5, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of a teacher of four layers and of a student, whose last layer is full."""
    place = tmp_path_factory.mktemp("pair")
    write_pair(place, 4, "0-2")
    return place


def logits_of(folders, numbers):
    """Return the logits of a student with some recurrent layers, whose weights are copied."""
    converted = attnzoo.convert(
        load(folders / "teacher"), "qwen3_5_text", recurrent=",".join(map(str, numbers))
    )
    transferred = recurrent_layers(load(folders / "student"))
    for number, layer in recurrent_layers(converted).items():
        layer.load_state_dict(transferred[number].state_dict())
    with torch.no_grad():
        return attnzoo.speed_up(converted)(ROWS).logits.double().log_softmax(-1)


def test_the_divergence_is_that_of_a_student_with_these_layers(folders):
    with torch.no_grad():
        exact = load(folders / "teacher")(ROWS).logits.double().log_softmax(-1)
    teacher, student = load(folders / "teacher"), attnzoo.speed_up(load(folders / "student"))
    planner = StudentPlanner(teacher, student, ROWS)
    for numbers in ([0], [2], [0, 2]):
        expected = (exact.exp() * (exact - logits_of(folders, numbers))).sum(-1).mean()
        assert planner.divergence(numbers) == pytest.approx(float(expected), rel=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(teacher(ROWS).logits.double().log_softmax(-1), exact)


def test_the_layers_are_chosen_greedily(folders):
    """The oracle tries every choice of which one step of the greedy search may come."""
    plan = plan_student(folders / "teacher", folders / "student", ROWS, keep_softmax=2)
    teacher, student = load(folders / "teacher"), attnzoo.speed_up(load(folders / "student"))
    planner = StudentPlanner(teacher, student, ROWS)
    pairs = {x: planner.divergence(x) for x in itertools.combinations(range(3), 2)}
    assert tuple(plan.recurrent) == min(pairs, key=pairs.get)
    assert plan.divergence == pytest.approx(min(pairs.values()), rel=1e-6)
    assert plan.restored == pytest.approx({2: pairs[0, 1], 1: pairs[0, 2], 0: pairs[1, 2]})
    assert plan.alone == pytest.approx({n: planner.divergence([n]) for n in range(3)})


@pytest.mark.parametrize("keep", [0, 4])
def test_a_number_of_layers_that_the_run_cannot_give_is_refused(folders, keep):
    with pytest.raises(ConfigError, match="keep at least 1 and at most 3 layers"):
        plan_student(folders / "teacher", folders / "student", ROWS, keep_softmax=keep)


def test_a_distilled_student_is_refused(folders, tmp_path):
    student = load(folders / "student")
    with torch.no_grad():
        student.model.layers[3].mlp.up_proj.weight.add_(1e-3)
    student.save_pretrained(tmp_path)
    hf.AutoTokenizer.from_pretrained(folders / "teacher").save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=r"layers\.3\.mlp\.up_proj\.weight, so its recurrent"):
        plan_student(folders / "teacher", tmp_path, ROWS)


def test_command(folders, text, tmp_path, attnzoo_command, capsys):
    """The plan converts without another option."""
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    run = ("--to", "qwen3_5_text", "--from", folders / "student", "--keep-softmax", 0.5)
    given = ("--data", text, "--length", 64, "--rows", 2)
    attnzoo_command("plan", folders / "teacher", *run, *given, "--out", plan)
    layers = json.loads(plan.read_text())["recurrent"]
    assert f"--plan {plan} --out STUDENT" in capsys.readouterr().out
    convert = ("convert", folders / "teacher", "--to", "qwen3_5_text", "--plan", plan)
    attnzoo_command(*convert, "--out", out)
    kinds = hf.AutoConfig.from_pretrained(out).layer_types
    assert [str(n) for n, x in enumerate(kinds) if x == "linear_attention"] == layers.split(",")


REFUSED = {
    "no transfer": ((), "ranked after a transfer"),
    "memory": (("--cache-bytes", "1MiB", "--from", "x"), "leave --cache-bytes out"),
    "candidates": (("--candidate", "delta", "--from", "x"), "leave --candidate out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_apply_are_refused(folders, text, monkeypatch, capsys, name):
    options, message = REFUSED[name]
    command = ("plan", folders / "teacher", "--to", "qwen3_5_text", "--data", text, *options)
    monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, command)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.fixture(autouse=True, scope="module")
def torch_functions():
    """Let stock layers run torch's functions where flash-linear-attention is installed."""
    with pytest.MonkeyPatch.context() as patch:
        for rule in RULES:
            if hasattr(modeling_qwen3_5, rule):
                function = inspect.unwrap(getattr(modeling_qwen3_5, rule))
                patch.setattr(modeling_qwen3_5, rule, function)
        yield


def test_no_choice_of_layers_is_measured_twice(folders):
    steps = []
    plan_student(
        folders / "teacher", folders / "student", ROWS, keep_softmax=3, on_step=steps.append
    )
    assert len(steps) == len(set(steps)) == 6  # each layer alone, and each pair
