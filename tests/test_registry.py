"""From names to backends: built in, registered by hand, and installed as plugins."""

import sys
from pathlib import Path

import pytest
import torch

import attnzoo
from attnzoo import registry
from attnzoo.backends.feature_maps.base import FEATURE_MAPS
from attnzoo.contract.backend import BACKENDS, AttentionBackend, register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import ConfigError, UnknownBackendError, UnsupportedError
from attnzoo.registry import BUILTIN, available_backends, build_backend, get_backend

ROOT = Path(__file__).resolve().parents[1]
LAYER = Geometry(num_heads=4, num_key_heads=2, head_dim=8, hidden_size=32, layer=3, name="h.3.attn")


@pytest.fixture
def own_name():
    """A name to register under, free again after the test."""
    yield "mine"
    BACKENDS.pop("mine", None)


def test_builtin_backends_are_found_by_name():
    assert {"softmax", "flash", "linear", "gated_linear", "delta"} <= set(available_backends())
    for name in ("softmax", "flash", "linear", "gated_linear", "delta"):
        cls = get_backend(name)
        assert cls.name == name
        assert cls.__doc__


def test_unknown_names_are_refused():
    with pytest.raises(UnknownBackendError, match=r"'flahs'. Did you mean 'flash'\? Available: "):
        get_backend("flahs")
    with pytest.raises(UnknownBackendError, match="by name, got 3 of type int"):
        get_backend(3)


def test_a_registered_class_is_found(own_name):
    @register(own_name)
    class Mine(AttentionBackend):
        pass

    assert get_backend(own_name) is Mine
    assert Mine.name == own_name
    assert own_name in available_backends()
    assert register(own_name)(Mine) is Mine  # again, the same: no conflict


def test_a_taken_name_is_refused(own_name):
    first = register(own_name)(type("First", (AttentionBackend,), {}))
    with pytest.raises(ValueError, match=r"'mine' belongs to .*First; register Second under"):
        register(own_name)(type("Second", (AttentionBackend,), {}))
    assert get_backend(own_name) is first


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_a_builtin_name_is_refused(name):
    """Also if the built-in backend is not loaded yet: the module counts, not the order."""
    held = BACKENDS.pop(name, None)
    try:
        with pytest.raises(ValueError, match=rf"'{name}' belongs to attnzoo.backends.{name}"):
            register(name)(type("Mine", (AttentionBackend,), {}))
        assert name not in BACKENDS
    finally:
        if held is not None:
            BACKENDS[name] = held


def test_a_backend_is_built_for_a_layer():
    backend = build_backend("flash", {"window": 8}, LAYER)
    assert isinstance(backend, get_backend("flash"))
    assert backend.config.window == 8
    assert backend.geometry is LAYER
    assert repr(backend) == "FlashBackend(window=8)"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 16}, "16 tokens, which it would ignore .config.sliding_window=None"),
        ({"softcap": 30.0}, "caps its scores at 30.0, which it would ignore"),
        ({"sinks": True}, "attention sinks, which it would ignore"),
        ({"causal": False}, "bidirectional .it is causal only."),
        ({"cross_attention": True}, "cross-attention"),
    ],
)
def test_a_layer_that_cannot_be_served_is_refused(changes, words):
    layer = Geometry(**{**vars(LAYER), **changes})
    with pytest.raises(UnsupportedError, match=rf"Layer 3 \(h.3.attn\): .*'gated_linear'.*{words}"):
        build_backend("gated_linear", {}, layer)


def test_all_reasons_are_given_at_once():
    layer = Geometry(**{**vars(LAYER), "softcap": 30.0, "sinks": True})
    with pytest.raises(UnsupportedError, match=r"caps its scores.*; .*sinks.*\"else\": \"flash\""):
        build_backend("linear", {}, layer)


def test_a_bidirectional_backend_refuses_a_causal_layer():
    class Both(AttentionBackend):
        capabilities = Capabilities(causal=False)

    assert "bidirectional only" in Both(Both.config_class(), LAYER).layer_reasons()[0]


# -- plugins -------------------------------------------------------------------------------------

MODULE = """
from attnzoo.contract.backend import AttentionBackend, register
{decorator}
class Mine(AttentionBackend):
    pass
"""


def install(folder: Path, package: str, points: str, module: str = "") -> None:
    """Write a distribution as pip installs it: metadata with entry points, and a module."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attnzoo.backends]\n{points}\n")
    (folder / f"{package}.py").write_text(module)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in which what is installed is found; forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(BACKENDS)
    registry._plugins.cache_clear()
    yield tmp_path
    registry._plugins.cache_clear()
    BACKENDS.clear()
    BACKENDS.update(before)
    for name in ("zoo_mine", "zoo_yours"):
        sys.modules.pop(name, None)


def test_an_installed_plugin_is_found_and_loads_on_first_use(tmp_path, fresh_python):
    """In a fresh interpreter, as for a user."""
    install(
        tmp_path, "zoo_mine", "mine = zoo_mine:Mine", MODULE.format(decorator="@register('mine')")
    )
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
from attnzoo.registry import available_backends, get_backend
assert "mine" in available_backends()
assert "zoo_mine" not in sys.modules
cls = get_backend("mine")
assert get_backend("mine") is cls
print(cls.__module__, cls.name)
"""
    done = fresh_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["zoo_mine", "mine"]


