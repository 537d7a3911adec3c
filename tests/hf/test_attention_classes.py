"""Models that select attention classes from a table of their own, and towers that share classes."""

import pytest
import torch
import transformers as hf

import attnzoo
import attnzoo.testing
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf import seam
from tests.helpers import MODEL_SIZES

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, **SPECIAL}
NOT_ON_THE_INTERFACE = {
    "falcon": (hf.FalconForCausalLM, lambda: hf.FalconConfig(**MODEL_SIZES, **SPECIAL)),
    "gptj": (hf.GPTJForCausalLM, lambda: hf.GPTJConfig(**GPT)),
    "codegen": (hf.CodeGenForCausalLM, lambda: hf.CodeGenConfig(**GPT)),
    "gpt_neo": (
        hf.GPTNeoForCausalLM,
        lambda: hf.GPTNeoConfig(
            vocab_size=99,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            **SPECIAL,
        ),
    ),
}


@pytest.mark.parametrize("family", NOT_ON_THE_INTERFACE)
def test_models_without_the_interface_are_refused_with_a_reason(family, redraw):
    cls, make = NOT_ON_THE_INTERFACE[family]
    if seam.family_uses_interface(family):  # GPT-J and CodeGen do since transformers 5.24
        model, ids = redraw(cls(make())), torch.arange(24).view(2, 12)
        expected = model(ids).logits
        torch.testing.assert_close(attnzoo.swap(model, "flash")(ids).logits, expected)
        attnzoo.testing.check_generation(attnzoo.swap(model, "linear"))
        return
    table = "" if family == "codegen" else f"{family.upper()}_ATTENTION_CLASSES"
    reason = rf"attention interface.*{table}.*nothing can be swapped"
    with pytest.raises(SpecError, match=reason):
        attnzoo.swap(cls(make()), "flash")
    config = make()
    config.attnzoo = attnzoo.AttentionSpec("flash")
    with pytest.raises(SpecError, match=reason):
        cls._from_config(config, attn_implementation="attnzoo")


def sam_config():
    vision = {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
        "mlp_dim": 32,
        "global_attn_indexes": [1],
        "window_size": 2,
        "num_pos_feats": 8,
    }
    prompt = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
    decoder = {
        "hidden_size": 16,
        "mlp_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
        "attention_downsample_rate": 1,
    }
    return hf.SamConfig(
        vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
    )


def test_a_model_with_a_table_in_one_part_is_saved_and_loaded(redraw, tmp_path):
    """SAM's image encoder selects classes from a table; its mask decoder uses the interface."""
    model = redraw(hf.SamModel(sam_config()))
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    inputs = {"pixel_values": pixels, "input_points": torch.tensor([[[[4.0, 9.0]]]])}
    with torch.no_grad():
        expected = model(**inputs).pred_masks
        attnzoo.swap(model, "softmax")
        model.save_pretrained(tmp_path)
        again = hf.SamModel.from_pretrained(tmp_path).eval()
        found = again(**inputs).pred_masks
    assert {row.backend for row in attnzoo.describe(again)} == {"softmax"}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def clip(redraw):
    text = {**MODEL_SIZES, **SPECIAL, "eos_token_id": 98, "max_position_embeddings": 16}
    vision = {k: v for k, v in MODEL_SIZES.items() if k != "vocab_size"}
    vision |= {"image_size": 16, "patch_size": 4}
    return redraw(hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision)))


def test_text_tower_of_clip_is_causal(redraw):
    """Both towers use one layer class, which declares itself bidirectional."""
    model = clip(redraw)
    with pytest.raises(UnsupportedError, match=r"text_model.*the layer is causal"):
        attnzoo.swap(model, "linformer")
    layers = {"text_model.0-1": "gated_linear"}  # for decoders only
    attnzoo.swap(model, "linformer", max_length=17, layers=layers)
    attnzoo.swap(model, "linformer", max_length=17, else_="flash")
    backends = {row.name.split(".")[0]: row.backend for row in attnzoo.describe(model)}
    assert backends == {"text_model": "flash", "vision_model": "linformer"}
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(input_ids=ids, pixel_values=torch.ones(2, 3, 16, 16)).logits_per_image
    assert logits.isfinite().all()


def gemma3():
    text = {
        **MODEL_SIZES,
        **SPECIAL,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
    }
    vision = {**MODEL_SIZES, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4}
    del vision["vocab_size"]
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90
    )
    return hf.Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("form", ["whole", "text_config"])
def test_swap_warns_of_image_masks(form):
    model = gemma3()
    spec = attnzoo.AttentionSpec("linear", else_="flash")
    with pytest.warns(UserWarning, match=r"images will be refused") as record:
        attnzoo.swap(model, spec if form == "whole" else {"text_config": spec})
    message = str(record[0].message)
    assert "layers.1.self_attn" in message
    assert "layers.0.self_attn" not in message  # it has a sliding window: flash
    ids = torch.randint(3, 80, (1, 8))
    with torch.no_grad():
        assert model(input_ids=ids).logits.isfinite().all()
        ids[:, 1:5] = 90
        inputs = {"token_type_ids": (ids == 90).long(), "pixel_values": torch.ones(1, 3, 16, 16)}
        with pytest.raises(UnsupportedError, match=r"layers\.1.*exact backend"):
            model(input_ids=ids, **inputs)
        attnzoo.swap(model, "flash")
        assert model(input_ids=ids, **inputs).logits.isfinite().all()
