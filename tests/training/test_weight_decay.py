"""Weight decay leaves parameters alone that set a decay or a mixture."""

import peft
import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.backends.feature_maps.base import FEATURE_MAPS
from attnzoo.backends.gates.decays import GATES
from attnzoo.training.trainer import LogitDistillationTrainer
from attnzoo.training.transfer import extras
from tests.helpers import tiny_llama
from tests.training.short_runs import arguments

SWAPS = {
    **{f"gate {name}": ("gated_linear", {"gate": name}) for name in GATES},
    **{
        f"map {name}": ("linear", {"feature_map": name, "normalize": not cls.signed})
        for name, cls in FEATURE_MAPS.items()
    },
    "hybrid": ("linear", {"window": 4, "feature_map": "hedgehog"}),
    "gated hybrid": ("gated_linear", {"window": 4}),
    "performer": ("performer", {"window": 4, "num_features": 8}),
    "delta": ("delta", {"window": 4, "short_convolution": 4, "output_gate": True}),
    "delta, per channel": ("delta", {"window": 4, "gate": "vector"}),
    "linformer": ("linformer", {"block": 4, "num_rows": 2, "sharing": "none"}),
    "indexer": ("block_sparse", {"score": "indexer"}),
}
# Matrices that multiply hidden states, keys or queries, and the taps of a convolution
MATRICES = {
    *("weight", "down", "up", "forget_weight", "input_weight", "write_weight", "mix_weight"),
    *("query_weight", "key_weight", "head_weight", "query_residual", "key_residual"),
    *("key_rows", "value_rows"),
}


def names(model):
    return {id(p): name for name, p in model.named_parameters()}


def decays(optimizer):
    """Return the weight decay of every parameter."""
    return {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }


@pytest.fixture
def model():
    return attnzoo.swap(tiny_llama(), "delta", window=4, gate="vector")


@pytest.mark.parametrize("name", SWAPS)
def test_every_parameter_of_a_backend_that_is_no_matrix_is_exempt(name):
    backend, options = SWAPS[name]
    model = attnzoo.swap(tiny_llama(), backend, **options)
    decayed = set(hf.Trainer.get_decay_parameter_names(None, model))
    found = {name.rpartition(".")[2]: name in decayed for name in extras(model)}
    assert found == {name: name in MATRICES for name in found}


def trainer_optimizer(model, folder):
    arguments = hf.TrainingArguments(
        output_dir=str(folder), weight_decay=0.1, use_cpu=True, report_to=[]
    )
    return hf.Trainer(model=model, args=arguments).create_optimizer()


@pytest.mark.usefixtures("any_peft")
@pytest.mark.parametrize("adapter", [False, True])
def test_trainer(adapter, model, tmp_path):
    if adapter:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    found, by_id = decays(trainer_optimizer(model, tmp_path)), names(model)
    exempt = {by_id[x].rpartition(".")[2] for x, value in found.items() if value == 0}
    added = {"far_log_weight", "mix_lse", "log_rate", "bias", "write_bias"}
    assert exempt == (added if adapter else added | {"weight"})  # of norms
    assert set(found.values()) == {0.0, 0.1}


def test_rates_and_decays_of_groups(model, tmp_path):
    """What is added, attention's own weights and the rest have rates of their own."""
    args = arguments(
        tmp_path,
        weight_decay=0.1,
        train="full",
        learning_rate=3e-4,
        attention_learning_rate=7e-4,
        extras_learning_rate=2e-3,
    )
    optimizer = LogitDistillationTrainer(model, args).create_optimizer()
    assert decays(optimizer) == decays(trainer_optimizer(model, tmp_path))
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    for name, p in model.named_parameters():
        own = 7e-4 if "self_attn" in name else 3e-4
        assert rates[id(p)] == (2e-3 if ".attnzoo." in name else own), name


def test_gates_of_plugins_exempt_parameters(monkeypatch):
    class OwnGate(attnzoo.Gate):
        no_weight_decay = ("half_life",)

        def __init__(self, config, geometry):
            super().__init__(config, geometry)
            self.half_life = torch.nn.Parameter(torch.ones(geometry.num_key_heads))
            self.matrix = torch.nn.Parameter(torch.ones(2, 2))

        def log_decay(self, k, hidden_states):
            return -self.half_life.exp()

    monkeypatch.setitem(GATES, "own", OwnGate)
    model = attnzoo.swap(tiny_llama(), "gated_linear", gate="own")
    decayed = set(hf.Trainer.get_decay_parameter_names(None, model))
    assert {name.rpartition(".")[2] for name in extras(model) if name in decayed} == {"matrix"}
