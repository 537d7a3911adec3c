"""Composite models: one part swapped, by module or sub-config; encoders and decoders separately."""

import json

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.hf.swap import original_attention
from tests.helpers import MODEL_SIZES

TEXT = {
    **MODEL_SIZES,
    "pad_token_id": 0,
    "eos_token_id": None,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}


def config():
    text, vision = hf.LlamaConfig(**TEXT), hf.CLIPVisionConfig(**VISION)
    return hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)


@pytest.fixture
def llava(redraw):
    return redraw(hf.LlavaForConditionalGeneration._from_config(config()))


def run(model):
    """Run the model on an image of four patches and some words."""
    ids = torch.randint(6, 99, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[:, 1:5] = 5
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model(input_ids=ids, pixel_values=pixels).logits


def by_part(model):
    return {
        part: {row.backend for row in attnzoo.describe(model) if part in row.name}
        for part in ("vision_tower", "language_model")
    }


SWAPS = {
    "module": lambda model: attnzoo.swap(model.model.language_model, "linear"),
    "sub-config": lambda model: attnzoo.swap(model, {"text_config": "linear"}),
    "spec": lambda model: attnzoo.swap(
        model, {"text_config": attnzoo.AttentionSpec("linear").to_dict()}
    ),
}


@pytest.mark.parametrize("how", SWAPS)
def test_one_part_is_swapped_saved_and_loaded(how, llava, tmp_path):
    before = run(llava)
    SWAPS[how](llava)
    assert by_part(llava) == {"vision_tower": {"none"}, "language_model": {"linear"}}
    after = run(llava)
    assert not torch.allclose(after, before, atol=1e-2)
    llava.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "attnzoo" not in saved
    assert saved["text_config"]["attnzoo"]["backend"] == "linear"
    again = hf.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert by_part(again) == {"vision_tower": {"none"}, "language_model": {"linear"}}
    torch.testing.assert_close(run(again), after)
    attnzoo.restore(again)
    torch.testing.assert_close(run(again), before)
    with pytest.warns(UserWarning, match="nothing to restore"):
        attnzoo.restore(again)


def test_parts_get_specs_of_their_own(llava, tmp_path):
    attnzoo.swap(llava, {"text_config": "linear", "vision_config": "flash"})
    assert by_part(llava) == {"vision_tower": {"flash"}, "language_model": {"linear"}}
    after = run(llava)
    llava.save_pretrained(tmp_path)
    again = hf.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    torch.testing.assert_close(run(again), after)


def test_one_part_by_config(llava, tmp_path):
    """Like transformers' ``attn_implementation``, which also takes a value per sub-config."""
    llava.save_pretrained(tmp_path)
    wanted = hf.AutoConfig.from_pretrained(tmp_path)
    wanted.text_config.attnzoo = attnzoo.AttentionSpec("gated_linear", gate="retnet").to_dict()
    model = hf.LlavaForConditionalGeneration.from_pretrained(
        tmp_path, config=wanted, attn_implementation={"text_config": "attnzoo"}
    )
    assert by_part(model) == {"vision_tower": {"none"}, "language_model": {"gated_linear"}}
    assert run(model).isfinite().all()


def test_a_part_in_a_model_that_is_swapped_whole(llava, tmp_path):
    before = run(llava)
    attnzoo.swap(llava, "flash")
    attnzoo.swap(llava.model.language_model, "linear", feature_map="relu")
    assert by_part(llava) == {"vision_tower": {"flash"}, "language_model": {"linear"}}
    after = run(llava)
    llava.save_pretrained(tmp_path)
    again = hf.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    torch.testing.assert_close(run(again), after)
    for model in (llava, again):
        with pytest.raises(SpecError, match="submodel of a model that was swapped as a whole"):
            attnzoo.restore(model.model.language_model)
        with pytest.raises(SpecError, match="submodel of a model that was swapped as a whole"):
            attnzoo.restore(model.model.vision_tower)
        attnzoo.restore(model)
        assert by_part(model) == {"vision_tower": {"none"}, "language_model": {"none"}}
        torch.testing.assert_close(run(model), before)


def test_swap_of_the_model_after_a_part(llava, tmp_path):
    before = run(llava)
    implementation = llava.config.text_config._attn_implementation
    attnzoo.swap(llava.model.language_model, "linear")
    attnzoo.swap(llava, "softmax")
    assert by_part(llava) == {"vision_tower": {"softmax"}, "language_model": {"softmax"}}
    assert getattr(llava.config.text_config, "attnzoo", None) is None
    torch.testing.assert_close(run(llava), before)
    attnzoo.restore(llava)
    assert llava.config.text_config._attn_implementation == implementation


def test_a_part_is_restored_alone(llava):
    before = run(llava)
    attnzoo.swap(llava, {"text_config": "linear", "vision_config": "linear"})
    attnzoo.restore(llava.model.language_model)
    assert by_part(llava) == {"vision_tower": {"linear"}, "language_model": {"none"}}
    attnzoo.restore(llava.model.vision_tower)
    torch.testing.assert_close(run(llava), before)


def test_original_attention_of_a_part(llava):
    before = run(llava)
    attnzoo.swap(llava.model.language_model, "linear")
    after = run(llava)
    with original_attention(llava):
        torch.testing.assert_close(run(llava), before)
    torch.testing.assert_close(run(llava), after)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"txt_config": "linear"}, "no sub-config 'txt_config'. Did you mean 'text_config'"),
        ({"text_config": "linear", "other": "flash"}, "no sub-config 'other'"),
    ],
)
def test_unknown_parts_are_refused(wanted, words, llava):
    with pytest.raises(SpecError, match=words):
        attnzoo.swap(llava, wanted)
    assert by_part(llava) == {"vision_tower": {"none"}, "language_model": {"none"}}


