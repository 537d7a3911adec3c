"""Encoder-decoder models: every layer against a dense formula in this file, and properties.

A layer that its backend refuses stays exact: linformer without blocks refuses causal layers, and
backends without a position bias refuse T5's self-attention.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor
from torch.testing import assert_close

import attnzoo
from attnzoo.contract.config import Geometry
from attnzoo.errors import UnsupportedError
from attnzoo.hf.cache.state_layer import state_layer
from attnzoo.hf.seam import cache_argument, output_cache
from attnzoo.registry import build_backend

SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
COUPLED: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
    **SPECIAL,
}
T5: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
    **SPECIAL,
}
CONFIGS = {
    "bart": lambda: hf.BartConfig(**COUPLED, max_position_embeddings=64, forced_eos_token_id=None),
    "whisper": lambda: hf.WhisperConfig(
        **COUPLED, num_mel_bins=8, max_source_positions=20, max_target_positions=32
    ),
    "t5": lambda: hf.T5Config(**T5, relative_attention_num_buckets=6),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "linear": {},
    "performer": {"num_features": 32},
    "linformer": {"num_rows": 5, "max_length": 64},
}
CASES = [(name, backend) for name in CONFIGS for backend in OPTIONS]


@pytest.fixture
def make_model(redraw):
    def make(name: str) -> Any:
        config = CONFIGS[name]()
        auto = hf.AutoModelForSpeechSeq2Seq if name == "whisper" else hf.AutoModelForSeq2SeqLM
        return redraw(auto.from_config(config, attn_implementation="eager")).double()

    return make


def swap(model: Any, backend: str) -> None:
    attnzoo.swap(model, backend, **OPTIONS[backend], else_="flash")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "attnzoo" in name:  # rows beside their initial means
                x += 0.1 * torch.randn(x.shape, generator=generator)


def sources(name: str, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Return the inputs of the encoder."""
    if name == "whisper":
        draw = torch.Generator().manual_seed(2)
        return {"input_features": torch.randn(3, 8, 40, generator=draw, dtype=torch.float64)}
    given = {"input_ids": ids.flip(0)}
    return given if mask is None else {**given, "attention_mask": mask}


def kinds(model: Any) -> dict[str, set[str]]:
    """Return which backends serve self-attention and cross-attention."""
    found: dict[str, set[str]] = {"self": set(), "cross": set()}
    for name, module in model.named_modules():
        if hasattr(module, "attnzoo"):
            cross = "encoder_attn" in name or "EncDec" in name
            found["cross" if cross else "self"].add(module.attnzoo.name)
    return found


# -- dense formulas -----------------------------------------------------------------------------


def positive_features(x: Tensor, projection: Tensor, scale: float) -> Tensor:
    x = x * scale**0.5
    return (x @ projection.mT - x.square().sum(-1, keepdim=True) / 2).exp()


