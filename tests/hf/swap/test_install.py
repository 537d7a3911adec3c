"""Models that are built or loaded with a swap: extras are attached, initialised and kept."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

import attnzoo
from attnzoo.backends.softmax import SoftmaxBackend, SoftmaxConfig
from attnzoo.contract.backend import BACKENDS
from attnzoo.errors import AttnzooError, SpecError


class BiasedBackend(SoftmaxBackend):
    """Softmax with extras of every kind, none of which starts at zero or as a stock layer does."""

    def __init__(self, config: Any, geometry: Any) -> None:
        super().__init__(config, geometry)
        self.bias = nn.Parameter(torch.empty(geometry.num_heads, 1, geometry.head_dim))
        self.mixer = nn.Linear(geometry.head_dim, geometry.head_dim)
        self.register_buffer("features", torch.empty(3, 2))
        self.register_buffer("counts", torch.empty(4, dtype=torch.long))
        self.register_buffer("scratch", torch.empty(2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.bias, 5.0)
        with torch.no_grad():
            self.mixer.weight.fill_(7.0)  # not through torch.nn.init, which transformers guards
            self.mixer.bias.fill_(-1.0)
            self.features.fill_(2.5)
            self.counts.copy_(torch.arange(4))
            self.scratch.fill_(0.5)

    def attend(self, inputs: Any) -> Any:
        output = super().attend(inputs)
        shift = self.mixer(output.out) + self.bias + self.features.sum() + self.scratch.sum()
        return output._replace(out=output.out + 1e-3 * shift)


INITIAL = {"bias": 5.0, "mixer.weight": 7.0, "mixer.bias": -1.0, "features": 2.5}


@pytest.fixture
def biased(monkeypatch):
    """Register the backend for one test."""
    monkeypatch.setitem(BACKENDS, "biased", BiasedBackend)
    monkeypatch.setattr(BiasedBackend, "name", "biased")
    monkeypatch.setattr(BiasedBackend, "config_class", SoftmaxConfig)
    return attnzoo.AttentionSpec("biased")


@pytest.fixture
def stock(llama, tmp_path) -> Path:
    """A checkpoint of an ordinary Llama with tied embeddings."""
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


def load(path: Path, spec: Any = None, **options: Any) -> Any:
    config = hf.AutoConfig.from_pretrained(path)
    if spec is not None:
        config.attnzoo = spec.to_dict()
        options["attn_implementation"] = "attnzoo"
    return hf.AutoModelForCausalLM.from_pretrained(path, config=config, **options)


def extras(model: Any) -> dict[str, torch.Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: x for name, x in tensors if "attnzoo" in name}


def logits(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model(ids).logits


# -- built ---------------------------------------------------------------------------------------


def test_extras_are_attached_when_a_model_is_built(llama_config):
    config = llama_config()
    config.attnzoo = attnzoo.AttentionSpec("gated_linear", layers={"0": "flash"}).to_dict()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="attnzoo")
    keys = [name for name in model.state_dict() if "attnzoo" in name]
    assert keys
    assert all(name.startswith("model.layers.1.self_attn.attnzoo.") for name in keys)
    assert model.model.layers[0].self_attn.attnzoo.name == "flash"
    assert model.config.attn_implementation == "attnzoo"


def test_every_backend_is_attached_once(llama_config, monkeypatch):
    from attnzoo.hf import attach as backends

    attached = []
    original = backends.attach
    monkeypatch.setattr(
        backends,
        "attach",
        lambda layers, _: (attached.append(len(layers)), original(layers, _)),
    )
    config = llama_config()
    config.attnzoo = attnzoo.AttentionSpec("linear").to_dict()
    config._attn_implementation = "attnzoo"
    hf.LlamaForCausalLM(config)
    hf.LlamaModel(config)
    assert attached == [2, 2]  # once per model, although each contains models


def test_reset_parameters_runs_last_when_built(biased, llama_config):
    config = llama_config()
    config.attnzoo = biased.to_dict()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="attnzoo")
    check_initial(model, torch.float32)


def check_initial(model: Any, dtype: torch.dtype, but: tuple[str, ...] = ()) -> None:
    for layer in model.model.layers:
        backend = layer.self_attn.attnzoo
        tensors = {**dict(backend.named_parameters()), **dict(backend.named_buffers())}
        for name, value in {**INITIAL, "scratch": 0.5}.items():
            if name not in but:
                assert_close(tensors[name], torch.full_like(tensors[name], value))
            assert tensors[name].dtype == dtype
        if "counts" not in but:
            assert tensors["counts"].tolist() == [0, 1, 2, 3]


# -- loaded --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"dtype": "auto"}, torch.float32),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"device_map": "cpu"}, torch.float32),
    ],
)
def test_extras_missing_from_a_stock_checkpoint_are_initialised(options, dtype, biased, stock, ids):
    plain = load(stock, **options)
    model = load(stock, biased, **options)
    check_initial(model, dtype)
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    own = model.state_dict()
    assert all(torch.equal(x, own[name]) for name, x in plain.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert logits(model, ids).isfinite().all()


def test_loaded_extras_are_kept_and_only_missing_ones_initialised(biased, stock, tmp_path):
    model = load(stock, biased)
    with torch.no_grad():
        for x in extras(model).values():
            x.add_(1)
    model.save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(file)
    gone = [name for name in tensors if name.endswith(("attnzoo.bias", "mixer.bias", ".counts"))]
    assert len(gone) == 6
    save_file({n: x for n, x in tensors.items() if n not in gone}, file, {"format": "pt"})
    again = load(tmp_path / "whole")
    check_initial(again, torch.float32, but=("mixer.weight", "features"))
    for name, x in extras(again).items():
        if name.endswith(("mixer.weight", "features")):
            assert torch.equal(x, tensors[name])


@pytest.mark.parametrize(
    ("backend", "shards", "dtype"),
    [
        ("biased", {}, torch.bfloat16),
        ("biased", {"max_shard_size": "8KB"}, torch.float32),
        ("linear", {}, torch.float32),
        ("gated_linear", {"max_shard_size": "8KB"}, torch.bfloat16),
    ],
    ids=str,
)
def test_reload_is_bit_equal(backend, shards, dtype, biased, stock, tmp_path, ids):
    options = {"feature_map": "hedgehog"} if backend != "biased" else {}
    model = load(stock, attnzoo.AttentionSpec(backend, **options), dtype=dtype)
    with torch.no_grad():
        for name, x in extras(model).items():
            if x.is_floating_point() and "scratch" not in name:  # that one is not saved
                x.add_(torch.randn_like(x))
    model.save_pretrained(tmp_path / "out", **shards)
    assert bool(shards) == (tmp_path / "out" / "model.safetensors.index.json").exists()
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == dtype
    assert extras(again).keys() == extras(model).keys()
    assert all(torch.equal(x, extras(again)[name]) for name, x in extras(model).items())
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_other_heads_load_the_same_swap(llama, tmp_path, ids):
    model = llama()
    attnzoo.swap(model, "gated_linear", feature_map="hedgehog")
    model.save_pretrained(tmp_path)
    base = hf.AutoModel.from_pretrained(tmp_path)
    headed = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
        assert torch.equal(base(ids).last_hidden_state, expected)
        assert torch.equal(headed.model(ids).last_hidden_state, expected)


@pytest.mark.parametrize("backend", ["flash", "biased"])
def test_weights_offloaded_between_calls(backend, biased, llama, ids):
    """Our hooks work in layers that are wrapped by the hooks of accelerate's offloading."""
    model = llama()
    attnzoo.swap(model, backend)
    expected = logits(model, ids)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(logits(model, ids), expected)
    options = {"max_new_tokens": 3, "do_sample": False}
    plain = model.generate(ids, **options, use_cache=False)
    assert torch.equal(model.generate(ids, **options), plain)


