"""AttentionSpec: accepted and stored data, and the messages of errors."""

import json
from dataclasses import dataclass

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import attnzoo
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.errors import ConfigError, SpecError, UnknownBackendError
from attnzoo.registry import get_backend
from attnzoo.spec import AttentionSpec, LayerSpec, parse_layers

WHOLE = {
    "version": 1,
    "backend": "linear",
    "options": {"feature_map": "relu"},
    "layers": {"0-1,5": {"backend": "flash"}, "3": {"backend": "flash", "options": {"window": 64}}},
    "else": {"backend": "softmax"},
}


@pytest.mark.parametrize(
    "data",
    [
        WHOLE,
        {"version": 1, "backend": "flash"},
        {"version": 1, "backend": "flash", "options": {"window": 7}},
        {"version": 1, "backend": "gated_linear", "layers": {"2": {"backend": "softmax"}}},
    ],
)
def test_round_trip_through_plain_data(data):
    spec = AttentionSpec.from_dict(data)
    assert spec.to_dict() == data
    assert AttentionSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert eval(repr(spec), {"AttentionSpec": AttentionSpec}) == spec


def test_a_spec_prints_as_the_call_that_makes_it():
    spec = AttentionSpec("linear", window=4, eps=1e-12, layers={"0": "flash"}, else_="softmax")
    text = "AttentionSpec('linear', window=4, layers={'0': 'flash'}, else_='softmax')"
    assert repr(spec) == text


def test_python_and_json_make_the_same_spec():
    spec = AttentionSpec(
        "linear",
        feature_map="relu",
        layers={"0-1,5": "flash", 3: {"backend": "flash", "options": {"window": 64}}},
        else_="softmax",
    )
    assert spec.to_dict() == WHOLE
    assert spec == AttentionSpec.from_dict(WHOLE)
    assert spec != AttentionSpec("linear")
    assert spec != WHOLE


def test_layers_take_their_own_entry():
    spec = AttentionSpec.from_dict(WHOLE)
    names = [spec.for_layer(number).backend for number in range(7)]
    assert names == ["flash", "flash", "linear", "flash", "linear", "flash", "linear"]
    assert spec.for_layer(3).options == {"window": 64}
    assert spec.for_layer(0).options == {}
    spec.check_layers(range(6))


def test_defaults_are_not_stored():
    spec = AttentionSpec("linear", feature_map="elu+1", impl="auto")
    assert spec.to_dict() == {"version": 1, "backend": "linear"}


@pytest.mark.parametrize("missing", ["version", "options"])
def test_optional_data(missing):
    data = {"version": 1, "backend": "flash", "options": None}
    del data[missing]
    assert AttentionSpec.from_dict(data) == AttentionSpec("flash")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"backend": "lineer"}, UnknownBackendError, "Did you mean 'linear'?"),
        ({"backend": "xyz"}, UnknownBackendError, "Available: .*flash.*softmax"),
        ({"backend": 7}, UnknownBackendError, "by name, got 7"),
        ({"backend": None}, UnknownBackendError, "got None"),
        ({"backend": ["flash"]}, UnknownBackendError, "got .'flash'."),
        ({"backend": "flash", "options": {"windw": 3}}, ConfigError, "Did you mean 'window'?"),
        ({"backend": "flash", "options": {"window": "3"}}, ConfigError, "int or None, got '3'"),
        ({"backend": "flash", "options": {"window": 3.0}}, ConfigError, "int or None, got 3.0"),
        ({"backend": "flash", "options": {"window": True}}, ConfigError, "got True"),
        ({"backend": "flash", "options": {"window": 0}}, ConfigError, "at least 1 token, got 0"),
        ({"backend": "flash", "options": {"window": float("nan")}}, ConfigError, "got nan"),
        ({"backend": "flash", "options": {"impl": "sdpaa"}}, ConfigError, "Did you mean 'sdpa'"),
        ({"backend": "flash", "options": {3: 4}}, ConfigError, "no option 3"),
        ({"backend": "flash", "options": {"layers": {}}}, ConfigError, "no option 'layers'"),
        ({"backend": "flash", "options": {"backend": "x"}}, ConfigError, "no option 'backend'"),
        ({"backend": "flash", "options": [1]}, SpecError, "must map names to values"),
        ({"backend": "flash", "options": []}, SpecError, "must map names to values"),
        ({"backend": "linear", "options": {"eps": float("nan")}}, ConfigError, "float, got nan"),
        ({"backend": "linear", "options": {"eps": float("inf")}}, ConfigError, "float, got inf"),
        ({"backend": "linear", "options": {"feature_map": "rela"}}, ConfigError, "mean 'relu'"),
        ({"backend": "flash", "version": 2}, SpecError, "reads up to 1; upgrade"),
        ({"backend": "flash", "version": 0}, SpecError, "at least 1, got 0"),
        ({"backend": "flash", "version": "1"}, SpecError, "at least 1, got '1'"),
        ({"backend": "flash", "version": True}, SpecError, "at least 1, got True"),
        ({"backend": "flash", "layer": {}}, SpecError, "Did you mean 'layers'?"),
        ({"backend": "flash", "layers": ["0"]}, SpecError, "must map layer numbers"),
        ({"backend": "flash", "layers": {"0": 5}}, SpecError, "layers.'0'. must be a backend"),
        ({"backend": "flash", "layers": {"0": {"option": {}}}}, SpecError, "must be a backend"),
        (
            {"backend": "flash", "layers": {"0": {"backend": "flash", "option": {}}}},
            SpecError,
            "Did you mean 'options'?",
        ),
        ({"backend": "flash", "layers": {"0": "flsh"}}, UnknownBackendError, "mean 'flash'"),
        ({"backend": "flash", "layers": {"0-2": "linear", "2": "flash"}}, SpecError, "2 is named"),
        ({"backend": "flash", "layers": {"1,1": "linear"}}, SpecError, "Layer 1 is named twice"),
        ({"backend": "flash", "else": {"backend": "nope"}}, UnknownBackendError, "'nope'"),
        ({"backend": "flash", "else": 3}, SpecError, '"else" must be a backend'),
        ({"layers": {}}, SpecError, "A spec is plain data"),
        ("flash", SpecError, "A spec is plain data"),
        (None, SpecError, "A spec is plain data"),
    ],
)
def test_bad_data_is_refused(given, error, words):
    with pytest.raises(error, match=words) as caught:
        AttentionSpec.from_dict(given)
    assert isinstance(caught.value, ValueError)


