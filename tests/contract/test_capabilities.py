"""Capabilities: declared by a class, made for each instance, and never ignored."""

from dataclasses import replace

import pytest

from attnzoo.contract import AttentionBackend, BackendConfig, Capabilities, Geometry, register
from attnzoo.contract.backend import BACKENDS
from attnzoo.errors import ConfigError

GEOMETRY = Geometry(num_heads=2, num_key_heads=1, head_dim=4)


class Mine(AttentionBackend):
    capabilities = Capabilities(windowed=True, packing=True)

    def layer_capabilities(self):
        return replace(super().layer_capabilities(), packing=self.config.impl == "reference")


def test_an_instance_has_the_capabilities_of_its_options():
    assert Mine(BackendConfig(), GEOMETRY).capabilities == Capabilities(windowed=True)
    reference = Mine(BackendConfig(impl="reference"), GEOMETRY)
    assert reference.capabilities == Mine.capabilities


@pytest.mark.parametrize("value", [True, property(lambda self: True)], ids=["value", "property"])
def test_a_capability_outside_of_capabilities_is_refused(value):
    members = {"windowed": value, "needs_full_sequences": "it sorts"}
    with pytest.raises(
        ConfigError, match=r"Old sets windowed, needs_full_sequences as a class"
    ) as error:
        register("old")(type("Old", (AttentionBackend,), members))
    assert "capabilities = Capabilities(windowed=..., needs_full_sequences=...)" in str(error.value)
    assert "old" not in BACKENDS


def test_one_of_a_mixin_is_refused_too():
    with pytest.raises(ConfigError, match="Both sets recurrent as a class attribute"):
        type("Both", (type("Mixin", (), {"recurrent": True}), AttentionBackend), {})
