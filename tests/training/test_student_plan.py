"""The choice of a student's recurrent layers after transfer."""

import itertools
import json
import sys

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.cli import main
from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.stock.gated_delta_net import FAMILY, recurrent_layers
from attnzoo.training.student import StudentPlanner, plan_student
from tests.helpers import run_torch_functions
from tests.training.student_pair import load, write_pair

TOKENS = torch.randint(3, 259, (5, 40), generator=torch.Generator().manual_seed(0))
ROWS = Rows.of_documents(TOKENS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folder of a teacher of four layers and of a student, whose last layer is full."""
    place = tmp_path_factory.mktemp("pair")
    write_pair(place, 4, "0-2")
    return place


def recurrent(*numbers):
    return dict.fromkeys(numbers, "recurrent")


def logits_of(folders, numbers, tokens=TOKENS):
    """Return the logits of a student with some recurrent layers, whose weights are copied."""
    converted = attnzoo.convert(
        load(folders / "teacher"), FAMILY, recurrent=",".join(map(str, numbers))
    )
    transferred = recurrent_layers(load(folders / "student"))
    for number, layer in recurrent_layers(converted).items():
        layer.load_state_dict(transferred[number].state_dict())
    with torch.no_grad():
        return attnzoo.speed_up(converted)(tokens).logits.double().log_softmax(-1)


def test_the_divergence_is_that_of_a_student_with_these_layers(pair):
    with torch.no_grad():
        exact = load(pair / "teacher")(TOKENS).logits.double().log_softmax(-1)
    teacher, student = load(pair / "teacher"), attnzoo.speed_up(load(pair / "student"))
    planner = StudentPlanner(teacher, student, ROWS)
    for numbers in ([0], [0, 2]):
        expected = (exact.exp() * (exact - logits_of(pair, numbers))).sum(-1).mean()
        assert planner.divergence(recurrent(*numbers)) == pytest.approx(float(expected), rel=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(teacher(TOKENS).logits.double().log_softmax(-1), exact)


def test_documents_of_a_row_are_measured_alone(pair):
    positions = torch.cat([torch.arange(17), torch.arange(23)]).expand(2, -1)
    rows = Rows(tokens=TOKENS[:2], positions=positions, bytes_per_token=1.0)
    teacher, student = load(pair / "teacher"), attnzoo.speed_up(load(pair / "student"))
    expected = []
    for tokens in rows.documents():
        with torch.no_grad():
            exact = teacher(tokens[None]).logits.double().log_softmax(-1)
        found = logits_of(pair, [0, 2], tokens[None])
        expected.append((exact.exp() * (exact - found)).sum(-1)[0])
    found = StudentPlanner(teacher, student, rows).divergence(recurrent(0, 2))
    assert found == pytest.approx(float(torch.cat(expected).mean()), rel=1e-5)


def test_the_layers_are_chosen_greedily(pair):
    """The oracle tries every choice of which one step of the greedy search may come."""
    plan = plan_student(pair / "teacher", pair / "student", ROWS, keep_softmax=2)
    teacher, student = load(pair / "teacher"), attnzoo.speed_up(load(pair / "student"))
    planner = StudentPlanner(teacher, student, ROWS)
    pairs = {x: planner.divergence(recurrent(*x)) for x in itertools.combinations(range(3), 2)}
    assert tuple(plan.chosen) == min(pairs, key=pairs.get)
    assert plan.recurrent == ",".join(map(str, plan.chosen))
    assert plan.divergence == pytest.approx(min(pairs.values()), rel=1e-6)
    for n in range(3):
        alone = planner.divergence(recurrent(n))
        assert plan.layers[n]["alone"]["recurrent"] == pytest.approx(alone)


@pytest.mark.parametrize("keep", [0, 4])
def test_a_number_of_layers_that_the_run_cannot_give_is_refused(pair, keep):
    with pytest.raises(ConfigError, match="keep at least 1 and at most 3 layers"):
        plan_student(pair / "teacher", pair / "student", ROWS, keep_softmax=keep)


def test_a_distilled_student_is_refused(pair, tmp_path):
    student = load(pair / "student")
    with torch.no_grad():
        student.model.layers[3].self_attn.o_proj.weight.add_(1e-3)
    student.save_pretrained(tmp_path)
    hf.AutoTokenizer.from_pretrained(pair / "teacher").save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=r"layers\.3\.self_attn\.o_proj\.weight, so its recurrent"):
        plan_student(pair / "teacher", tmp_path, ROWS)


def test_command(pair, text, tmp_path, attnzoo_command, capsys):
    """The plan converts without another option."""
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    to = ("--to", FAMILY)
    run = (*to, "--from", pair / "student", "--keep-softmax", 0.5)
    given = ("--data", text, "--max-length", 64, "--rows", 2)
    attnzoo_command("plan", pair / "teacher", *run, *given, "--output-file", plan)
    layers = json.loads(plan.read_text())["recurrent"]
    assert f"--plan {plan} --output-dir NEW" in capsys.readouterr().out
    convert = ("convert", pair / "teacher", *to, "--plan", plan)
    attnzoo_command(*convert, "--output-dir", out)
    kinds = hf.AutoConfig.from_pretrained(out).layer_types
    assert [str(n) for n, x in enumerate(kinds) if x == "linear_attention"] == layers.split(",")


REFUSED = {
    "no transfer": ((), "ranked after a transfer"),
    "memory": (("--cache-bytes", "1MiB", "--from", "x"), "leave --cache-bytes out"),
    "candidates": (("--candidate", "delta", "--from", "x"), "leave --candidate out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_apply_are_refused(pair, text, monkeypatch, capsys, name):
    options, message = REFUSED[name]
    command = ("plan", pair / "teacher", "--to", "qwen3_5_text", "--data", text, *options)
    monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, command)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.fixture(autouse=True, scope="module")
def torch_functions():
    with pytest.MonkeyPatch.context() as patch:
        run_torch_functions(patch, "qwen3_5_text")
        yield


def test_no_choice_of_layers_is_measured_twice(pair):
    steps = []
    plan_student(
        pair / "teacher",
        pair / "student",
        ROWS,
        keep_softmax=3,
        on_step=steps.append,
    )
    assert len(steps) == len(set(steps)) == 6  # each layer alone, and each pair
