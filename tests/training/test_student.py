"""Recovery of a student of a stock class from another model."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.equal_memory import EqualWindow
from attnzoo.hf.stock.convert import layer_windows
from attnzoo.hf.stock.gated_delta_net import recurrent_layers
from attnzoo.training import student as module
from attnzoo.training.distil import model_inputs
from attnzoo.training.evaluator import Evaluator
from attnzoo.training.recover import recover
from attnzoo.training.run_folder import RunError
from attnzoo.training.student import StudentRecovery, StudentTrainer, StudentTransfer, equal_window
from tests.byte_tokenizer import save_byte_tokenizer
from tests.helpers import run_torch_functions
from tests.training.short_runs import arguments
from tests.training.student_pair import load, write_pair


def config(out="out", **changes):
    given = {"train": "full", "max_length": 64, "transfer_steps": 12, "max_steps": 4}
    given |= {"learning_rate": 1e-4, "extras_learning_rate": 4e-4}
    if changes.get("max_steps") == 0:
        given = {"train": "full", "max_length": 64}
    return arguments(out, **{**given, **changes})


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folder of a teacher and of its student, whose second layer is recurrent."""
    place = tmp_path_factory.mktemp("pair")
    write_pair(place, 2, "1")
    return place


def losses(results, stage):
    return [x["loss"] for x in results["losses"][stage] if "loss" in x]


def test_recovery(pair, text, tmp_path):
    out = tmp_path / "out"
    results = recover(pair / "student", None, [text], config(out), teacher=pair / "teacher")
    found = losses(results, "transfer")
    assert found[-1] < 0.8 * found[0]
    assert len(losses(results, "distil")) == 4
    lines = results["lines"]
    assert lines["softmax"]["agreement"] == 1  # the teacher generates its own tokens
    far, near = (abs(lines[x]["loss"] - lines["softmax"]["loss"]) for x in ("raw swap", "result"))
    assert near < far
    assert results["student"]["layer_types"] == ["full_attention", "linear_attention"]
    model = load(out)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert "attnzoo" not in (out / "config.json").read_text()
    assert "# A student of the class qwen3_5_text" in (out / "README.md").read_text()
    teacher, student = load(pair / "teacher"), load(pair / "student")
    before, after = (x.model.layers[0].self_attn.k_proj.weight for x in (student, model))
    assert not torch.equal(before, after)  # distillation trains all layers
    assert torch.equal(before, teacher.model.layers[0].self_attn.k_proj.weight)


def test_the_loss_of_transfer(pair):
    """By hand: the layer on the teacher's hidden states, against the teacher's attention."""
    teacher, student = load(pair / "teacher"), attnzoo.speed_up(load(pair / "student"))
    with torch.no_grad():  # other weights elsewhere: the inputs are the teacher's all the same
        student.model.layers[0].post_attention_layernorm.weight.mul_(2)
    tokens = torch.randint(2, 259, (3, 40), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    with StudentTransfer(student, teacher) as transfer:
        loss = transfer.run(student, model_inputs(batch))
        loss.backward()
    with torch.no_grad():
        states = teacher(tokens, output_hidden_states=True).hidden_states
        hidden = teacher.model.layers[1].input_layernorm(states[1])
        positions = torch.arange(40)[None]
        exact, _ = teacher.model.layers[1].self_attn(
            hidden,
            attention_mask=None,
            position_embeddings=teacher.model.rotary_emb(hidden, positions),
        )
        out = recurrent_layers(student)[1](hidden)
    expected = (out - exact).square().sum() / exact.square().sum()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-4, atol=0)
    with_gradient = {n for n, p in student.named_parameters() if p.grad is not None}
    assert with_gradient == {f"model.layers.1.linear_attn.{n}" for n in recurrent_names(student)}
    trainer = SimpleNamespace(model=student)  # distillation has a rate for the same parameters
    names = [n for n, _ in student.named_parameters() if StudentTrainer.is_added(trainer, n)]
    assert set(names) == with_gradient
    with torch.no_grad():
        assert not torch.equal(student(tokens).logits, teacher(tokens).logits)  # hooks are gone


