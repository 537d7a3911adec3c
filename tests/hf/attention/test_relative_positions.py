"""Relative positions that depend on the query: Shaw's, and Transformer-XL's.

transformers passes them to the attention interface as an additive bias, ``[B, H, T, S]``.
"""

from typing import Any

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import AttnzooError

HIDDEN: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0
)
CASES = {  # family, position_embeddings_type: parameters of the positions
    ("wav2vec2-bert", "relative"): ("linear_pos", "pos_bias"),  # Transformer-XL
    ("wav2vec2-bert", "relative_key"): ("distance_embedding",),  # Shaw
    ("wav2vec2-conformer", "relative"): ("linear_pos", "pos_bias"),
    ("parakeet_encoder", None): ("relative_k_proj", "bias_u", "bias_v"),
}


@pytest.fixture
def make_model(redraw):
    def make(family: str, kind: str | None) -> tuple[Any, dict[str, Any]]:
        draw = torch.Generator().manual_seed(3)
        frames = torch.randn(2, 24, 16, generator=draw, dtype=torch.float64)
        mask = torch.ones(2, 24, dtype=torch.long)
        mask[1, 15:] = 0
        inputs = {"input_features": frames, "attention_mask": mask}
        match family:
            case "wav2vec2-bert":
                config = hf.Wav2Vec2BertConfig(
                    **HIDDEN,
                    feature_projection_input_dim=16,
                    position_embeddings_type=kind,
                    left_max_position_embeddings=6,
                    right_max_position_embeddings=3,
                    conv_depthwise_kernel_size=3,
                    apply_spec_augment=False,
                )
                cls = hf.Wav2Vec2BertModel
            case "wav2vec2-conformer":
                config = hf.Wav2Vec2ConformerConfig(
                    **HIDDEN,
                    position_embeddings_type=kind,
                    conv_dim=(16,),
                    conv_stride=(4,),
                    conv_kernel=(4,),
                    conv_depthwise_kernel_size=3,
                    apply_spec_augment=False,
                )
                cls = hf.Wav2Vec2ConformerModel
                inputs = {"input_values": frames[:, :6].flatten(1)}
            case "parakeet_encoder":
                config = hf.ParakeetEncoderConfig(
                    **HIDDEN, num_mel_bins=16, subsampling_conv_channels=8, conv_kernel_size=3,
                    subsampling_factor=2, max_position_embeddings=64,
                )  # fmt: skip
                cls = hf.ParakeetEncoder
        for name, value in NO_DROPOUT.items():
            if hasattr(config, name):
                setattr(config, name, value)
        # parakeet's eager softmax is in float32
        implementation = "sdpa" if family == "parakeet_encoder" else "eager"
        model = cls._from_config(config, attn_implementation=implementation)
        return redraw(model).double(), inputs

    return make


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_outputs_and_gradients_of_exact_backends_equal_stock(case, make_model):
    model, inputs = make_model(*case)
    positions = [
        x for name, x in model.named_parameters() if any(word in name for word in CASES[case])
    ]
    assert positions
    found = []
    for backend in (None, "softmax", "flash"):
        if backend is not None:
            attnzoo.swap(model, backend)
        out = model(**inputs)[0]
        if "attention_mask" in inputs:
            out = out[0]  # stock gives padding rows an output of their own
        found.append((out, torch.autograd.grad(out.square().mean(), positions)))
        attnzoo.restore(model) if backend is not None else None
    for swapped in found[1:]:
        assert_close(swapped, found[0], atol=1e-9, rtol=1e-9)
    assert all(gradient.abs().max() > 0 for gradient in found[0][1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
@pytest.mark.parametrize("backend", ["linear", "performer", "linformer"])
def test_other_backends_refuse_them_by_name(case, backend, make_model):
    model, inputs = make_model(*case)

    def run():
        attnzoo.swap(model, backend)
        model(**inputs)

    with pytest.raises(AttnzooError, match=r"position|additive bias"):
        run()
