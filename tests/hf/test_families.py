"""Families of transformers models: equal to their own eager attention, or refused with a reason.

Each is built tiny from its config class. Lengths exceed the sliding windows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor

import attnzoo
from attnzoo.hf.seam import cache_argument, output_cache
from tests.helpers import MODEL_SIZES

TOLERANCE = 1e-4  # for float32
SENSITIVITY = 1e-2  # minimum change of outputs if another attention runs

SIZES: dict[str, Any] = {**MODEL_SIZES, "max_position_embeddings": 64}
GROUPED = {**SIZES, "num_key_value_heads": 2}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
COUPLED: dict[str, Any] = {  # encoder and decoder
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
MIXED = ["sliding_attention", "full_attention"]


class Family(NamedTuple):
    """How to build a model, and the kind of its inputs."""

    kind: str  # "decoder", "encoder", "coupled", "speech", "image", "pair"
    auto: Any
    config: Callable[[], Any]


LM, BASE = hf.AutoModelForCausalLM, hf.AutoModel
FAMILIES = {
    "llama": Family("decoder", LM, lambda: hf.LlamaConfig(**GROUPED, **SPECIAL)),
    "mistral": Family(
        "decoder", LM, lambda: hf.MistralConfig(**GROUPED, **SPECIAL, sliding_window=5)
    ),
    "qwen2": Family("decoder", LM, lambda: hf.Qwen2Config(**GROUPED, **SPECIAL)),
    "qwen3": Family("decoder", LM, lambda: hf.Qwen3Config(**GROUPED, **SPECIAL, head_dim=16)),
    "gemma2": Family(
        "decoder",
        LM,
        lambda: hf.Gemma2Config(
            **GROUPED,
            **SPECIAL,
            head_dim=8,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0,
            sliding_window=5,
            layer_types=MIXED,
        ),
    ),
    "gemma3_text": Family(
        "decoder",
        LM,
        lambda: hf.Gemma3TextConfig(
            **GROUPED, **SPECIAL, head_dim=8, sliding_window=5, layer_types=MIXED
        ),
    ),
    "gpt_oss": Family(
        "decoder",
        LM,
        lambda: hf.GptOssConfig(
            **GROUPED,
            **SPECIAL,
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=5,
            layer_types=MIXED,
        ),
    ),
    "gpt2": Family(
        "decoder",
        LM,
        lambda: hf.GPT2Config(
            vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, **SPECIAL
        ),
    ),
    "gpt_neox": Family("decoder", LM, lambda: hf.GPTNeoXConfig(**SIZES, **SPECIAL)),
    "opt": Family(
        "decoder",
        LM,
        lambda: hf.OPTConfig(
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=48,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            **SPECIAL,
        ),
    ),
    "phi3": Family("decoder", LM, lambda: hf.Phi3Config(**GROUPED, **SPECIAL, sliding_window=5)),
    "granite": Family(
        "decoder", LM, lambda: hf.GraniteConfig(**GROUPED, **SPECIAL, attention_multiplier=0.2)
    ),
    "olmo2": Family("decoder", LM, lambda: hf.Olmo2Config(**GROUPED, **SPECIAL)),
    "smollm3": Family(
        "decoder", LM, lambda: hf.SmolLM3Config(**GROUPED, **SPECIAL, no_rope_layers=[1, 0])
    ),
    "cohere": Family("decoder", LM, lambda: hf.CohereConfig(**GROUPED, **SPECIAL, logit_scale=1.0)),
    "bert": Family("encoder", BASE, lambda: hf.BertConfig(**SIZES, pad_token_id=0)),
    "roberta": Family("encoder", BASE, lambda: hf.RobertaConfig(**SIZES, pad_token_id=0)),
    "distilbert": Family(
        "encoder",
        BASE,
        lambda: hf.DistilBertConfig(
            vocab_size=99,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=48,
            max_position_embeddings=64,
            pad_token_id=0,
        ),
    ),
    "electra": Family(
        "encoder", BASE, lambda: hf.ElectraConfig(**SIZES, embedding_size=16, pad_token_id=0)
    ),
    "modernbert": Family(
        "encoder",
        BASE,
        lambda: hf.ModernBertConfig(
            **SIZES, **SPECIAL, local_attention=6, global_attn_every_n_layers=2
        ),
    ),
    "vit": Family("image", BASE, lambda: hf.ViTConfig(**VISION)),
    "dinov2": Family("image", BASE, lambda: hf.Dinov2Config(**VISION)),
    "clip": Family(
        "pair",
        BASE,
        lambda: hf.CLIPConfig(
            text_config={**SIZES, "eos_token_id": 98, "bos_token_id": 1},
            vision_config=VISION,
            projection_dim=16,
        ),
    ),
    "whisper": Family(
        "speech",
        hf.AutoModelForSpeechSeq2Seq,
        lambda: hf.WhisperConfig(
            **COUPLED, **SPECIAL, num_mel_bins=8, max_source_positions=20, max_target_positions=32
        ),
    ),
    "bart": Family(
        "coupled",
        hf.AutoModelForSeq2SeqLM,
        lambda: hf.BartConfig(**COUPLED, **SPECIAL, max_position_embeddings=64),
    ),
    "t5": Family(
        "coupled",
        hf.AutoModelForSeq2SeqLM,
        lambda: hf.T5Config(
            vocab_size=99,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=6,
            relative_attention_max_distance=10,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=None,
        ),
    ),
}
DECODERS = [name for name, family in FAMILIES.items() if family.kind == "decoder"]
DECODING = [name for name, f in FAMILIES.items() if f.kind in ("decoder", "coupled", "speech")]
ENCODERS = [n for n, f in FAMILIES.items() if f.kind in ("encoder", "image", "pair")]

# (family, backend): message of the error
REFUSED = {
    ("gemma2", "flash"): "caps its scores at 2.0",
    ("mistral", "linear"): "sliding window of 5",
    ("phi3", "linear"): "sliding window of 5",
    ("gemma2", "linear"): "sliding window of 5",
    ("gemma3_text", "linear"): "sliding window of 5",
    ("gpt_oss", "linear"): "attention sinks",
    ("modernbert", "linear"): "sliding window of 4",
}
REFUSED |= {
    (name, "gated_linear"): why for (name, backend), why in REFUSED.items() if backend == "linear"
}


@pytest.fixture
def make_model(redraw):
    def make(name: str) -> Any:
        family = FAMILIES[name]
        return redraw(family.auto.from_config(family.config(), attn_implementation="eager"))

    return make


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def outputs(kind: str, model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Run a model on a padded batch; set the outputs at padding to zero."""
    real = mask.bool()[:, :, None]
    with torch.no_grad():
        match kind:
            case "decoder":
                return model(input_ids=ids, attention_mask=mask).logits * real
            case "encoder":
                return model(input_ids=ids, attention_mask=mask).last_hidden_state * real
            case "coupled":
                given = {"input_ids": ids.flip(0), "attention_mask": mask.flip(0)}
            case "speech":
                given = {"input_features": draw(3, 8, 40)}
            case "image":
                return model(pixel_values=draw(2, 3, 16, 16)).last_hidden_state
            case "pair":
                ends = ids.clone()
                ends[torch.arange(3), mask.cumsum(1).argmax(1)] = 98  # pooled where the text ends
                both = model(input_ids=ends, attention_mask=mask, pixel_values=draw(2, 3, 16, 16))
                return torch.cat([both.text_embeds, both.image_embeds])
        return model(**given, decoder_input_ids=ids, decoder_attention_mask=mask).logits * real


