"""Optimizers by name; `nox --session bitsandbytes` installs the package of those in 8 bits."""

import copy
import importlib.util
import io
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from accelerate.utils import DistributedType
from torch import nn

import attnzoo
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.evaluation.memory import optimizer_bytes
from attnzoo.training import four_bits
from attnzoo.training import optimizer as optimizers
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.optimizer import (
    BITSANDBYTES,
    EIGHT_BITS,
    PAGED,
    MuonWithAdamW,
    make_optimizer,
    require_optimizer,
)
from attnzoo.training.transfer import extras

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes, which `nox --session bitsandbytes` installs",
)
ADAMW_8BIT = pytest.param("adamw_8bit", marks=needs_bitsandbytes)


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


def run_config(optim, **changes):
    options = {"batch_size": 4, "checkpoint_every": 3, "optim": optim, **changes}
    return FinetuneConfig(
        **{"steps": 6, "row_length": 32, "judged_rows": 2, "train": "full", "tune_softmax": False},
        loop=LoopConfig(**options),
    )


@pytest.mark.parametrize("optim", ["muon", "adafactor", ADAMW_8BIT])
def test_a_resumed_run_has_the_same_losses(wide, text, spec, tmp_path, interrupt, optim):
    config = run_config(optim)
    finetune(wide, spec, [text], tmp_path / "whole", config)
    interrupt(5, finetune, wide, spec, [text], tmp_path / "parts", config)
    finetune(wide, spec, [text], tmp_path / "parts", config, resume=True)
    assert read_losses(tmp_path / "parts") == read_losses(tmp_path / "whole")


def adamw(optimizer, parameters, gradients, rates, *, betas, decay):
    """Return weights after steps of AdamW in float64 (Loshchilov and Hutter, arXiv:1711.05101)."""
    found = []
    for p, steps, rate in zip(parameters, gradients, rates, strict=True):
        w, m, v = p.double(), torch.zeros_like(p.double()), torch.zeros_like(p.double())
        for number, g in enumerate(steps, 1):
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            root = (v / (1 - betas[1] ** number)).sqrt() + 1e-8
            w = w * (1 - rate * decay) - rate * m / (1 - betas[0] ** number) / root
        found.append(w)
    return found


