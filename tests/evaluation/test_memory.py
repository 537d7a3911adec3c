import json
import sys
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    Adafactor,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)
from transformers import T5ForConditionalGeneration as T5

import attnzoo
from attnzoo.cli import main
from attnzoo.commands import terminal
from attnzoo.errors import AttnzooError
from attnzoo.evaluation import memory
from attnzoo.evaluation.allocations import counted, fake_model
from attnzoo.evaluation.memory import MemoryEstimator, optimizer_bytes
from benchmarks.memory import measure

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,  # of size 16: kernels pad smaller ones
    "vocab_size": 100,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You have passed exclude_modules:UserWarning"),
]


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Folders with a config.json and no weights."""
    made = {
        "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=1)),
        "tied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "bert": (BertForMaskedLM, BertConfig(**SIZES, max_position_embeddings=64)),
        "t5": (T5, T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=9)),
    }
    folder = tmp_path_factory.mktemp("configs")
    for name, (cls, config) in made.items():
        config.architectures = [cls.__name__]
        config.save_pretrained(folder / name)
    return folder


def estimator(folder, attention=None, *, options=None, **changes):
    spec = None if attention is None else attnzoo.AttentionSpec(attention, **(options or {}))
    return MemoryEstimator(path=folder, spec=spec, **changes)


def compute(*arguments, length=64, **options):
    return estimator(*arguments, **options).compute(length)


@pytest.mark.parametrize(
    ("model", "attention", "options", "changes"),
    [
        ("tied", "linear", {"window": 16}, {"batch": 2}),
        ("llama", "delta", {}, {"train": "lora", "bf16": True}),
        pytest.param("llama", None, {}, {}, marks=pytest.mark.exhaustive),
        pytest.param("llama", "softmax", {}, {"optimizer": "sgd"}, marks=pytest.mark.exhaustive),
        pytest.param(
            "llama", "flash", {"window": 9}, {"dtype": "bfloat16"}, marks=pytest.mark.exhaustive
        ),
        pytest.param("llama", "delta", {}, {"train": "extras"}, marks=pytest.mark.exhaustive),
        pytest.param("llama", "longformer", {"window": 8}, {}, marks=pytest.mark.exhaustive),
        ("bert", "linformer", {"num_rows": 8}, {}),
    ],
)
def test_computed_memory_is_the_measured_memory(configs, model, attention, options, changes):
    trial = estimator(configs / model, attention, options=options, **changes)
    use = trial.compute(64)
    computed, measured = use.to_dict(), measure(trial, 64, use)
    for name, real in measured.items():
        if real is None:
            assert computed[name] is None
        else:
            # not computed: 5056 bytes of random state, which a checkpoint saves, and saves once
            # more while it is recomputed
            assert computed[name] == pytest.approx(real, rel=0.02, abs=11000), name


class Optimized(nn.ModuleDict):
    """An embedding, a matrix, and what is too small for 8 bits."""

    def __init__(self, dtype):
        super().__init__(
            {"table": nn.Embedding(100, 64), "large": nn.Linear(64, 65), "small": nn.Linear(8, 8)}
        )
        self.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_an_optimizer_keeps_what_is_computed(name, dtype):
    model = Optimized(dtype)
    for x in model.parameters():
        x.grad = torch.ones_like(x)
    options = {"scale_parameter": False, "relative_step": False} if name == "adafactor" else {}
    make = Adafactor if name == "adafactor" else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-5, **options)
    optimizer.step()
    states = [x for entry in optimizer.state.values() for x in entry.values()]
    kept = sum(x.nbytes for x in states if isinstance(x, torch.Tensor) and x.dim())
    scalars = 4 * 5 if name == "adafactor" else 0  # the root mean square of each tensor
    assert optimizer_bytes(model, model.parameters(), name) == kept + scalars


def test_moments_in_8_bits():
    """Embeddings and small tensors have them in float32; test_optimizer.py has bitsandbytes."""
    in_32_bits = 100 * 64 + 65 + 8 * 8 + 8
    in_8_bits, blocks = 64 * 65, 17  # of 256 weights, the last one incomplete
    model = Optimized(torch.bfloat16)
    expected = 2 * (4 * in_32_bits + in_8_bits + 4 * blocks)
    assert optimizer_bytes(model, model.parameters(), "adamw_8bit") == expected


def test_frozen_linear_layers_in_4_bits(configs):
    whole, small = (
        compute(configs / "llama", train="lora", load_in_4bit=x, dtype="bfloat16", bf16=True)
        for x in (False, True)
    )
    count = 32 * (32 + 2 * 16 + 32) + 3 * 32 * 48  # the head, norms and embeddings stay
    # NF4: 4 bits, 8 bits for 64 weights, 32 bits for 256 of these (arXiv:2305.14314, 0.127 bits)
    assert whole.parameters - small.parameters == pytest.approx(count * (2 - 4.127 / 8), rel=1e-3)
    assert small.peaks == tuple(x + 2 * 32 * 48 for x in whole.peaks)  # a layer, dequantized
    assert (small.step, small.optimizer) == (whole.step + 2 * 32 * 48, whole.optimizer)


def test_gpus_divide_weights_gradients_and_states(configs):
    one = compute(configs / "llama", batch=2)
    four = compute(configs / "llama", batch=8, gpus=4)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(four, name) == -(-getattr(one, name) // 4)
    # at the end all gradients are divided but the embedding's, which is there with its part
    last = 4 * 100 * 32
    assert four.peaks[0] == one.peaks[0]
    assert one.peaks[-1] - four.peaks[-1] == 3 * (one.gradients - last) // 4 - last // 4
    assert (four.activations, four.prompt) == (one.activations, one.prompt)


def test_parts_of_the_memory(configs):
    plain = compute(configs / "llama", "flash")
    elements = sum(x.numel() for x in LlamaForCausalLM(LlamaConfig.from_pretrained(
        configs / "llama")).parameters())  # fmt: skip
    assert plain.gradients == 4 * elements
    assert plain.optimizer == 8 * elements
    assert plain.cache == 4 * 2 * 64 * 16  # float32, keys and values, T, D
    assert plain.activations_checkpointed < plain.activations
    assert plain.training_checkpointed < plain.training
    assert plain.training >= plain.parameters + plain.optimizer + plain.gradients
    state = attnzoo.estimate_memory(configs / "llama", "linear", length=64, batch=2)
    assert state.parameters == plain.parameters
    assert state.cache == 2 * compute(configs / "llama", "linear", length=32).cache
    extras = compute(configs / "llama", "delta", train="extras")
    assert 0 < extras.gradients < plain.gradients / 10


def test_an_encoder_does_not_decode(configs):
    use = compute(configs / "bert", "flash")
    assert use.cache is use.step is use.decoding is None
    assert use.inference > use.parameters


@pytest.mark.parametrize(
    "attention", ["softmax", pytest.param("linear", marks=pytest.mark.exhaustive)]
)
def test_long_inputs_follow_from_short_ones(configs, monkeypatch, attention):
    monkeypatch.setattr(memory, "SHORTEST", 64)
    model = estimator(configs / "llama", attention)
    assert model.sampled == (64, 128, 256)
    found = model.at(700).to_dict()
    for name, exact in model.compute(700).to_dict().items():
        assert found[name] == pytest.approx(exact, rel=0.03), name
    windows = estimator(configs / "llama", "longformer", options={"window": 32})
    assert windows.sampled == (128, 256, 512)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("llama", {"length": 0}, "length must be at least 1"),
        ("llama", {"optimizer": "adam"}, "adamw, adamw_8bit, adafactor, sgd"),
        ("llama", {"dtype": "float"}, None),
        ("llama", {"dtype": "half16"}, "float32 or bfloat16"),
        ("llama", {"train": "extras"}, "adds no parameters"),
        ("llama", {"gpus": 3}, "not divisible by gpus=3"),
        ("llama", {"load_in_4bit": True}, "train='full' trains them"),
        ("bert", {"length": 65}, "64 positions"),
        ("t5", {}, "does not run on token ids alone"),
        ("none", {}, "no config.json"),
    ],
)
def test_unsupported_cases_are_refused(configs, model, changes, message):
    if message is None:
        assert compute(configs / model, **changes).parameters > 0
        return
    with pytest.raises(AttnzooError, match=message):
        compute(configs / model, **changes)


def test_copies_of_fake_models_share_their_mode(configs):
    """A copy of the mode frees its weak references to storages twice."""
    model, mode = fake_model(lambda: estimator(configs / "llama").build(64))
    with mode:
        copied = deepcopy(model)
    assert {x.fake_mode is mode for x in copied.parameters()} == {True}


def test_memory_that_depends_on_values_is_refused():
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with pytest.raises(AttnzooError, match="depends on values of floats"), counted(mode):
        torch.ones(3).nonzero()


def test_command(configs, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnzoo", "memory", *map(str, arguments)])
        monkeypatch.setattr(terminal.console, "width", 200)
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code, captured.out + captured.err

    size = configs / "llama", "--max-length", 64
    given = ("--gpus", 2, "--batch-size", 2, "--bf16", "--optim", "sgd")
    code, out = run(*size, *given, "--attention", "linear:feature_map=relu", "--json")
    assert code == 0
    (row,) = json.loads(out)
    assert (row["reason"], row["spec"]["backend"], row["gpus"]) == ("", "linear", 2)
    options = {"gpus": 2, "batch": 2, "bf16": True, "optimizer": "sgd"}
    expected = compute(configs / "llama", "linear", options={"feature_map": "relu"}, **options)
    assert row["computed"] == expected.to_dict()
    given = ("--attention", "flash:impl=sdpa", "--attention", "linformer:num_rows=4")
    code, out = run(*size, *given)
    assert code == 0
    assert "is not causal" not in out
    assert "a projection of the full sequence is not" in out
    assert "checkpointed" in out
    code, out = run(configs / "bert", "--max-length", 128)
    assert code == 0
    assert "64 positions" in out
    code, out = run(configs / "llama", "--max-length", "many")
    assert code == 2
    assert "--max-length must be a size" in out