@pytest.mark.parametrize("backend", ["softmax", "flash"])
@pytest.mark.parametrize("name", FAMILIES)
def test_exact_backends_equal_eager(name, backend, make_model, ids, padding):
    kind, model = FAMILIES[name].kind, make_model(name)
    masks = [padding(side) for side in ("none", "left", "right")]
    expected = [outputs(kind, model, ids, mask) for mask in masks]
    if (name, backend) in REFUSED:
        with pytest.raises(attnzoo.errors.UnsupportedError, match=REFUSED[name, backend]):
            attnzoo.swap(model, backend)
        return
    attnzoo.swap(model, backend)
    for mask, right in zip(masks, expected, strict=True):
        torch.testing.assert_close(
            outputs(kind, model, ids, mask), right, atol=TOLERANCE, rtol=TOLERANCE
        )
    attnzoo.swap(model, "softmax", window=1, else_="flash")  # cross-attention has no window
    wrong = outputs(kind, model, ids, masks[0])
    assert (
        wrong - expected[0]
    ).abs().max() > SENSITIVITY  # else the comparison above detects no errors


@pytest.mark.parametrize("backend", ["softmax", "flash"])
@pytest.mark.parametrize("name", DECODING)
def test_cached_decoding_equals_one_pass(name, backend, make_model, ids):
    kind, model = FAMILIES[name].kind, make_model(name)
    given: dict[str, Any] = {}
    if kind == "coupled":
        given = {"input_ids": ids.flip(1)}
    elif kind == "speech":
        given = {"input_features": draw(3, 8, 40)}
    key = "decoder_input_ids" if given else "input_ids"
    with torch.no_grad():
        expected = model(**given, **{key: ids}, use_cache=False).logits
        attnzoo.swap(model, "softmax" if (name, backend) in REFUSED else backend)
        cache, parts = None, []
        for tokens in (ids[:, :7], *ids[:, 7:10].split(1, 1), ids[:, 10:]):
            output = model(**given, **{key: tokens}, **cache_argument(cache), use_cache=True)
            cache = output_cache(output)
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("backend", ["linear", "gated_linear"])
@pytest.mark.parametrize("name", DECODERS)
def test_linear_decoders_run_or_are_refused(name, backend, make_model, ids, padding, positions):
    model = make_model(name)
    if (name, backend) in REFUSED:
        with pytest.raises(attnzoo.errors.UnsupportedError, match=REFUSED[name, backend]) as error:
            attnzoo.swap(model, backend)
        assert "layers.0.self_attn" in str(error.value)
        assert backend in str(error.value)
        return
    attnzoo.swap(model, backend)
    mask = padding("left")

    def place(mask: Tensor) -> dict[str, Tensor]:  # features see absolute positions
        return {} if name == "opt" else {"position_ids": positions(mask)}

    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask, **place(mask)).logits
        for row, length in enumerate((12, 7, 1)):
            alone = model(input_ids=ids[row : row + 1, 12 - length :]).logits
            torch.testing.assert_close(together[row : row + 1, 12 - length :], alone)
        steps = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=5,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        longer = torch.cat([mask, mask.new_ones(3, 5)], 1)
        whole = model(
            input_ids=steps.sequences, attention_mask=longer, use_cache=False, **place(longer)
        ).logits
    torch.testing.assert_close(torch.stack(steps.logits, 1), whole[:, 11:-1])