def test_the_loss_is_the_mean_of_that_of_layers_alone(tmp_path):
    """Each layer gets the teacher's hidden states, whatever the other layers are."""
    write_pair(tmp_path, 3, "1-2")
    teacher = load(tmp_path / "teacher")
    tokens = torch.randint(2, 259, (3, 40), generator=torch.Generator().manual_seed(0))
    losses = {}
    for layers in ("1", "2", "1-2"):
        student = attnzoo.speed_up(attnzoo.convert(teacher, "qwen3_5_text", recurrent=layers))
        with StudentTransfer(student, teacher) as transfer:
            losses[layers] = transfer.run(student, {"input_ids": tokens})
    torch.testing.assert_close(losses["1-2"], (losses["1"] + losses["2"]) / 2)
    assert (losses["1"] - losses["2"]).abs() > 0.01
    losses["1-2"].backward()
    trained = {p for p in student.parameters() if p.grad is not None}
    assert trained == set(module.recurrent_parameters(student).values())


def recurrent_names(student):
    return [name for name, _ in recurrent_layers(student)[1].named_parameters()]


def test_documents_of_a_packed_row_do_not_see_each_other(pair):
    """The model is that of a run, whatever the run is."""
    args = SimpleNamespace(disable_dropout=True)
    run = SimpleNamespace(path=pair / "student", args=args)
    student = StudentRecovery.load(run, dtype=torch.float32).eval()
    tokens = torch.randint(2, 259, (1, 50), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(20), torch.arange(30)])[None]
    with torch.no_grad():
        packed = student(tokens, position_ids=positions, use_cache=False).logits[:, 20:]
        alone = student(tokens[:, 20:], use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_distillation_that_makes_it_worse_is_undone(pair, text, tmp_path):
    args = config(tmp_path / "out", max_steps=2, extras_learning_rate=1.0, learning_rate=1.0)
    recover(pair / "student", None, [text], args, teacher=pair / "teacher")
    teacher, model = load(pair / "teacher"), load(tmp_path / "out")
    assert torch.equal(*(x.model.layers[0].self_attn.k_proj.weight for x in (teacher, model)))


def test_baselines_are_the_teacher_with_windows(pair):
    """Their layers are read when they are evaluated; the teacher is itself again afterwards."""
    teacher, seen = load(pair / "teacher"), []

    evaluator = object.__new__(Evaluator)
    evaluator.equal = EqualWindow(length=64, windows={1: 7}, swap_bytes=1, exact_bytes=2)
    evaluator.window = 9
    evaluator.evaluate = lambda name, model, **options: seen.append((name, layer_windows(model)))
    evaluator.evaluate_windows(teacher)
    assert seen == [("equal window", [None, 7]), ("window alone", [9, 9])]
    assert layer_windows(teacher) == [None, None]


def test_the_rate_of_transfer(pair, text, tmp_path):
    args = config(tmp_path / "out", transfer_steps=2, max_steps=0, transfer_learning_rate=1e-9)
    recover(pair / "student", None, [text], args, teacher=pair / "teacher")
    before, after = (
        recurrent_layers(load(x))[1].out_proj.weight for x in (pair / "student", tmp_path / "out")
    )
    assert (before - after).abs().max() < 1e-7  # two steps of Adam at the default: 6e-3


def test_a_finished_run_is_that_of_its_teacher(pair, text, tmp_path):
    options = {"transfer_steps": 2, "max_steps": 0}
    run = (pair / "student", None, [text])
    results = recover(*run, config(tmp_path / "out", **options), teacher=pair / "teacher")
    again = config(tmp_path / "out", **options, resume_from_checkpoint="True")
    assert recover(*run, again, teacher=pair / "teacher") == results
    other = load(pair / "teacher")
    other.model.norm.weight.data.mul_(2)
    other.save_pretrained(tmp_path / "other")
    save_byte_tokenizer(tmp_path / "other")
    with pytest.raises(RunError, match="its teacher is"):
        recover(*run, again, teacher=tmp_path / "other")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_window_of_equal_memory_is_that_of_the_cache(pair, dtype):
    student = attnzoo.speed_up(load(pair / "student").to(dtype))
    cache = hf.DynamicCache(config=student.config)
    with torch.no_grad():
        student(torch.arange(2, 98)[None], past_key_values=cache)
    recurrent, full = cache.layers[1], cache.layers[0]
    state = sum(
        x.nbytes
        for found in (recurrent.conv_states, recurrent.recurrent_states)
        for x in (found.values() if isinstance(found, dict) else [found])
    )
    token = (full.keys.nbytes + full.values.nbytes) // 96
    equal = equal_window(student.config, 1000, dtype.itemsize)
    assert equal.windows == {1: state // token + 1}
    assert equal.swap_bytes == state + 1000 * token
    assert equal_window(student.config, state // token, dtype.itemsize).windows == {1: None}


REFUSED = {
    "lora": ({"train": "lora"}, "has no adapters"),
    "labels": ({"cross_entropy": 0.5}, "cross_entropy has no effect: the teacher"),
    "weights": ({"transfer_target": "attention"}, "no weights of keys"),
    "transfer": ({"transfer_from": "x"}, "has a transfer of its own"),
    "type": ({"dtype": "bfloat16", "train": "extras"}, "which need float32"),
    "4 bits": ({"load_in_4bit": True, "train": "extras"}, "which need float32"),
    "split rows": ({"cp_size": 2}, "cp_size has no effect: a recurrent layer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_apply_are_refused(name):
    changes, message = REFUSED[name]
    args = config()
    for field, value in changes.items():
        setattr(args, field, value)
    with pytest.raises(ConfigError, match=message):
        module.require_student_settings(args)


def test_models_that_do_not_match_are_refused(pair, tmp_path):
    student, teacher = pair / "student", pair / "teacher"
    with pytest.raises(SpecError, match="without recurrent layers"):
        module.require_pair(teacher, teacher)
    with pytest.raises(SpecError, match="no softmax attention in layer 1"):
        module.require_pair(student, student)
    attnzoo.swap(load(teacher), "linear").save_pretrained(tmp_path / "swap")
    with pytest.raises(SpecError, match="is a swap of attnzoo"):
        module.require_pair(student, tmp_path / "swap")
    for name, value in (("num_hidden_layers", 3), ("hidden_size", 16), ("vocab_size", 400)):
        config = hf.AutoConfig.from_pretrained(teacher, layer_types=None, **{name: value})
        config.save_pretrained(tmp_path / name)
        with pytest.raises(SpecError, match=f"student has {name}="):
            module.require_pair(student, tmp_path / name)
    load(teacher).save_pretrained(tmp_path / "tokens")
    tokenizer = hf.AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["four"])
    tokenizer.save_pretrained(tmp_path / "tokens")
    with pytest.raises(SpecError, match="other vocabularies"):
        module.require_pair(student, tmp_path / "tokens")


def test_command(pair, text, tmp_path, attnzoo_command, capsys):
    folders = (pair / "student", "--teacher", pair / "teacher")
    given = ("--data", text, "--max-length", 64, "--per-device-train-batch-size", 4)
    steps = ("--transfer-steps", 1, "--max-steps", 1, "--config", "student_distil")
    attnzoo_command("recover", *folders, *given, *steps, "--output-dir", tmp_path / "out")
    printed = capsys.readouterr().out
    assert "import attnzoo" not in printed
    saved = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert saved["config"]["extras_learning_rate"] == 4e-4


@pytest.fixture(autouse=True, scope="module")
def torch_functions():
    with pytest.MonkeyPatch.context() as patch:
        run_torch_functions(patch, "qwen3_5_text")
        yield
