"""Memory of a step of Adafactor, against the sizes of its paper and a real step."""

import pytest
from transformers import LlamaConfig

from attnzoo.errors import ConfigError
from attnzoo.evaluation.memory import build_model, compute, measure
from attnzoo.evaluation.memory_case import MemoryCase

pytestmark = [
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You have passed exclude_modules:UserWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 300}
    config = LlamaConfig(**sizes, num_attention_heads=4, architectures=["LlamaForCausalLM"])
    config.save_pretrained(path := tmp_path_factory.mktemp("config"))
    return str(path)


def case(folder, **changes):
    return MemoryCase(**{"path": folder, "length": 8, "optimizer": "adafactor", **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},  # whose state is in float32
        {"train": "lora", "accumulate": 2, "batch": 2},
    ],
)
def test_adafactor_keeps_rows_and_columns(folder, changes):
    """Shazeer and Stern, 2018, arXiv:1804.04235: of a matrix n + m numbers instead of nm."""
    trial = case(folder, **changes)
    computed, measured = compute(trial)[0], measure(trial)
    trained = [x for x in build_model(trial).parameters() if x.requires_grad]
    numbers = sum(sum(x.shape) for x in trained)  # a vector has one of each element
    root_mean_squares = len(trained)  # of the weights, which transformers keeps
    assert computed.optimizer == measured.optimizer == 4 * (numbers + root_mean_squares)
    assert computed.update == pytest.approx(measured.update, abs=64)  # of scalars
    assert computed.training == pytest.approx(measured.training, rel=0.01)
    adamw = compute(case(folder, **changes, optimizer="adamw"))[0]
    assert computed.optimizer < adamw.optimizer / (2 if "train" in changes else 10)


def test_adafactor_is_not_sharded(folder):
    with pytest.raises(ConfigError, match="'adafactor' updates whole tensors, but sharding='fsdp2"):
        case(folder, gpus=2, batch=2)
    assert compute(case(folder, gpus=2, batch=2, sharding="ddp"))[0].optimizer > 0
