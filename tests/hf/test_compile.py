"""torch.compile of swapped models: one graph, the same numbers."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch._dynamo.utils import counters
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import UnsupportedError
from tests.helpers import MODEL_SIZES, freeze_garbage_collector

BACKENDS = {
    "flash": {},
    "linear": {},
    "delta": {"window": 4, "short_convolution": 3},
    "longformer": {"window": 4},
    "performer": {"num_features": 16},
    "hybrid": {"window": 4},
    "reformer": {},
}


def some_of(*names: str) -> list[Any]:
    """Return the backends that differ in what is traced; those not named are exhaustive."""
    exhaustive = pytest.mark.exhaustive
    return [x if x in names else pytest.param(x, marks=exhaustive) for x in BACKENDS]


@pytest.fixture
def one_layer(llama):
    """Return a Llama with one layer: torch.compile traces each layer again."""
    return llama(num_hidden_layers=1)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    freeze_garbage_collector()
    yield
    torch._dynamo.reset()


def swap(model: Any, name: str) -> None:
    attnzoo.swap(model, "gated_linear" if name == "hybrid" else name, **BACKENDS[name])


def compiled(model: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", some_of("hybrid"))
def test_a_training_step_is_one_graph(backend, one_layer, ids, padding):
    model = one_layer.double()
    swap(model, backend)
    mask = padding("left")
    found = []
    for run in (model, compiled(model)):
        model.zero_grad()
        output = run(ids, attention_mask=mask, labels=ids, use_cache=False)
        output.loss.backward()
        found.append([output.logits[mask.bool()], *(p.grad.clone() for p in model.parameters())])
    assert_close(found[1], found[0], atol=1e-10, rtol=1e-10)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", some_of("linear"))
def test_static_decoding_compiles_once(backend, llama, ids, padding):
    """The cache has layers for states and for keys."""
    model = llama()
    spec = "gated_linear" if backend == "hybrid" else backend
    attnzoo.swap(model, spec, layers={"1": "flash"}, **BACKENDS[backend])
    config = hf.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    options = {
        "attention_mask": padding("left"),
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = model.generate(ids, **options)
    for _ in range(2):  # and again with a new cache
        found = model.generate(ids, **options, cache_implementation="static", compile_config=config)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
        assert torch.equal(found.sequences, expected.sequences)
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


@pytest.mark.exhaustive
def test_sliding_windows_compile(redraw, ids, padding):
    config = hf.Gemma3TextConfig(
        **MODEL_SIZES,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = redraw(hf.Gemma3ForCausalLM(config))
    with torch.no_grad():
        expected = model(ids, attention_mask=padding("right"), use_cache=False).logits
        attnzoo.swap(model, "flash")
        found = compiled(model, "eager")(
            ids, attention_mask=padding("right"), use_cache=False
        ).logits
    real = padding("right").bool()
    assert_close(found[real], expected[real], atol=1e-4, rtol=1e-4)


def test_packed_rows_compile(llama):
    model = attnzoo.swap(llama(), "delta", layers={"1": "flash"}, **BACKENDS["delta"])
    ids = torch.randint(3, 99, (2, 12))
    places = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    with torch.no_grad():
        expected = model(ids, position_ids=places, use_cache=False).logits
        found = compiled(model, "eager")(ids, position_ids=places, use_cache=False).logits
    assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_swap_of_a_compiled_model(one_layer, ids):
    model = one_layer
    whole = compiled(model, "eager")  # tests retracing; the backend does not matter
    given = {"position_ids": torch.arange(12).expand(len(ids), -1), "use_cache": False}
    with torch.no_grad():
        stock = whole(ids, **given).logits
        attnzoo.swap(whole, "flash", window=4, num_sinks=2)  # for rows of one segment only
        expected = model(ids, **given).logits
        assert_close(whole(ids, **given).logits, expected, atol=1e-5, rtol=1e-5)
        # the graph cannot know that rows are not packed; it asserts this when it runs
        packed = torch.cat([torch.arange(5), torch.arange(7)]).expand(len(ids), -1)
        with pytest.raises(RuntimeError, match="packed rows cannot be unpacked under"):
            whole(ids, position_ids=packed, use_cache=False)
        attnzoo.restore(whole)
        assert_close(whole(ids, **given).logits, stock, atol=1e-5, rtol=1e-5)


@pytest.mark.exhaustive
def test_weights_on_request_compile(one_layer, ids):
    model = one_layer
    attnzoo.swap(model, "linear")
    with torch.no_grad():
        expected = model(ids, output_attentions=True, use_cache=False).attentions
        whole = torch.compile(model, backend="eager")  # capturing outputs takes graph breaks
        found = whole(ids, output_attentions=True, use_cache=False).attentions
    assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_refusals_stay_readable(one_layer, ids):
    model = attnzoo.swap(one_layer, "linear")
    model.model.layers[0].self_attn.compile(backend="eager")
    mask = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn.*arbitrary 4-D tensor"):
        model(ids, attention_mask=mask, use_cache=False)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("flash", {"window": 4}, marks=pytest.mark.exhaustive),
        ("linear", {"window": 4}),
        ("block_sparse", {}),
    ],
)
def test_exported_programs_take_any_lengths(backend, options):
    model = hf.BertModel(hf.BertConfig(**{**MODEL_SIZES, "num_hidden_layers": 1})).eval()
    attnzoo.swap(model, backend, **options)
    shapes = {"input_ids": dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)}
    given = {"input_ids": torch.randint(3, 90, (2, 40))}
    with torch.no_grad():
        program = torch.export.export(
            model, (), given, dynamic_shapes=shapes, strict=False
        ).module()
        for shape in ((2, 80), (3, 40)):
            ids = torch.randint(3, 90, shape)
            assert_close(program(input_ids=ids)[0], model(input_ids=ids)[0], atol=1e-5, rtol=1e-5)
