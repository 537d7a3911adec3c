"""Rules on backends as modules: determinism, random numbers, saving, initial values."""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.backend import AttentionBackend
from attnzoo.testing.trial import Trial, seed_torch


def determinism(trial: Trial) -> str | None:
    """One seed gives the same parameters, and one input the same output, bit for bit."""
    first, second = trial.make(seed=1), trial.make(seed=1)
    for (name, one), two in zip(_tensors(first).items(), _tensors(second).values(), strict=True):
        if not torch.equal(one, two):
            trial.fail(f"{name} differs between two backends built under one seed")
    x = trial.sequence(2, trial.length)
    out = trial.run(x).out
    if not torch.equal(out, trial.run(x).out):
        trial.fail("a second call with the same inputs gives another output")
    return None


def random_state(trial: Trial) -> str | None:
    """Only parameter initialisation uses a global random state, and only that of torch.

    Building a backend may draw from torch's global generator, as ``torch.nn.Linear`` does, but must
    not seed it. In evaluation mode calls draw no random numbers.
    """
    others = _other_random_states()
    after = []
    for seed in (1, 2):
        seed_torch(seed)
        trial.cls(trial.config, trial.geometry)
        after.append(torch.get_rng_state())
    if torch.equal(*after):
        trial.fail("building it seeds torch's global generator")
    if others != _other_random_states():
        trial.fail("building it draws from Python's or numpy's global generator")
    before = _torch_random_states()
    leaves = trial.sequence(1, trial.length).map(lambda t: t.requires_grad_())
    trial.run(leaves).out.sum().backward()
    trial.backend.zero_grad()
    if before != _torch_random_states():
        trial.fail("a call draws from or seeds torch's global generator")
    if others != _other_random_states():
        trial.fail("a call draws from or seeds Python's or numpy's global generator")
    return None


def _torch_random_states() -> list[bytes]:
    states = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    return [state.numpy().tobytes() for state in states]


def _other_random_states() -> tuple[Any, bytes]:
    numpy: Any = sys.modules.get("numpy")  # if it is not imported, nothing drew from it
    return random.getstate(), pickle.dumps(numpy and numpy.random.get_state(legacy=False))


def saving(trial: Trial) -> str | None:
    """A state dict contains all buffers and reproduces the outputs bit for bit."""
    ours, other = trial.backend, trial.make(seed=5).to(trial.dtype).eval()
    if hasattr(type(ours), "__deepcopy__"):
        trial.fail("it has a __deepcopy__, which PEFT's wrapper around it would take for its own")
    saved = ours.state_dict()
    for name, _ in ours.named_buffers():
        if name not in saved:
            trial.fail(f"the buffer {name} is not saved; register it as persistent")
    if _ties(ours) != _ties(other):
        trial.fail(f"tied tensors differ between two instances: {_ties(ours)}, {_ties(other)}")
    other.load_state_dict({name: value.clone() for name, value in saved.items()})
    if _ties(ours) != _ties(other):
        trial.fail(f"tied tensors are {_ties(ours)} before loading, {_ties(other)} after it")
    x = trial.sequence(2, trial.length)
    out, loaded = trial.run(x).out, _call(trial, other, x)
    if not torch.equal(out, loaded):
        worst = float((out - loaded).abs().max())
        trial.fail(f"an instance that loads the state dict differs by {worst:.2e}; the budget is 0")
    return None


def _call(trial: Trial, backend: AttentionBackend, x: Any) -> Tensor:
    out: Tensor = backend(*x[:3], hidden_states=x.hidden, mask=trial.mask()).out
    return out


def _tensors(backend: AttentionBackend) -> dict[str, Tensor]:
    """Return parameters and buffers, tied ones under each of their names."""
    return {
        **dict(backend.named_parameters(remove_duplicate=False)),
        **dict(backend.named_buffers(remove_duplicate=False)),
    }


def _ties(backend: AttentionBackend) -> list[list[str]]:
    """Return the groups of names of one tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in _tensors(backend).items():
        groups.setdefault(id(tensor), []).append(name)
    return sorted(group for group in groups.values() if len(group) > 1)


def materializing(trial: Trial) -> str | None:
    """A backend built on the meta device and then reset has the usual initial values.

    ``from_pretrained`` builds models like this: tensors missing in the checkpoint are uninitialised
    until ``reset_parameters`` runs.
    """
    with torch.device("meta"):
        late = trial.cls(trial.config, trial.geometry)
    late.to_empty(device=trial.device)
    for tensor in _tensors(late).values():
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 1)
    usual, sure = trial.make(seed=1), trial.make(seed=2)
    built = {name: tensor.clone() for name, tensor in _tensors(usual).items()}
    for backend in (late, usual):
        seed_torch(3)
        backend.reset_parameters()
    for name, tensor in _tensors(late).items():
        if not bool(torch.isfinite(tensor).all()):
            trial.fail(f"reset_parameters leaves {name} without a value")
        if not torch.equal(tensor, _tensors(usual)[name]):
            trial.fail(f"reset_parameters gives {name} another value after the meta device")
        drawn = not torch.equal(built[name], _tensors(sure)[name])
        if not drawn and not torch.equal(tensor, built[name]):
            trial.fail(f"reset_parameters gives {name} another value than building does")
    if _ties(late) != _ties(usual):
        trial.fail(f"tied tensors are {_ties(usual)}, after the meta device {_ties(late)}")
    return None