def pooled_weights(backend: Any, rows: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return every token's weight in every row, and how many tokens a row pools."""
    used = min(tokens, rows.shape[2])
    pools = F.one_hot(torch.arange(tokens) * used // tokens, used).double()
    return rows[0, :tokens, :used] + pools / pools.sum(0), pools.sum(0)


def dense(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Compute each mechanism from its weights, one for every query and key."""
    backend = module.attnzoo
    seen = torch.ones(len(q), 1, q.shape[2], k.shape[2]) if mask is None else (mask == 0).double()
    if backend.name == "flash":
        scores = q @ k.mT * given["scaling"]
        if given.get("position_bias") is not None:
            scores = scores + given["position_bias"]
        out = scores.masked_fill(seen == 0, -math.inf).softmax(-1) @ v
    elif backend.name == "linformer":
        out = torch.zeros_like(q)
        for b in range(len(q)):
            real = seen[b, 0, 0].bool()
            weights_k, counts = pooled_weights(backend, backend.key_rows, int(real.sum()))
            weights_v, _ = pooled_weights(backend, backend.value_rows, int(real.sum()))
            rows_k, rows_v = weights_k.mT @ k[b][:, real], weights_v.mT @ v[b][:, real]
            scores = q[b] @ rows_k.mT * given["scaling"] + counts.log()
            out[b] = scores.softmax(-1) @ rows_v
    else:
        if backend.name == "linear":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        else:
            q, k = (positive_features(x, backend.projection, given["scaling"]) for x in (q, k))
        weights = q @ k.mT * seen
        out = weights / weights.sum(-1, keepdim=True) @ v
    return out.transpose(1, 2), None


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_whole_models_equal_dense_formulas(name, backend, make_model, ids, padding, monkeypatch):
    model, mask = make_model(name), padding("right", (9, 12, 2))
    given = {**sources(name, ids, mask), "decoder_input_ids": ids, "use_cache": False}
    with torch.no_grad():
        exact = model(**given).logits
        swap(model, backend)
        ours = model(**given).logits
        masks = hf.AttentionMaskInterface._global_mapping
        monkeypatch.setitem(masks, "attnzoo", masks["eager"])
        monkeypatch.setitem(hf.AttentionInterface._global_mapping, "attnzoo", dense)
        assert_close(ours, model(**given).logits)
    assert (ours - exact).abs().max() > 1e-2
    found = kinds(model)
    assert found["cross"] == {backend}
    exact_ones = {"flash"} if name == "t5" or backend == "linformer" else set()
    assert found["self"] == exact_ones | ({backend} if name != "t5" else set())


# -- properties --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), [case for case in CASES if case[0] != "whisper"])
def test_padding_of_the_encoder_gets_no_weight(name, backend, make_model, ids, padding):
    model, mask = make_model(name), padding("right", (9, 12, 2))
    swap(model, backend)
    with torch.no_grad():
        given = sources(name, ids, mask)
        found = model(**given, decoder_input_ids=ids).logits
        given["input_ids"] = given["input_ids"].masked_fill(mask == 0, 42)
        assert torch.equal(model(**given, decoder_input_ids=ids).logits, found)
        for row, length in enumerate((9, 12, 2)):
            alone = given["input_ids"][row : row + 1, :length]
            right = model(input_ids=alone, decoder_input_ids=ids[row : row + 1]).logits
            assert_close(found[row : row + 1], right)


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_cached_decoding_equals_one_pass(name, backend, make_model, ids, padding):
    model, cache, parts = make_model(name), None, []
    swap(model, backend)
    given = sources(name, ids, padding("right", (9, 12, 2)))
    with torch.no_grad():
        whole = model(**given, decoder_input_ids=ids, use_cache=False).logits
        for tokens in (ids[:, :7], *ids[:, 7:10].split(1, 1), ids[:, 10:]):
            output = model(
                **given, decoder_input_ids=tokens, **cache_argument(cache), use_cache=True
            )
            cache = output_cache(output)
            parts.append(output.logits)
    assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_generate(name, backend, make_model, ids, padding):
    model = make_model(name)
    swap(model, backend)
    given = sources(name, ids, padding("right", (9, 12, 2)))
    options = {"max_new_tokens": 7, "do_sample": False, "num_beams": 3}
    found = model.generate(**given, **options)
    assert found.shape[1] >= 7
    assert torch.equal(found, model.generate(**given, **options, use_cache=False))


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", ["longformer", "gated_linear"])
def test_other_backends_refuse_it(name, backend, make_model):
    model = make_model(name)
    with pytest.raises(UnsupportedError, match=backend):
        attnzoo.swap(model, backend)
    attnzoo.swap(model, backend, else_="flash")
    assert kinds(model)["cross"] == {"flash"}
    takes_bias = backend in ("longformer", "reformer")
    assert (backend in kinds(model)["self"]) == (name != "t5" or takes_bias)


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("backend", ["softmax", "flash", "linear", "performer"])
def test_a_window_on_cross_attention_is_refused(name, backend, make_model):
    model = make_model(name)
    other = {"flash": "softmax"}.get(backend, "flash")
    with pytest.raises(UnsupportedError, match=r"cross-attention.*window=4.*leave win"):
        attnzoo.swap(model, backend, window=4, layers={_self(name): other})
    attnzoo.swap(model, backend, window=4, else_=other)
    assert kinds(model)["cross"] == {other}


def _self(name: str) -> str:
    """Return the key that names the self-attention layers of a family in a spec."""
    return "self_attn" if name == "bart" else "SelfAttention"


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("backend", ["softmax", "flash"])
def test_cached_decoding_with_a_window_equals_one_pass(name, backend, make_model, ids):
    model = make_model(name)
    attnzoo.swap(model, backend, window=4, else_="flash" if backend == "softmax" else "softmax")
    source = {"input_ids": ids.flip(0)}
    with torch.no_grad():
        whole = model(**source, decoder_input_ids=ids, use_cache=False).logits
        first = model(**source, decoder_input_ids=ids[:, :6], use_cache=True)
        steps, cache = [first.logits], output_cache(first)
        for t in range(6, ids.shape[1]):
            call = {"encoder_outputs": (first.encoder_last_hidden_state,), "use_cache": True}
            step = model(**call, decoder_input_ids=ids[:, t : t + 1], **cache_argument(cache))
            steps.append(step.logits)
    assert_close(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("backend", ["linear", "performer", "linformer"])
def test_position_bias_of_t5_is_refused_at_the_swap(backend, make_model, ids):
    model = make_model("t5")
    with pytest.raises(UnsupportedError, match=r"encoder\.block\.0.*position bias to its scores"):
        attnzoo.swap(model, backend)
    assert kinds(model) == {"self": set(), "cross": set()}


def test_encoder_layer_without_a_mask_attends_to_all_keys(redraw):
    """BridgeTower's layers declare themselves causal but get no mask: eager attends to all keys."""
    text = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}
    sight = {"hidden_size": 64, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4}
    config = hf.BridgeTowerConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=48,
        text_config=text,
        vision_config=sight,
    )
    model = redraw(hf.BridgeTowerModel._from_config(config, attn_implementation="eager"))
    ids = torch.randint(3, 99, (2, 6), generator=torch.Generator().manual_seed(1))
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(input_ids=ids, pixel_values=pixels).image_features
        attnzoo.swap(model, "softmax")
        found = model(input_ids=ids, pixel_values=pixels).image_features
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_cache_of_more_than_keys_and_values_is_not_replaced():
    """In Zamba 2, one cache layer holds keys, values and the inputs of a convolution."""
    layer = hf.cache_utils.LinearAttentionAndFullAttentionLayer()
    backend = build_backend("linear", {}, Geometry(num_heads=2, num_key_heads=2, head_dim=4))
    cache = hf.DynamicCache()
    cache.layers.append(layer)
    with pytest.raises(UnsupportedError, match="more than keys and values"):
        state_layer(cache, 0, backend)


def test_labels_in_generation_are_ignored():
    """Seq2SeqTrainer passes them to ``generate``, and the encoder to its attention."""
    model = hf.BartForConditionalGeneration(hf.BartConfig(**COUPLED, max_position_embeddings=64))
    ids = torch.arange(7, 15)[None]
    given = {"input_ids": ids, "max_new_tokens": 3, "do_sample": False}
    attnzoo.swap(model.eval(), "flash")
    assert torch.equal(model.generate(**given, labels=ids), model.generate(**given))
