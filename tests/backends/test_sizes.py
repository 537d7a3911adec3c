"""Untrusted specs: no size in a spec hangs, exhausts the memory or raises a raw error."""

import dataclasses
import time

import pytest

from attnzoo import AttentionSpec
from attnzoo.contract.config import MAX_SIZE
from attnzoo.errors import AttnzooError, ConfigError, SpecError
from attnzoo.registry import available_backends, get_backend

DIGITS = 10**5000  # Python converts no integer of so many digits to text


def nested(kind):
    value = kind()
    for _ in range(50_000):
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
