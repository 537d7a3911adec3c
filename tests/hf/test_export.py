"""Decoding as a program of ``torch.export``, through transformers' own modules."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch.testing import assert_close
from transformers.integrations.executorch import (
    Seq2SeqLMExportableModule,
    TorchExportableModuleForDecoderOnlyLM,
    convert_and_export_with_cache,
    export_with_dynamic_cache,
)

import attnzoo
from attnzoo.backends.gates.decays import GATES
from attnzoo.errors import UnsupportedError
from attnzoo.hf.seam import cache_argument
from tests.helpers import MODEL_SIZES, build, hidden_states, qkv, redrawn

EXPORTED: dict[str, dict[str, Any]] = {
    "linear": {"window": 4, "num_sinks": 1, "feature_map": "hedgehog"},
    "gated_linear": {"gate": "gla"},
    "delta": {"window": 4, "gate": "vector", "short_convolution": 4, "output_gate": True},
    "performer": {"num_features": 8},
}
ZERO_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, options) for name, options in EXPORTED.items()},
    **{f"gate {name}": ("gated_linear", {"gate": name}) for name in GATES},
    "sums": ("linear", {}),
    "gated window": ("gated_linear", {"gate": "mamba2", "window": 4}),
    "delta rule": ("delta", {}),
    "random window": ("performer", {"num_features": 8, "window": 4}),
}
GROWING: dict[str, dict[str, Any]] = {
    "flash": {"window": 4},
    "softmax": {"window": 4, "num_sinks": 1},
    "longformer": {"window": 4},
    "linformer": {"block": 5},
    "block_sparse": {},
}


@pytest.fixture
def exportable(llama):
    """Return a function that makes a swapped model that may be exported."""

    def make(backend: str, *, num_hidden_layers: int = 2, **options: Any) -> Any:
        model = attnzoo.swap(llama(num_hidden_layers=num_hidden_layers), backend, **options)
        model.generation_config.cache_implementation = "static"
        model.generation_config.cache_config = {"batch_size": 2, "max_cache_len": 20}
        return model

    return make


def decode(program: Any, ids: Any, ends: tuple[int, ...]) -> torch.Tensor:
    """Run a program on the tokens up to each end."""
    begins = (0, *ends[:-1])
    with torch.no_grad():
        return torch.cat(
            [
                program(input_ids=ids[:, i:j], cache_position=torch.arange(i, j))
                for i, j in zip(begins, ends, strict=True)
            ],
            dim=1,
        )


def export(model: Any, ids: Any, **options: Any) -> Any:
    module = TorchExportableModuleForDecoderOnlyLM(model)
    with torch.no_grad():
        positions = torch.arange(ids.shape[1])
        return module.export(input_ids=ids, cache_position=positions, **options).module()


@pytest.mark.parametrize(
    ("backend", "strict"),
    [pytest.param("linear", True, marks=pytest.mark.exhaustive), ("delta", False)],
)
def test_tokens_are_decoded_as_by_the_model(backend, strict, exportable, ids):
    model = exportable(backend, **EXPORTED[backend], layers={"1": "flash"})
    program = export(model, ids[:2, :1], strict=strict)
    for tokens in (ids[:2], ids[:2].flip(1)):  # a second text starts from an empty state
        found = decode(program, tokens, tuple(range(1, 13)))
        assert_close(found, model(tokens).logits, atol=1e-4, rtol=1e-4)
    # a state of constant size cannot return to an earlier token, unlike keys
    with pytest.raises(RuntimeError, match="cannot return to an earlier token"):
        program(input_ids=ids[:2, 1:2], cache_position=torch.tensor([1]))


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("linear", {"window": 4, "feature_map": "hedgehog"}),
        pytest.param("delta", EXPORTED["delta"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_program_takes_chunks_of_any_length(backend, options, exportable, ids):
    length = torch.export.Dim("length", min=2, max=19)
    model = exportable(backend, **options, num_hidden_layers=1)
    shapes = {"input_ids": {1: length}, "cache_position": {0: length}}
    program = export(model, ids[:2, :4], dynamic_shapes=shapes)
    found = decode(program, ids[:2], (7, 9, 12))
    assert_close(found, model(ids[:2]).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.exhaustive
def test_convert_and_export(exportable, ids):
    model = exportable("gated_linear", num_hidden_layers=1)
    program = convert_and_export_with_cache(model, ids[:2, :1]).module()
    found = decode(program, ids[:2], (1, 2, 3))
    assert_close(found, model(ids[:2, :3]).logits, atol=1e-4, rtol=1e-4)


def test_models_with_windows(ids):
    """transformers exports them through another module; a layer with a window stays exact."""
    config = hf.Gemma3TextConfig(**MODEL_SIZES, head_dim=8, num_key_value_heads=2)
    config.layer_types, config.sliding_window = ["sliding_attention", "full_attention"], 16
    model = attnzoo.swap(redrawn(hf.Gemma3ForCausalLM(config)), "linear", else_="flash")
    assert [row.backend for row in attnzoo.describe(model)] == ["flash", "linear"]
    model.generation_config.cache_config = {"batch_size": 2, "max_cache_len": 20}
    program = export(model, ids[:2, :1], strict=False)
    found = decode(program, ids[:2], tuple(range(1, 13)))
    assert_close(found, model(ids[:2]).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.exhaustive
def test_states_of_decoders_with_cross_attention_are_refused(ids):
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": 99}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = redrawn(hf.BartForConditionalGeneration(hf.BartConfig(**sizes, **heads)))
    layers = {f"model.decoder.layers.{i}.self_attn": "linear" for i in range(2)}
    attnzoo.swap(model, "flash", layers=layers)
    module = Seq2SeqLMExportableModule(
        model,
        batch_size=1,
        max_hidden_seq_length=64,
        cache_implementation="static",
        max_cache_length=20,
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="TorchExportableModuleForDecoder"):
        module.export(
            encoder_input_ids=ids[:1],
            decoder_input_ids=ids[:1, :1],
            encoder_hidden_states=torch.randn(1, 12, 32),
            cache_position=torch.tensor([0]),
        )


@pytest.mark.parametrize("backend", GROWING)
def test_states_that_grow_are_refused(backend, exportable):
    model = exportable(backend, **GROWING[backend])
    with pytest.raises(UnsupportedError, match=r"layers\.0.*size of its state changes"):
        TorchExportableModuleForDecoderOnlyLM(model)


class WithCache(torch.nn.Module):
    """A model with a static cache of the caller."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.cache = hf.StaticCache(config=model.config, max_cache_len=20)
        self.cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))

    def forward(self, ids: Any) -> Any:
        return self.model(ids, **cache_argument(self.cache)).logits


