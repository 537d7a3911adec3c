"""The registry of implementations: order, devices, errors, and one of another device."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import typer.testing
from transformers import DynamicCache

import attnzoo
from attnzoo.contract import implementation as registry
from attnzoo.contract.implementation import (
    Implementation,
    impl_names,
    register_implementation,
    select,
    select_if_supported,
)
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.hf.seam import cache_argument
from attnzoo.ops import linear_attention
from attnzoo.registry import BUILTIN, build_backend, get_backend
from tests.helpers import HKV, H, geometry, tiny_llama

MODULE = '''
"""Linear attention on a device of its own."""

from attnzoo.contract import Implementation, register_implementation


def run(call):
    out = call.v.new_empty(*call.q.shape[:3], call.v.shape[3])
    return out, call.state


def reasons(call):
    return [] if call.causal else ["attention is bidirectional"]


register_implementation(
    Implementation(
        op="linear_attention",
        name="metal",
        devices=("meta",),
        run=run,
        reasons=reasons,
        automatic="compiled for this device",
    )
)
'''


@pytest.fixture
def empty(monkeypatch):
    """A registry without implementations."""
    monkeypatch.setattr(registry, "_NAMED", {})
    monkeypatch.setattr(registry, "_AUTOMATIC", {})


def call_on(device):
    return SimpleNamespace(q=SimpleNamespace(device=SimpleNamespace(type=device)))


def make(name, *devices, automatic="for tests", **options):
    options = {"run": lambda call: name, **options}
    return Implementation(op="op", name=name, devices=devices, automatic=automatic, **options)


@pytest.mark.parametrize("order", [1, -1])
def test_auto_prefers_the_device_then_the_priority_then_the_name(order, empty):
    made = [
        make("second"),
        make("first", priority=2),
        make("fast", "mps", "xpu", priority=-1),
        make("faster", "mps"),
        make("alone", "xpu", priority=-1),
    ]
    for each in made[::order]:  # the order of imports does not count
        register_implementation(each)
    register_implementation(make("reference", automatic=""), make("slow", "mps", automatic=""))
    chosen = {x: select("op", call_on(x))[1].impl for x in ("mps", "xpu", "cpu", "cuda")}
    assert chosen == {"mps": "faster", "xpu": "alone", "cpu": "first", "cuda": "first"}
    names = [x.name for x in made[::order]]
    assert impl_names("op") == ("auto", *names, "reference", "slow")
    assert select("op", call_on("cpu"))[0].run(None) == "first"
    assert select("op", call_on("mps"), "slow")[1] == ("slow", "named in the options")


def test_a_step_is_registered_with_its_op(empty):
    step = {"step": lambda call: "one", "step_reasons": lambda call: ["no state"]}
    skip = {"auto_reasons": lambda call: ["one token"], "note": lambda call: "of many"}
    register_implementation(replace(make("fast", **step, **skip), op="my_attention"))
    assert select_if_supported("my_step", call_on("cpu")) is None
    step["step_reasons"] = None
    register_implementation(replace(make("slow", **step, **skip), op="my_attention"))
    found, choice = select("my_step", call_on("cpu"))
    assert found.run(None) == "one"
    assert choice == ("slow", "one token; for tests; fast cannot: no state")


def test_a_name_belongs_to_one_implementation(empty):
    register_implementation(make("torch"))
    with pytest.raises(ValueError, match="another name"):
        register_implementation(make("torch"))
    for name in ("auto", "reference"):
        with pytest.raises(ValueError, match=f"{name!r} that impl='auto' would select"):
            register_implementation(make(name))


def test_errors_give_every_reason(empty):
    refuse = {"reasons": lambda call: ["rows are packed", "a bias is given"]}
    register_implementation(
        make("fast", "mps", **refuse),
        make("skipped", auto_reasons=lambda call: ["one token"]),
        make("failed", verdict=lambda call: ("it failed its check", "")),
        make("other", automatic=""),
    )
    with pytest.raises(UnsupportedError) as error:
        select("op", call_on("cpu"), "fast")
    assert str(error.value) == (
        "impl='fast' cannot run this call of op: the tensors are on cpu (fast runs on mps); rows "
        "are packed; a bias is given. Use impl='auto' or 'skipped' or 'failed' or 'other'."
    )
    with pytest.raises(UnsupportedError) as error:
        select("op", call_on("mps"))
    assert str(error.value) == (
        "No implementation of op supports this call: fast cannot: rows are packed; a bias is "
        "given. skipped cannot: one token. failed cannot: it failed its check."
    )
    with pytest.raises(
        UnsupportedError, match=r"no impl 'fats'. Did you mean 'fast'\? It has auto"
    ):
        select("op", call_on("mps"), "fats")
    for requested in ("auto", "fast", "fats"):
        assert select_if_supported("op", call_on("mps"), requested) is None


def test_describe_gives_the_reasons(empty):
    register_implementation(
        make("fast", "mps", reasons=lambda call: ["rows are packed"], priority=1),
        make(
            "checked", "mps", verdict=lambda call: ("", "checked here"), note=lambda call: "in one"
        ),
    )
    reason = "for tests; in one; checked here; fast cannot: rows are packed"
    assert select("op", call_on("mps"))[1] == ("checked", reason)
    named = select("op", call_on("mps"), "checked")[1]
    assert named == ("checked", "named in the options; in one")


def test_an_interpreted_device_needs_the_name(empty):
    register_implementation(make("kernel", "cuda", interpreted_on=("cpu",)), make("torch"))
    assert select("op", call_on("cpu"))[1].impl == "torch"
    assert select("op", call_on("cpu"), "kernel")[1].impl == "kernel"
    with pytest.raises(UnsupportedError, match=r"tensors are on mps \(kernel runs on cuda\)"):
        select("op", call_on("mps"), "kernel")


@pytest.fixture
def metal(monkeypatch):
    """An implementation of linear attention for another device: one module, one registration."""
    for tables in (registry._NAMED, registry._AUTOMATIC):
        monkeypatch.setitem(tables, "linear_attention", dict(tables["linear_attention"]))
    exec(compile(MODULE, "metal.py", "exec"), {})


def test_another_device_is_one_file_and_one_registration(metal):
    from attnzoo.commands.models import list_backends

    x = torch.ones(1, 2, 5, 8)
    assert linear_attention(*[x.to("meta")] * 3).impl == ("metal", "compiled for this device")
    assert linear_attention(x, x, x).impl.impl != "metal"
    for impl in ("auto", "metal"):  # describe shows what ran
        backend = build_backend("linear", {"impl": impl}, geometry()).to("meta")
        backend(*(torch.empty(1, n, 5, 8, device="meta") for n in (H, HKV, HKV)))
        assert backend.ran.impl == "metal"
    config = get_backend("linear").config_class
    with pytest.raises(ConfigError, match="Did you mean 'metal'"):
        config(impl="metl")
    with pytest.raises(UnsupportedError, match=r"tensors are on cpu \(metal runs on meta\)"):
        linear_attention(x, x, x, impl="metal")
    app = typer.Typer()
    app.command()(list_backends)
    listed = typer.testing.CliRunner().invoke(app, ["linear", "--json"])
    assert "metal" in listed.output


SWAPS = {  # options of backends whose defaults do not fit a tiny model
    "linformer": {"block": 5, "num_rows": 2},
    "longformer": {"window": 4},
    "reformer": {"num_hashes": 2, "chunk_size": 2, "window": 2, "first_tokens": 1},
    "performer": {"num_features": 16},
    "block_sparse": {"window": 3, "top_k": 2, "block_size": 2, "num_sinks": 1},
}
MORE = [
    ("linear", {"window": 4}),
    ("delta", {"window": 4}),
    ("performer", {"window": 4, "num_features": 16}),
    *(("gated_linear", {"gate": gate}) for gate in ("rwkv6", "mlstm", "matrix")),
]


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "options"),
    [*((name, SWAPS.get(name, {})) for name in BUILTIN), *MORE],
    ids=lambda x: x if type(x) is str else "",
)
def test_every_name_that_describe_prints_can_be_asked_for(backend, options):
    model = attnzoo.swap(tiny_llama(), backend, **options)
    tokens, found = torch.arange(1, 12)[None], set()
    cache = DynamicCache(config=model.config)
    for part in (tokens, tokens[:, :1]):  # a prompt, and a decoded token
        model(part, **cache_argument(cache))
        found |= {row.impl for row in attnzoo.describe(model)}
    assert found <= set(get_backend(backend).config_class.impl_names())
    for impl in found:
        model = attnzoo.swap(tiny_llama(), backend, impl=impl, **options)
        model(tokens, use_cache=False)
        assert {row.impl for row in attnzoo.describe(model)} == {impl}