@needs_bitsandbytes
@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw_bnb_8bit"])
def test_8_bits_take_steps_of_adamw_with_the_rates_of_groups(optim):
    """Embeddings and small tensors have a state in 32 bits, as with transformers' Trainer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"e": nn.Embedding(80, 64), "l": nn.Linear(64, 80), "s": nn.Linear(8, 8)})
    parameters = [model["e"].weight, model["l"].weight, model["l"].bias, model["s"].weight]
    rates = [1e-2, 1e-3, 1e-3, 1e-2]
    groups = [
        {"params": [parameters[0], parameters[3]], "lr": 1e-2},
        {"params": [parameters[1], parameters[2]], "lr": 1e-3},
    ]
    before = [p.detach().clone() for p in parameters]
    optimizer = make_optimizer(optim, model, groups, weight_decay=0.0, betas=(0.8, 0.9))
    gradients = [[torch.randn_like(p) for _ in range(5)] for p in parameters]
    for number in range(5):
        for p, steps in zip(parameters, gradients, strict=True):
            p.grad = steps[number].clone()
        optimizer.step()
    exact = adamw(optimizer, before, gradients, rates, betas=(0.8, 0.9), decay=0.0)
    bits = [optimizer.state[p]["state1"].dtype for p in parameters]
    assert bits == [torch.float32, torch.uint8, torch.float32, torch.float32]
    for p, w, start, kind in zip(parameters, exact, before, bits, strict=True):
        error = (p.double() - w).norm() / (w - start).norm()
        assert error < (0.05 if kind == torch.uint8 else 1e-5)


@needs_bitsandbytes
def test_memory_counts_the_state_in_8_bits(wide):
    """Of all weights, and of small tensors alone, which have no levels."""
    use = attnzoo.estimate_memory(wide, length=16, optimizer="adamw_8bit")
    model = hf.AutoModelForCausalLM.from_pretrained(wide)
    small = [p for p in model.parameters() if p.numel() < 4096]
    for trained in (list(model.parameters()), small):
        groups = [{"params": trained, "lr": 1e-3}]
        optimizer = make_optimizer("adamw_8bit", model, groups, weight_decay=0.0)
        for p in trained:
            p.grad = torch.ones_like(p)
        optimizer.step()
        values = (x for state in optimizer.state.values() for x in state.values())
        tensors = {x.data_ptr(): x.nbytes for x in values if isinstance(x, torch.Tensor)}
        levels = 0 if trained is small else 2 * 256 * 4  # not counted: a table for each moment
        assert optimizer_bytes(model, trained, "adamw_8bit")[0] == sum(tensors.values()) - levels
        if trained is not small:
            assert use.optimizer == sum(tensors.values()) - levels


@needs_bitsandbytes
def test_a_loaded_state_is_paged_again(monkeypatch):
    """Loading copies it to plain memory of the GPU, where bitsandbytes would not find its pages."""
    model = nn.Linear(64, 80)
    made = []

    def get_state_buffer(self, p, dtype=torch.float32):
        made.append(torch.zeros_like(p, dtype=dtype))
        made[-1].is_paged = True
        return made[-1]

    groups = [{"params": list(model.parameters()), "lr": 1e-2}]
    cls = optimizers._with_group_bits(importlib.import_module("bitsandbytes.optim").AdamW)
    monkeypatch.setattr(cls.__mro__[3], "get_state_buffer", get_state_buffer)
    monkeypatch.setattr(cls.__mro__[3], "prefetch_state", lambda self, p: None)
    first, second = (cls(groups, optim_bits=8, is_paged=True) for _ in range(2))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    first.step()
    torch.save(first.state_dict(), stream := io.BytesIO())
    stream.seek(0)
    made.clear()
    second.load_state_dict(torch.load(stream, weights_only=True))
    held = [second.state[p][key] for p in model.parameters() for key in ("state1", "state2")]
    assert [id(x) for x in held] == [id(x) for x in made]
    exact = [first.state[p][key] for p in model.parameters() for key in ("state1", "state2")]
    torch.testing.assert_close(held, exact, rtol=0, atol=0)


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix():
    groups = [{"params": [p := nn.Parameter(torch.randn(6, 4))], "lr": 0.5}]
    optimizer = make_optimizer("adafactor", nn.Module(), groups, weight_decay=0.0)
    before, p.grad = p.detach().clone(), torch.randn(6, 4)
    optimizer.step()
    state = optimizer.state[p]
    assert (state["exp_avg_sq_row"].shape, state["exp_avg_sq_col"].shape) == ((6,), (4,))
    # Shazeer and Stern, 2018, arXiv:1804.04235, algorithms 2 and 5: the first step has a decay of 0
    square = p.grad.double() ** 2 + 1e-30
    rows, columns = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
    update = p.grad.double() / (rows * columns / rows.mean()).sqrt()
    update /= update.square().mean().sqrt().clamp(min=1)
    torch.testing.assert_close(p.double(), before.double() - 0.5 * update, rtol=1e-5, atol=1e-6)


def test_unknown_optimizer():
    with pytest.raises(ConfigError, match=r"optim must be one of .* Did you mean 'muon'"):
        LoopConfig(optim="muonn")


def test_adafactor_has_no_betas():
    with pytest.raises(ConfigError, match=r"betas=\(0.9, 0.999\) are of AdamW"):
        LoopConfig(optim="adafactor", betas=(0.9, 0.999))


@pytest.mark.parametrize("optim", BITSANDBYTES)
def test_without_bitsandbytes_its_optimizers_are_refused(
    optim, monkeypatch, saved, text, spec, tmp_path
):
    monkeypatch.setattr(four_bits, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=rf"optim='{optim}' needs bitsandbytes.*'adafactor'"):
        finetune(saved, spec, [text], tmp_path / "out", run_config(optim))
    assert not (tmp_path / "out").exists()


def on(device, kind=DistributedType.NO):
    return SimpleNamespace(device=torch.device(device), distributed_type=kind)


def test_optimizers_that_do_not_run_here_are_refused(monkeypatch):
    monkeypatch.setattr(four_bits, "find_spec", lambda name: name)
    monkeypatch.setattr(optimizers, "is_bitsandbytes_available", lambda: True)
    for optim in ("paged_adamw_8bit", "paged_adamw_32bit"):
        require_optimizer(optim, on("cuda"))
        with pytest.raises(ConfigError, match=rf"'{optim}' moves its state.*use 'adamw_8bit'"):
            require_optimizer(optim, on("cpu"))
    fsdp, deepspeed = DistributedType.FSDP, DistributedType.DEEPSPEED
    for kind in (fsdp, deepspeed):
        require_optimizer("adamw_torch", on("cuda", kind))
        for optim in ("muon", "adafactor"):
            with pytest.raises(ConfigError, match=f"optim='{optim}' updates whole tensors"):
                require_optimizer(optim, on("cuda", kind))
    for optim in BITSANDBYTES:
        with pytest.raises(ConfigError, match=r"'got mixed torch\.Tensor and DTensor'"):
            require_optimizer(optim, on("cuda", fsdp))
    for optim in EIGHT_BITS:
        require_optimizer(optim, on("cuda", deepspeed))
    for optim in PAGED:
        with pytest.raises(ConfigError, match="not tested with DeepSpeed's flat partitions"):
            require_optimizer(optim, on("cuda", deepspeed))
    monkeypatch.setattr(optimizers, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(UnsupportedError, match="needs a newer bitsandbytes"):
        require_optimizer("adamw_8bit", on("cpu"))