# -- broken files --------------------------------------------------------------------------------


@pytest.fixture
def saved(stock, tmp_path) -> Path:
    model = load(stock, attnzoo.AttentionSpec("gated_linear"))
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def report(monkeypatch) -> list[str]:
    """Collect what transformers logs while it loads."""
    lines: list[str] = []
    logger = hf.utils.logging.get_logger("transformers.modeling_utils")
    for level in ("warning", "error"):
        monkeypatch.setattr(logger, level, lambda text, *_: lines.append(str(text)))
    return lines


def test_mismatching_extras_are_named(saved, report):
    file = saved / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("layers.1.self_attn.attnzoo.gate.bias"))
    tensors[name] = torch.zeros(3, 3)
    save_file(tensors, file, {"format": "pt"})
    with (
        pytest.warns(attnzoo.SwapWarning, match="saved under another swap"),
        pytest.raises(RuntimeError, match="mismatch"),
    ):
        load(saved)
    assert "attnzoo.gate.bias" in "".join(report)


# -- specs that do not fit -----------------------------------------------------------------------


def test_implementation_without_a_spec(stock):
    with pytest.raises(SpecError, match=r"config\.attnzoo = .*attnzoo\.swap"):
        hf.AutoModelForCausalLM.from_pretrained(stock, attn_implementation="attnzoo")


def test_spec_without_an_implementation(stock):
    """The spec is what was asked for; tests/hf/swap/test_switching.py disables it."""
    config = hf.AutoConfig.from_pretrained(stock)
    config.attnzoo = attnzoo.AttentionSpec("linear").to_dict()
    model = hf.AutoModelForCausalLM.from_pretrained(stock, config=config)
    assert {row.backend for row in attnzoo.describe(model)} == {"linear"}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"backend": "linnear"}, "Did you mean 'linear'"),
        ({"backend": "linear", "options": {"feature_mapp": "relu"}}, "Did you mean 'feature_map'"),
        ({"version": 2, "backend": "linear"}, "upgrade attnzoo"),
        ({"backend": "linear", "layers": {"2": "flash"}}, "layers are 0 to 1"),
        ("linear please", "linear please"),
    ],
)
def test_bad_specs_are_refused_when_loading(stock, data, why):
    config = hf.AutoConfig.from_pretrained(stock)
    config.attnzoo = data
    with pytest.raises(AttnzooError, match=why):
        hf.AutoModelForCausalLM.from_pretrained(stock, config=config, attn_implementation="attnzoo")


# -- without the plugin --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        ("AutoModelForCausalLM", "model type `attnzoo_llama`"),
        ("LlamaForCausalLM", 'attn_implementation="attnzoo"'),
    ],
)
def test_without_attnzoo_loading_raises(cls, message, saved, fresh_python):
    done = fresh_python(
        "import sys\n"
        f"from transformers import {cls}\n"
        "assert 'attnzoo' not in sys.modules\n"
        f"{cls}.from_pretrained(sys.argv[1])\n",
        saved,
    )
    assert done.returncode != 0
    assert "ValueError" in done.stderr
    assert message in done.stderr
