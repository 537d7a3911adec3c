"""Changes to the generic tiny config, by model type; they apply to nested configs too."""

from __future__ import annotations

from typing import Any


def _axes(*sections: int, **more: Any) -> dict[str, Any]:
    """Return rotary positions of several axes; sections add up to half the head dimension."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)}
    return {"rope_parameters": rope | more}


# Decoders whose padding mask covers the encoder's tokens and their own.
JOINT_MASKS = {"DiffusionGemmaForBlockDiffusion", "DiffusionGemmaModel"}

RECIPES: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": _axes(2, 1, 1),
    "qwen2_5_vl_text": _axes(2, 1, 1),
    "qwen2_5_omni_text": _axes(2, 1, 1),
    "qwen2_5_omni_talker": _axes(2, 1, 1),
    "paddleocr_vl_text": _axes(2, 1, 1),
    "glm4v_text": _axes(2, 1, 1),
    "glm_ocr_text": _axes(2, 1, 1),
    "glm_image_text": _axes(2, 1, 1),
    "glm4v_moe_text": _axes(1, 1, 0, partial_rotary_factor=0.5),
    # sizes that depend on each other
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 48]} | _axes(1, 1, 2),
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "zaya": {"num_experts_per_tok": 1},
    "granite_speech5_encoder": {"context_size": 8},
    "wav2vec2-bert": {"feature_projection_input_dim": 8},
    "audio-spectrogram-transformer": {"max_length": 40},
    "mimi": {
        "upsample_groups": 32,
        "num_filters": 4,
        "codebook_dim": 16,
        "codebook_size": 32,
        "upsampling_ratios": [4, 2],
        "layer_scale_initial_scale": 1.0,
    },
    "sam_vision_model": {"output_channels": 32, "num_pos_feats": 16},
    "sam_hq_vision_model": {"output_channels": 32, "num_pos_feats": 16},
    "speech_to_text": {"input_feat_per_channel": 8},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "blt": {"encoder_hash_byte_group_vocab": 60, "encoder_hash_byte_group_size": [3, 4]},
    "blt_local_decoder": {"hidden_size_global": 32},
    "longcat_flash": {
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "head_dim": 4,
    },
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4},
    "emu3_vqgan": {"base_channels": 32, "embed_dim": 8, "codebook_size": 32},
    "neomme": {"head_dim": 16},
    "rt_detr_resnet": {
        "embedding_size": 16,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_indices": [2, 3, 4],
    },
    "rt_detr": {"encoder_in_channels": [16, 32, 32], "image_size": 64, "num_queries": 8},
    "rt_detr_v2": {"encoder_in_channels": [16, 32, 32], "num_queries": 8},
    "sam2_hiera_det_model": {
        "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 1, 1],
        "embed_dim_per_stage": [8, 16, 32, 64],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "hidden_size": 8,
    },
    "sam2_vision_model": {
        "backbone_channel_list": [64, 32, 16, 8],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "videoprism_vision_model": {"image_size": 36, "patch_size": 18, "num_frames": 2},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 32}},
    "pocket_tts": {"flow_head_config": {"condition_dim": 32}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 32}},
    "nemotron3_5_transcribe_audio": {"head_config": {"audio_hidden_size": 32}},
    "lw_detr_vit": {"num_windows": 4, "image_size": 32},
    "bridgetower": {"hidden_size": 64},
    "bridgetower_text_model": {"hidden_size": 64},
    "bridgetower_vision_model": {"hidden_size": 64},
    "vitpose_backbone": {"image_size": [16, 16], "patch_size": [4, 4]},
    "swin": {"image_size": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    "donut-swin": {"image_size": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    "segformer": {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 16, 16, 32],
        "num_attention_heads": [1, 2, 2, 4],
        "image_size": 64,
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 0]]},
    # layers of more than one kind
    "bamba": {"attn_layer_indices": [1]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gemma3n_text": {  # the last two share keys and values with the first two
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    # fields without a default
    "autoformer": {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2]},
    "time_series_transformer": {
        "prediction_length": 4,
        "context_length": 12,
        "lags_sequence": [1, 2],
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "emu3": {"vocabulary_map": {"<image>": 3}},
}
