"""Tiny configs for all model types, from the names of their fields and from recipes."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tools.family_sweep.recipes import RECIPES

VOCABULARY = 99
FIRST_WORD = 40  # smaller ids are reserved for special tokens
HEADS, HEAD = 4, 8

_NAMES: list[tuple[Any, str]] = [  # a size, and its names in config classes
    (
        32,
        """hidden_size d_model n_embd embed_dim dim hidden_dim emb_dim width word_embed_proj_dim
        decoder_hidden_size encoder_hidden_size text_hidden_size vision_hidden_size out_hidden_size
        output_dim encoder_dim text_embed_dim vision_embed_dim text_embedding_dim""",
    ),
    (16, "embedding_size projection_dim pooler_output_size proj_dim hidden_size_per_layer_input"),
    (
        2,
        """num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers layers
        num_decoder_layers num_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers
        num_blocks""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads
        decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads""",
    ),
    (
        2,
        """num_key_value_heads n_kv_heads num_kv_heads encoder_num_key_value_heads
        decoder_num_key_value_heads multi_query_group_num""",
    ),
    (HEAD, "head_dim d_kv attention_head_dim kv_channels attention_head_size"),
    (
        48,
        """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner d_inner mlp_dim
        ffn_hidden_size encoder_intermediate_size decoder_intermediate_size feed_forward_size
        dim_feedforward moe_intermediate_size shared_expert_intermediate_size feedforward_dim
        intermediate_size_mlp ffn_size""",
    ),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_k moe_topk top_k_experts"),
    (1, "n_group topk_group n_shared_experts num_shared_experts"),
    (24, "q_lora_rank"),  # latent attention: query, key and value sizes differ
    (16, "kv_lora_rank"),
    (8, "qk_nope_head_dim"),
    (4, "qk_rope_head_dim"),
    (12, "v_head_dim"),
    (
        64,
        """max_position_embeddings n_positions max_source_positions max_target_positions n_ctx
        max_seq_len max_sequence_length original_max_position_embeddings""",
    ),
    # shorter than the inputs, so that they have an effect
    (5, "sliding_window sliding_window_size local_attention window_size attention_chunk_size"),
    (5, "attention_window_size"),
    (2.0, "attn_logit_softcapping"),
    (3, "index_topk"),
    (6, "relative_attention_num_buckets"),
    (10, "relative_attention_max_distance"),
    (8, "state_size mamba_d_state ssm_state_size"),
    (4, "mamba_n_heads mamba_num_heads linear_num_value_heads"),
    (2, "linear_num_key_heads linear_num_heads"),
    (16, "mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim mamba_chunk_size"),
    (1, "mamba_n_groups n_groups"),
    (
        VOCABULARY,
        """vocab_size text_vocab_size decoder_vocab_size encoder_vocab_size
        vocab_size_per_layer_input""",
    ),
    (2, "type_vocab_size num_frames num_conv_pos_embedding_groups"),
    (16, "image_size"),
    (4, "patch_size num_conv_pos_embeddings"),
    (8, "num_mel_bins"),
    ((16, 16), "conv_dim"),
    ((4, 4), "conv_kernel"),
    ((2, 2), "conv_stride"),
    (1.0, "layer_scale_init_value layerscale_value"),
]
SIZES = {name: value for value, names in _NAMES for name in names.split()}
# Fields that stay None if None is their default.
_OPTIONAL = {"sliding_window", "sliding_window_size", "attn_logit_softcapping"}
_DROPOUT_SUFFIXES = ("_drop", "_pdrop", "_dropout_prob", "layerdrop")


def tiny_config(model_type: str) -> Any:
    """Return a tiny config of a model type."""
    return shrink(CONFIG_MAPPING[model_type], {})


def shrink(cls: type[PreTrainedConfig], changes: dict[str, Any]) -> Any:
    """Return a config with small sizes.

    Args:
        cls: Config class.
        changes: Values by field; a mapping for a nested config.
    """
    changes = RECIPES.get(cls.model_type, {}) | changes
    inner = inner_classes(cls)
    values = _sizes(cls) | {key: value for key, value in changes.items() if key not in inner}
    for key, sub in inner.items():
        if changes.get(key, {}) is not None:
            values[key] = shrink(sub, changes.get(key, {}))
    return cls(**_one_layer_of_each_type(cls, values))


def _sizes(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return small values for the fields of a config class with a known name."""
    values: dict[str, Any] = {}
    special = 3  # the next id of a special token
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, default in fields.items():
        number = isinstance(default, int | float) and not isinstance(default, bool)
        if name in SIZES and not (default is None and name in _OPTIONAL):
            values[name] = _like(default, SIZES[name])
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default, int):
            values[name], special = special, special + 1
        elif ("dropout" in name or name.endswith(_DROPOUT_SUFFIXES)) and number:
            values[name] = 0.0 if isinstance(default, float) else 0
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        values["num_key_value_heads"] = (
            HEADS  # latent attention has as many key heads as query heads
        )
    for value, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if name in fields:
            values[name] = value
    return values | _rotations(cls)


def _one_layer_of_each_type(cls: type[PreTrainedConfig], values: dict[str, Any]) -> dict[str, Any]:
    """Use one layer of each type if the config has several layer types."""
    fields = {field.name for field in dataclasses.fields(cls)}
    name = next((n for n in ("layer_types", "layers_block_type") if n in fields), None)
    if name is None or values.get(name) or "num_hidden_layers" not in values:
        return values
    kinds = list(dict.fromkeys(getattr(cls(), name, None) or ()))
    if len(kinds) < 2:
        return values
    return {**values, name: kinds, "num_hidden_layers": len(kinds)}


def inner_classes(cls: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """Return the class of each nested config, by field; for AutoConfig, that of the default."""
    found: dict[str, Any] = {}
    default = cls() if AutoConfig in cls.sub_configs.values() else None
    for key, sub in cls.sub_configs.items():
        known: Any = type(getattr(default, key, None)) if sub is AutoConfig else sub
        if issubclass(known, PreTrainedConfig):
            found[key] = known
    return found


def _rotations(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return rotary sections of several axes that add up to half of the small head dimension."""
    rope = None if cls.sub_configs else getattr(cls(), "rope_parameters", None)
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    half = int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3] if half > 2 else [1, half - 1, 0]
    return {"rope_parameters": {**rope, "mrope_section": sections}}


def _like(default: Any, value: Any) -> Any:
    """Return a value in the form of the default: a list if the default is a list."""
    if isinstance(default, list | tuple) and not isinstance(value, list | tuple):
        return type(default)(value for _ in default)
    if isinstance(value, list | tuple) and not isinstance(default, list | tuple):
        return default
    return value