@pytest.mark.parametrize(
    ("name", "exact", "kept"),
    [
        ("mistral", "flash", [True, True]),
        ("gemma2", "softmax", [True, True]),
        ("gemma3_text", "flash", [True, False]),
        ("gpt_oss", "flash", [True, True]),
    ],
)
def test_else_keeps_refused_layers_exact(name, exact, kept, make_model, ids, padding):
    model = make_model(name)
    expected = outputs("decoder", model, ids, padding("left"))
    attnzoo.swap(model, "linear", else_=exact)
    found = [layer.self_attn.attnzoo.name for layer in model.model.layers]
    assert found == [exact if keep else "linear" for keep in kept]
    difference = (outputs("decoder", model, ids, padding("left")) - expected).abs().max()
    if all(kept):
        assert difference < TOLERANCE
    else:
        assert difference > SENSITIVITY
        with torch.no_grad():
            one_pass = model(input_ids=ids, use_cache=False).logits
            first = model(input_ids=ids[:, :7])
            cache = output_cache(first)
            rest = [
                model(input_ids=token, **cache_argument(cache)).logits
                for token in ids[:, 7:].split(1, 1)
            ]
        torch.testing.assert_close(torch.cat([first.logits, *rest], 1), one_pass)


@pytest.mark.parametrize("name", ENCODERS)
def test_linear_encoders_ignore_padding(name, make_model, ids, padding):
    kind, model = FAMILIES[name].kind, make_model(name)
    if (name, "linear") in REFUSED:
        with pytest.raises(attnzoo.errors.UnsupportedError, match=REFUSED[name, "linear"]):
            attnzoo.swap(model, "linear")
        return
    attnzoo.swap(model, "linear")
    mask = padding("right")
    first = outputs(kind, model, ids, mask)
    assert first.isfinite().all()
    torch.testing.assert_close(outputs(kind, model, ids * mask, mask), first)


@pytest.mark.parametrize("name", ENCODERS)
def test_gates_have_no_bidirectional_form(name, make_model):
    with pytest.raises(attnzoo.errors.UnsupportedError, match="bidirectional"):
        attnzoo.swap(make_model(name), "gated_linear")


def test_clip_text_is_causal_with_linear_too(make_model, ids):
    model = make_model("clip")
    attnzoo.swap(model, "linear")
    changed = ids.clone()
    changed[:, 8:] = 5
    with torch.no_grad():
        first, second = (model.text_model(input_ids=x).last_hidden_state for x in (ids, changed))
    assert torch.equal(first[:, :8], second[:, :8])
    assert not torch.equal(first[:, 8:], second[:, 8:])
