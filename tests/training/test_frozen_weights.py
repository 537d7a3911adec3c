"""Frozen weights in bfloat16 or in 4 bits; `nox --session bitsandbytes` installs the package."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import attnzoo
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.training import four_bits, loop
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.optimizer import make_optimizer
from attnzoo.training.recover import RecoverConfig, recover
from attnzoo.training.student import require_student_settings
from tests.training.test_four_bits import needs_bitsandbytes, tiny_llama

RANK = 2
NARROW = [
    pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
    pytest.param({"load_in_4bit": True}, id="4bit", marks=needs_bitsandbytes),
]


pytestmark = pytest.mark.usefixtures("portable_4_bits")


@pytest.fixture(scope="module")
def saved(saved_in_blocks):
    """The folder of the model that these tests train."""
    return saved_in_blocks


def config(cls=RecoverConfig, *, precision=None, every=50, **changes):
    steps = {"steps": 3} if cls is FinetuneConfig else {"transfer_steps": 3, "distil_steps": 3}
    return cls(
        **{**steps, "row_length": 32, "judged_rows": 2, "lora_rank": RANK, **changes},
        loop=LoopConfig(batch_size=4, precision=precision, checkpoint_every=every),
    )


def losses(out):
    return [x["loss"] for x in read_losses(out)]


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("narrow", NARROW)
def test_the_result_is_the_saved_model_and_its_adapters(narrow, saved, text, spec, tmp_path):
    """What rounding changes is no part of it: differences have the adapters' rank."""
    exact = config(precision="bf16")
    recover(saved, spec, [text], tmp_path / "float32", exact)
    results = recover(saved, spec, [text], out := tmp_path / "narrow", config(**narrow))
    rough = 0.15 if "load_in_4bit" in narrow else 0.02
    assert losses(out) == pytest.approx(losses(tmp_path / "float32"), rel=rough)
    before, after = weights(saved), weights(out)
    assert {x.dtype for x in after.values()} == {torch.float32}
    changed = 0
    for name, x in before.items():
        difference = (after[name] - x).double()
        if "proj" not in name:
            assert not difference.any(), name
            continue
        values = torch.linalg.svdvals(difference)
        assert values[RANK] < 1e-3 * values[0], name
        changed += bool(values[0] > 1e-4)
    assert changed > 10  # of 14 layers
    model = hf.AutoModelForCausalLM.from_pretrained(out)
    assert getattr(model.config, "quantization_config", None) is None
    assert results["lines"]["result"]["loss"] > 0


@pytest.mark.parametrize("narrow", NARROW)
def test_a_resumed_run_has_the_same_losses(narrow, saved, text, spec, tmp_path, interrupt):
    chosen = config(**narrow, every=2)
    recover(saved, spec, [text], whole := tmp_path / "whole", chosen)
    out = tmp_path / "resumed"
    interrupt(5, recover, saved, spec, [text], out, chosen)
    recover(saved, spec, [text], out, chosen, resume=True)
    assert losses(out) == losses(whole)
    for name, x in weights(whole).items():
        assert torch.equal(weights(out)[name], x), name


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("train", ["extras", "lora"])
def test_swapped_models_are_fine_tuned(narrow, train, saved, text, spec, tmp_path):
    """Extras that are in the folder are kept, and are not in 4 bits."""
    model = hf.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    attnzoo.swap(model, spec).save_pretrained(folder := tmp_path / "swapped")
    hf.AutoTokenizer.from_pretrained(saved).save_pretrained(folder)
    chosen = config(FinetuneConfig, **narrow, train=train, evaluate_every=0)  # keeps the last state
    finetune(folder, None, [text], out := tmp_path / "out", chosen)
    before, after = weights(folder), weights(out)
    assert before.keys() == after.keys()
    assert {x.dtype for x in after.values()} == {torch.bfloat16}
    moved = {name for name, x in before.items() if not torch.equal(after[name], x)}
    assert any(".attnzoo." in name for name in moved)
    assert any("proj" in name for name in moved) == (train == "lora")


def test_what_is_trained_is_in_float32(saved, text, spec, tmp_path, monkeypatch):
    found = []

    def make(name, model, groups, **options):
        found.append({p.dtype for group in groups for p in group["params"]})
        return make_optimizer(name, model, groups, **options)

    monkeypatch.setattr(loop, "make_optimizer", make)
    recover(saved, spec, [text], tmp_path / "out", config(dtype="bfloat16"))
    assert found == 2 * [{torch.float32}]  # transfer and distillation


@needs_bitsandbytes
def test_the_head_and_backends_are_not_in_4_bits(spec):
    model = attnzoo.swap(tiny_llama(), spec)
    model.model.layers[1].self_attn.attnzoo.added = torch.nn.Linear(2, 2)
    kept = four_bits.config_of_4_bits(model).llm_int8_skip_modules
    assert sorted(kept) == ["lm_head", "model.layers.1.self_attn.attnzoo.added"]


@needs_bitsandbytes
def test_models_that_are_quantized_are_refused():
    model = tiny_llama()
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedError, match="quantized already"):
        four_bits.config_of_4_bits(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "must be 'float32' or 'bfloat16'"),
        ({"dtype": "bfloat16", "train": "full"}, "train='full' trains them"),
        ({"load_in_4bit": True, "train": "full"}, "load_in_4bit is for frozen weights"),
        ({"dtype": "bfloat16", "precision": "no"}, "precision is 'no'"),
        ({"load_in_4bit": True, "precision": "fp16"}, "precision is 'fp16'"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_settings_of_4_bits_imply_bfloat16():
    chosen = config(load_in_4bit=True)
    assert (chosen.dtype, chosen.loop.precision) == ("bfloat16", "bf16")


def test_without_bitsandbytes_4_bits_are_refused(monkeypatch, saved, text, spec, tmp_path):
    monkeypatch.setattr(four_bits, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install bitsandbytes"):
        recover(saved, spec, [text], tmp_path / "out", config(load_in_4bit=True))
    assert not (tmp_path / "out").exists()


def test_students_of_stock_classes_are_trained_in_float32():
    with pytest.raises(ConfigError, match=r"dtype='bfloat16' .* recurrent layers are trained"):
        require_student_settings(config(dtype="bfloat16", train="extras"))
