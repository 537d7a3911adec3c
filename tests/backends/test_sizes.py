"""Untrusted specs: no size in a spec hangs, exhausts the memory or raises a raw error."""

import dataclasses
import json
import time
import tracemalloc

import pytest

from attnzoo import AttentionSpec
from attnzoo.contract.config import MAX_SIZE
from attnzoo.errors import AttnzooError, ConfigError, SpecError
from attnzoo.hf.saving.files import empty_model
from attnzoo.registry import available_backends, get_backend

DIGITS = 10**5000  # Python converts no integer of so many digits to text


def nested(kind, levels=50_000):
    value = kind()
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


def sizes():
    for backend in available_backends():
        for field in dataclasses.fields(get_backend(backend).config_class):
            if "int" in str(field.type):
                yield backend, field.name


@pytest.mark.parametrize(("backend", "option"), list(sizes()))
def test_every_size_has_an_upper_bound(backend, option):
    for value in (2**63, 2**64, DIGITS, [DIGITS]):
        with pytest.raises(ConfigError, match=rf"\.{option} ") as caught:
            AttentionSpec(backend, **{option: value})
        assert "must be" in str(caught.value)
        assert len(str(caught.value)) < 1000
    if option != "seed":
        with pytest.raises(ConfigError, match=rf"\.{option} "):
            AttentionSpec(backend, **{option: MAX_SIZE + 1})


def test_a_float_option_is_finite():
    for value in (10**400, -(10**400), DIGITS, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"LinearConfig\.eps must be float, got "):
            AttentionSpec("linear", eps=value)


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize(
    "data",
    [
        lambda x: x,
        lambda x: {"backend": x},
        lambda x: {"backend": "linear", "version": x},
        lambda x: {"backend": "linear", "options": x},
        lambda x: {"backend": "linear", "options": {"window": x}},
        lambda x: {"backend": "longformer", "options": {"window": x}},
        lambda x: {"backend": "linear", "layers": x},
        lambda x: {"backend": "linear", "layers": {"1": x}},
        lambda x: {"backend": "linear", "else": x},
    ],
)
def test_deeply_nested_data_is_refused(kind, data):
    with pytest.raises(AttnzooError) as caught:
        AttentionSpec.from_dict(data(nested(kind)))
    assert len(str(caught.value)) < 1000


def test_a_range_of_many_layers_is_read_quickly():
    start = time.perf_counter()
    spec = AttentionSpec("flash", layers={"0-99999": "softmax"})
    with pytest.raises(SpecError, match=r"The spec names layer 4, 5, .*\.\.\., but .* 0 to 3"):
        spec.check_layers(range(4))
    with pytest.raises(SpecError, match="Layer 0 is named twice"):
        AttentionSpec("flash", layers={",".join(["0-99999"] * 1000): "softmax"})
    assert time.perf_counter() - start < 5  # a quadratic search takes minutes


def test_ranges_of_submodules_are_not_expanded():
    layers = {f"m{i}.{part}": "flash" for i in range(150) for part in ("0-49999,60000", "70000")}
    tracemalloc.start()
    spec = AttentionSpec.from_dict({"backend": "softmax", "layers": layers})
    with pytest.raises(SpecError, match=r"names layer 0, 1, 3, 4, .*but those within 'm0' are 2"):
        spec.check_layers([2], ["m0.a.attention"])
    assert spec.for_layer(60000, "m7.x").backend == "flash"
    assert spec.for_layer(60001, "m7.x").backend == "softmax"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    "data",
    [
        lambda x: {"backend": x},
        lambda x: {"backend": f"flash:{x}"},
        lambda x: {"backend": f"flash:{x}=1"},
        lambda x: {"backend": f"flash:window={'[' * len(x)}"},
        lambda x: {"backend": f"flash:window={'1' * len(x)}"},
        lambda x: {"backend": "flash", "options": {x: 1}},
        lambda x: {"backend": "flash", "options": {"impl": x}},
        lambda x: {"backend": "linear", "options": {"feature_map": x}},
        lambda x: {"backend": "linear", "options": {"feature_map": f"{x}:{x}"}},
        lambda x: {"backend": "gated_linear", "options": {"gate": x}},
        lambda x: {"backend": "flash", "layers": {x: "flash"}},
        lambda x: {"backend": "flash", "layers": {f"{x}.1": "flash"}},
        lambda x: {"backend": "flash", "layers": {f"0,{x}!": "flash"}},
        lambda x: {"backend": "flash", "layers": {"0": x}},
        lambda x: {"backend": "flash", "else": x},
        lambda x: {"backend": "flash", x: 1},
        lambda x: {"backend": "flash", "version": x},
    ],
)
def test_a_long_name_of_a_file_is_shortened_in_the_message(data):
    start = time.process_time()
    with pytest.raises(AttnzooError) as caught:
        AttentionSpec.from_dict(data("x" * 10**6)).check_layers([0], ["model.attention"])
    assert len(str(caught.value)) < 3000
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "fields",
    [
        {"x": nested(list, 300)},
        {"rope_scaling": nested(dict, 300)},
        {"architectures": ["x" * 10**6]},
        {"architectures": {"0": "x"}},
        {"model_type": "x" * 10**6},
        {"hidden_act": {"x" * 10**6: 1}},
    ],
    ids=["list", "dict", "class", "mapping", "type", "field"],
)
def test_a_config_that_is_no_config_is_one_short_message(fields, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    with pytest.raises(AttnzooError) as caught:
        empty_model(tmp_path)
    assert len(str(caught.value)) < 9000


@pytest.mark.parametrize("backend", ["linear", "gated_linear", "performer", "delta"])
@pytest.mark.parametrize(("option", "most"), [("window", 2**20), ("num_sinks", 2**12)])
def test_a_state_of_fixed_size_has_a_bound(backend, option, most):
    options = {"window": 2**20, "num_sinks": 5, option: most}
    AttentionSpec(backend, **options)
    with pytest.raises(ConfigError, match=rf"\.{option} must be at most {most}, got {most + 1}"):
        AttentionSpec(backend, **{**options, option: most + 1})


def test_the_reach_of_a_dilated_window_has_a_bound():
    for window, dilation in ((2**12, 2**8), ([2**20, 3], [1, 2**18]), (3, [5, 7])):
        AttentionSpec("longformer", window=window, dilation=dilation)
    for window, dilation in ((4096, 4096), (2**24, 2**24), ([3, 2**19], [9, 3]), (7, [1, 2**18])):
        with pytest.raises(ConfigError, match=r"window times dilation must be at most 1048576"):
            AttentionSpec("longformer", window=window, dilation=dilation)


INDEXER = {"score": "indexer"}


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("delta", {"short_convolution": 2**10 + 1}, "short_convolution must be at most 1024"),
        ("block_sparse", {"block_size": 2**12 + 1}, "block_size must be at most 4096"),
        ("block_sparse", {**INDEXER, "index_heads": 2**11}, "index_heads must be at most 1024"),
        (
            "block_sparse",
            {**INDEXER, "index_head_dim": 2**11},
            "index_head_dim must be at most 1024",
        ),
        ("linformer", {"block": 2**16}, "got 8,192 times 65,536"),
        ("linformer", {"num_rows": 2**12, "max_length": 2**16 + 1}, "got 4,096 times 65,537"),
    ],
)
def test_weights_and_padding_have_a_bound(backend, options, message):
    half = {name: x // 2 if isinstance(x, int) else x for name, x in options.items()}
    AttentionSpec(backend, **half)
    with pytest.raises(ConfigError, match=message):
        AttentionSpec(backend, **options)