@pytest.mark.parametrize(
    ("points", "decorator", "words"),
    [
        ("mine = zoo_mine:Mine", "", "does not register this name"),
        ("mine = zoo_mine:Mine", "@register('other')", "with @attnzoo.register.'mine'."),
        ("mine = zoo_mine:Yours", "@register('mine')", "cannot be imported: "),
        ("mine = zoo_nowhere:Mine", "", "cannot be imported: No module named 'zoo_nowhere'"),
    ],
)
def test_an_invalid_plugin_is_refused(site, points, decorator, words):
    install(site, "zoo_mine", points, MODULE.format(decorator=decorator))
    with pytest.raises(ConfigError, match=f"'{points.split(' = ')[1]}'.*{words}"):
        get_backend("mine")
    assert get_backend("softmax").name == "softmax"  # other backends still load


def test_two_plugins_of_one_name_are_refused(site):
    module = MODULE.format(decorator="@register('mine')")
    install(site, "zoo_mine", "mine = zoo_mine:Mine", module)
    install(site, "zoo_yours", "mine = zoo_yours:Mine", module)
    with pytest.raises(
        ConfigError, match="'zoo_mine:Mine' is also that of 'zoo_yours:Mine'; uninst"
    ):
        get_backend("mine")


def test_a_plugin_of_a_builtin_name_is_refused(site):
    BACKENDS.pop("linear", None)
    install(site, "zoo_mine", "linear = zoo_mine:Mine", MODULE.format(decorator=""))
    with pytest.raises(
        ConfigError, match=r"'zoo_mine:Mine' is also that of 'attnzoo.backends.linear'"
    ):
        get_backend("linear")


def test_impl_is_validated_against_the_implementations_of_the_config():
    for name in BUILTIN:
        cls = get_backend(name).config_class
        assert cls.impl_names()[0] == "auto"
        assert "reference" in cls.impl_names() or name == "flash"  # whose oracle is softmax
        for impl in cls.impl_names():
            assert cls(impl=impl).impl == impl
        message = rf"{cls.__name__}\.impl must be 'auto' or .*, got 'refrence'"
        with pytest.raises(ConfigError, match=message):
            cls(impl="refrence")
    with pytest.raises(ConfigError, match="Did you mean 'torch'"):
        get_backend("linear").config_class(impl="torhc")


def test_a_backend_that_returns_no_impl_has_one_implementation():
    class Mean(AttentionBackend):
        """Return the mean of the values."""

        def attend(self, inputs):
            return AttentionOutput(inputs.v.mean(2, keepdim=True).expand_as(inputs.q))

    backend = Mean(BackendConfig(), Geometry(num_heads=1, num_key_heads=1, head_dim=2))
    assert backend.ran is None
    backend(*torch.randn(3, 1, 1, 4, 2))
    assert backend.ran == ("reference", "the only implementation")


@pytest.mark.parametrize("decorator", ["register", "register_gate", "register_feature_map"])
def test_a_decorator_without_a_name_or_of_something_else_is_refused(decorator):
    register_as = getattr(attnzoo, decorator)
    with pytest.raises(
        ValueError, match=rf"@attnzoo\.{decorator} takes a name, got <class .*'name'"
    ):
        register_as(AttentionOutput)
    with pytest.raises(
        ValueError, match=r"registers a subclass of attnzoo\.\w+, got <class 'attnz"
    ):
        register_as("mine")(AttentionOutput)


def test_what_attend_returns_is_checked():
    class Bare(AttentionBackend):
        def attend(self, inputs):
            return inputs.v

    x = torch.ones(1, 2, 3, 8)
    with pytest.raises(ConfigError, match=r"Bare.attend must return .*\(out\), got Tensor"):
        Bare(BackendConfig(), LAYER)(x.repeat(1, 2, 1, 1), x, x)


def test_a_feature_map_returns_a_tensor():
    @attnzoo.register_feature_map("nothing")
    def nothing(x):
        return None

    try:
        x, backend = (
            torch.ones(1, 2, 3, 8),
            build_backend("linear", {"feature_map": "nothing"}, LAYER),
        )
        with pytest.raises(ConfigError, match="map 'nothing' must return a tensor, got NoneType"):
            backend(x.repeat(1, 2, 1, 1), x, x)
    finally:
        del FEATURE_MAPS["nothing"]