def test_encoder_and_decoder_layers_are_distinguished(redraw, tmp_path):
    sizes = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    bart = hf.BartConfig(vocab_size=99, d_model=32, **sizes, **heads, **layers)
    model = redraw(hf.BartForConditionalGeneration(bart))
    chosen = {"decoder.0-1": "linear", "encoder.1": "linear"}
    attnzoo.swap(model, "flash", layers=chosen)
    found = {row.name: row.backend for row in attnzoo.describe(model)}
    assert found["model.encoder.layers.0.self_attn"] == "flash"
    assert found["model.encoder.layers.1.self_attn"] == "linear"
    assert found["model.decoder.layers.0.self_attn"] == "linear"
    assert found["model.decoder.layers.1.encoder_attn"] == "linear"
    attnzoo.swap(model, "linear", layers={"encoder_attn": "flash"})
    model.save_pretrained(tmp_path)
    again = hf.BartForConditionalGeneration.from_pretrained(tmp_path)
    found = {row.name: row.backend for row in attnzoo.describe(again)}
    assert found["model.decoder.layers.1.encoder_attn"] == "flash"
    assert found["model.decoder.layers.1.self_attn"] == "linear"
    with pytest.raises(SpecError, match="layer 2, but those within 'decoder' are 0 to 1"):
        attnzoo.swap(model, "linear", layers={"decoder.2": "flash"})


def test_without_attnzoo_loading_a_swapped_part_raises(llava, tmp_path, fresh_python):
    attnzoo.swap(llava.model.language_model, "linear")
    llava.save_pretrained(tmp_path)
    code = (
        "import sys\n"
        "from transformers import LlavaForConditionalGeneration as Llava\n"
        "assert 'attnzoo' not in sys.modules\n"
        "Llava.from_pretrained(sys.argv[1])\n"
    )
    done = fresh_python(code, tmp_path)
    assert done.returncode != 0
    assert 'attn_implementation="attnzoo"' in done.stderr
