"""The class of each model type: the one that generates, or else the base model."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# In order of preference: classes that generate come first, because their decoding is checked.
DECODING = ("CAUSAL_LM", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
COUPLED = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM")
OTHER = (
    *("MASKED_LM", "PRETRAINING", "IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "MASK_GENERATION"),
    *("CTC", "RNNT", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "TIME_SERIES_PREDICTION"),
    *("ZERO_SHOT_OBJECT_DETECTION", "DEPTH_ESTIMATION", "BACKBONE", "UNIVERSAL_SEGMENTATION"),
    *("KEYPOINT_MATCHING", "IMAGE_TO_IMAGE"),
)


def family_name(model_type: str) -> str:
    """Return the folder of transformers that contains a model type."""
    return CONFIG_MAPPING[model_type].__module__.split(".")[2]


def model_class(model_type: str) -> Any:
    """Return the class of a model type; ``None`` if no auto class has one."""
    config_class = CONFIG_MAPPING[model_type]
    tasks = COUPLED if config_class.is_encoder_decoder else DECODING
    for task in (*tasks, "", *OTHER):
        name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        found = getattr(modeling_auto, name, {}).get(model_type)
        for candidate in [found] if isinstance(found, str) else found or ():
            cls = getattr(transformers, candidate)
            if getattr(cls, "config_class", None) in (None, config_class):
                return cls  # a class with another config is a part of this model
    return None
