"""Forty families of all kinds, built and checked; the outcomes must equal the record."""

import warnings

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tools.family_sweep import record
from tools.family_sweep.model_type import check_type

SAMPLE = {
    "decoders": """llama mistral gemma2 gemma3_text gemma3n_text gpt_oss gpt2 gpt_neox opt phi3
        deepseek_v4 cohere2 llama4_text deepseek_v3 deepseek_v32 diffllama inkling2_text jetmoe
        jamba bamba""",
    "encoders": "bert roberta modernbert xmod layoutlm",
    "coupled": "bart t5 t5gemma whisper speech_to_text",
    "images": "vit dinov2 siglip2_vision_model swin",
    "sounds": "wav2vec2 audio-spectrogram-transformer",
    "pairs": "clip git qwen2_vl got_ocr2",
}
NAMES = " ".join(SAMPLE.values()).split()
# Families that differ in the path they take: sinks, softcaps, biases, learned positions, values of
# another size, differences of heads, mixers beside attention, two models, images
FEW = [
    *("llama", "gpt_oss", "gemma2", "gpt2", "deepseek_v3", "diffllama", "jamba", "bert"),
    *("t5", "bart", "vit", "qwen2_vl"),
]
BACKENDS = ["softmax", "flash", "linear", "gated_linear"]


def test_the_sample_is_of_forty():
    assert len(NAMES) == len(set(NAMES)) == 40
    assert set(FEW) < set(NAMES)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(x, marks=[] if x in FEW else [pytest.mark.exhaustive]) for x in NAMES],
)
def test_family(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = check_type(model_type, BACKENDS, windowed=False)
    assert entry["outcome"] == "checked", entry
    outcomes = {name: result["outcome"] for name, result in entry["backends"].items()}
    assert not {"different", "failed"} & set(outcomes.values()), entry["backends"]
    assert not entry.get("unfelt"), "the outputs are not sensitive to these"
    for name, result in entry["backends"].items():
        assert result.get("reason") or result["outcome"] in ("equal", "runs"), name
    if transformers.__version__ in record.versions():
        recorded = record.read(transformers.__version__)["types"][model_type]["backends"]
        assert outcomes == {name: recorded[name]["outcome"] for name in BACKENDS}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