def test_other_caches_are_refused(exportable, ids):
    model, tokens = exportable("linear"), ids[:2, :1]
    with pytest.raises(UnsupportedError, match="TorchExportableModuleForDecoderOnlyLM"):
        torch.export.export(WithCache(model), (tokens,), strict=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="TorchExportableModuleForDecoder"):
        torch.export.export(WithCache(model), (tokens,), strict=True)
    with pytest.raises(RuntimeError, match="DynamicCache containing only"):
        export_with_dynamic_cache(model, tokens, torch.ones_like(tokens))


@pytest.mark.parametrize("name", ZERO_STATES)
def test_zeros_are_the_state_of_no_tokens(name):
    """What ``zero_state`` declares."""
    backend, options = ZERO_STATES[name]
    module = build(backend, noise=0.3, **options).eval()
    assert module.capabilities.zero_state
    inputs, hidden = qkv(9), hidden_states(9)

    def run(tokens: int, state: Any = None) -> Any:
        given = [x[:, :, :tokens] for x in inputs]
        options = {"hidden_states": hidden[:, :tokens], "return_state": True}
        with torch.no_grad():
            return module(*given, state=state, **options)

    zeros = module.empty_state(inputs[0], batch=inputs[0].shape[0])
    assert not any(x.any() for x in zeros)
    for tokens in (1, 5, 9):
        expected, found = run(tokens), run(tokens, zeros)
        assert_close(found.out, expected.out)
        for x, y in zip(found.state, expected.state, strict=True):
            assert x.shape == y.shape
            assert_close(x, y)


@pytest.mark.parametrize("backend", GROWING)
def test_other_states_do_not_declare_it(backend):
    module = build(backend, **GROWING[backend])
    assert not module.capabilities.zero_state
    with pytest.raises(UnsupportedError, match="no state before the first token"):
        module.empty_state(torch.empty(0))


@pytest.fixture
def onnx(monkeypatch):
    """torch.onnx.export runs; what it translates is a program of torch.export."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)


def encoder(backend: str, **options: Any) -> Any:
    sizes = {**MODEL_SIZES, "num_hidden_layers": 1, "max_position_embeddings": 64}
    return attnzoo.swap(redrawn(hf.BertModel(hf.BertConfig(**sizes))), backend, **options)


def test_windows_are_exported_to_onnx_without_a_sort(ids, onnx):
    model, mask = encoder("flash", window=4), torch.ones(2, 12, dtype=torch.long)
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}}
    given = {"input_ids": ids[:2], "attention_mask": mask}
    program = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False)
    operators = {str(x.target) for x in program.graph.nodes if x.op == "call_function"}
    assert not any("sort" in x or x.startswith("attnzoo") for x in operators)
    for tokens in (7, 12):
        padding = mask[:, :tokens].clone()
        padding[1, 2:5] = 0
        found = program.module()(input_ids=ids[:2, :tokens], attention_mask=padding)[0]
        expected = model(ids[:2, :tokens], attention_mask=padding)[0]
        assert_close(found[padding.bool()], expected[padding.bool()])


@pytest.mark.parametrize(
    ("backend", "strict"),
    [pytest.param("linear", True, marks=pytest.mark.exhaustive), ("longformer", False)],
)
def test_operators_that_onnx_does_not_have_are_refused(backend, strict, ids, onnx):
    errors = (UnsupportedError, torch._dynamo.exc.Unsupported)
    model, given = encoder(backend), {"input_ids": ids[:2], "attention_mask": torch.ones(2, 12)}
    with pytest.raises(errors, match=r"layer\.0.*torch\.onnx\.export has no .*softmax"):
        torch.export.export(model, (), given, strict=strict)


def test_a_named_implementation_that_onnx_does_not_have_is_refused(ids, onnx):
    model = encoder("flash", window=4, impl="cpp")
    with pytest.raises(
        UnsupportedError, match=r"torch\.onnx\.export has no.*Use impl='auto' or 's"
    ):
        torch.export.export(model, (ids[:2],), strict=False)