def test_options_may_follow_a_name():
    """As on the command line, for all layers and in each exception."""
    expected = AttentionSpec(
        "linear",
        feature_map="elu+1",
        window=8,
        layers={"3": {"backend": "block_sparse", "options": {"top_k": 10}}},
        else_={"backend": "flash", "options": {"window": 64}},
    )
    exceptions = {"layers": {"3": "block_sparse:top_k=10"}, "else_": "flash: window=64"}
    assert AttentionSpec("linear:feature_map=elu+1,window=8", **exceptions) == expected
    assert AttentionSpec("linear:window=8", feature_map="elu+1", **exceptions) == expected
    data = {"backend": "linear:feature_map=elu+1,window=8", "layers": exceptions["layers"]}
    assert AttentionSpec.from_dict({**data, "else": "flash:window=64"}) == expected
    lists = AttentionSpec("flash", layers={"0": "longformer:window=[4, 8],num_global=2"})
    assert lists.layers["0"].options == {"window": (4, 8), "num_global": 2}


RIGHT_FORM = r"{'backend': 'block_sparse', 'options': {'top_k': 10}}, or .*NAME:OPTION=VALUE"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"backend": "block_sparse", "top_k": 10}, RIGHT_FORM),
        ({"backend": "block_sparse", "options": {"top_k": 10}, "window": 4}, "'window': 4}}, or"),
        ("block_sparse:top_k", 'takes "NAME:OPTION=VALUE,...".*"options": {"window": 64}}'),
        ("block_sparse:top_k=1,top_k=2", "got 'top_k' twice"),
        ({"backend": "block_sparse:top_k=1", "options": {"top_k": 2}}, "option 'top_k' twice"),
        ({"name": "block_sparse"}, '"NAME:OPTION=VALUE,..." or {"backend": name'),
    ],
)
def test_a_wrong_entry_is_answered_with_the_right_form(entry, words):
    for whole in ({"layers": {"3": entry}}, {"else_": entry}):
        with pytest.raises(SpecError, match=words):
            AttentionSpec("linear", **whole)
    if "backend" in entry:
        with pytest.raises(SpecError, match=words):
            AttentionSpec.from_dict(entry)


def test_a_text_in_data_imports_no_code():
    for data in ({}, {"layers": {"0": "linear:feature_map=os:getcwd"}}):
        with pytest.raises(ConfigError, match="feature_map"):
            AttentionSpec.from_dict({"backend": "linear:feature_map=os:getcwd", **data})


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'feature_map'"):
        AttentionSpec("linear", featuremap="relu")
    with pytest.raises(SpecError, match="must map layer numbers"):
        AttentionSpec("linear", layers="0-1")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0", [0]), ("0-2", [0, 1, 2]), (" 1 , 4 - 5,11", [1, 4, 5, 11]), ("7-7", [7])],
)
def test_layer_ranges(text, numbers):
    assert [number for part in parse_layers(text) for number in part] == numbers


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "-1", "1-", "1,,2", "1;2", "0x1", "1.5", "0-99999999999", "9" * 5000]
)
def test_malformed_ranges_are_refused(text):
    with pytest.raises(SpecError, match=r'such as "0-1,11"'):
        parse_layers(text)


def test_layers_outside_the_model_are_refused():
    spec = AttentionSpec("linear", layers={"1,4-5": "flash"})
    with pytest.raises(SpecError, match=r"names layer 4, 5, but .* are 0 to 3"):
        spec.check_layers(range(4))
    with pytest.raises(SpecError, match="are none"):
        spec.check_layers([])


@dataclass(frozen=True, kw_only=True)
class ListConfig(BackendConfig):
    positions: tuple[int, ...] = ()
    name: str | None = None


def test_lists_from_json_become_tuples():
    config = ListConfig.from_options("mine", {"positions": [1, 2]})
    assert config.positions == (1, 2)
    assert config.changed_options() == {"positions": (1, 2)}
    stored = LayerSpec("mine", config.changed_options(), config).to_dict()
    assert stored == {"backend": "mine", "options": {"positions": [1, 2]}}
    with pytest.raises(ConfigError, match=r"Backend 'mine': .*positions must be a list of int"):
        ListConfig.from_options("mine", {"positions": [1, "2"]})


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 3), (0, 1), (4, 0), (-2, 1), (2, 4)])
def test_odd_head_grouping_is_refused(heads, key_heads):
    with pytest.raises(ConfigError, match="positive multiple of the number of key heads"):
        Geometry(num_heads=heads, num_key_heads=key_heads, head_dim=8, name="model.layers.0")


def test_geometry_fills_in_what_follows():
    geometry = Geometry(num_heads=4, num_key_heads=2, head_dim=16)
    assert (geometry.value_dim, geometry.scale) == (16, 0.25)


@pytest.mark.parametrize("name", ["softmax", "flash", "linear", "gated_linear"])
def test_options_of_every_backend_are_plain_data(name):
    options = get_backend(name).config_class().changed_options()
    assert options == {}
    assert json.loads(json.dumps(AttentionSpec(name).to_dict())) == {"version": 1, "backend": name}


ENCODER_DECODER = [
    (0, "model.encoder.layers.0.self_attn"),
    (1, "model.encoder.layers.1.self_attn"),
    (0, "model.decoder.layers.0.self_attn"),
    (0, "model.decoder.layers.0.encoder_attn"),
    (1, "model.decoder.layers.1.self_attn"),
    (1, "model.decoder.layers.1.encoder_attn"),
]


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("0", [0, 2, 3]),
        ("encoder.0", [0]),
        ("decoder.0-1", [2, 3, 4, 5]),
        ("model.decoder.layers.1", [4, 5]),
        ("encoder_attn", [3, 5]),
        ("layers.1.self_attn", [1, 4]),
        ("model.decoder.layers.0.self_attn", [2]),
    ],
)
def test_layers_are_selected_by_part_and_by_name(key, named):
    spec = AttentionSpec("linear", layers={key: "flash"})
    spec.check_layers(*zip(*ENCODER_DECODER, strict=True))
    flash = [i for i, at in enumerate(ENCODER_DECODER) if spec.for_layer(*at).backend == "flash"]
    assert flash == named
    assert AttentionSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"decoder.2": "flash"}, r"layer 2, but those within 'decoder' are 0 to 1"),
        ({"coder.0": "flash"}, r"within 'coder' are none"),
        ({"attn": "flash"}, r"'attn', but no .* end in encoder_attn, self_attn"),
        (
            {"0": "flash", "decoder.0": "softmax"},
            r"Layer 0 .model.decoder.* by '0' and 'decoder.0'",
        ),
        ({"decoder.1": "flash", "encoder_attn": "softmax"}, r"Layer 1 .* is named twice"),
    ],
)
def test_keys_that_match_no_layer_or_are_ambiguous_are_refused(layers, words):
    spec = AttentionSpec("linear", layers=layers)
    with pytest.raises(SpecError, match=words):
        spec.check_layers(*zip(*ENCODER_DECODER, strict=True))


@pytest.mark.parametrize(
    "text", ["decoder.", ".0", "decoder.0-", "a b", "decoder.1-0", "0.decoder"]
)
def test_malformed_keys_are_refused(text):
    with pytest.raises(SpecError, match=r'such as "0-1,11"'):
        AttentionSpec("linear", layers={text: "flash"})


def test_a_spec_is_validated_once(monkeypatch):
    made = []
    from_options = BackendConfig.from_options.__func__

    def counted(cls, *args, **kwargs):
        made.append(cls)
        return from_options(cls, *args, **kwargs)

    monkeypatch.setattr(BackendConfig, "from_options", classmethod(counted))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=4,
            num_attention_heads=2,
        )
    )  # fmt: skip
    attnzoo.swap(model, "linear", layers={"0": "flash"})
    assert len(made) == 2  # one for each entry of the spec, none for a layer
