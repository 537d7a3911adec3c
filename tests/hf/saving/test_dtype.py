"""The data type of a saved model, and weights that are cast back to it."""

import json

import pytest
import torch
import transformers as hf

from attnzoo.hf.saving.files import cast_weights, round_weights, saved_dtype


def tiny(dtype=torch.float32):
    config = hf.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return hf.LlamaForCausalLM(config).to(dtype)


@pytest.mark.parametrize("in_config", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_saved_dtype_is_that_of_from_pretrained(tmp_path, dtype, in_config):
    tiny(dtype).save_pretrained(tmp_path)
    if not in_config:  # as of old checkpoints
        path = tmp_path / "config.json"
        data = json.loads(path.read_text())
        path.write_text(json.dumps({k: x for k, x in data.items() if "dtype" not in k}))
    assert saved_dtype(tmp_path) == hf.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == dtype


def test_weights_that_transformers_keeps_in_float32_are_not_cast():
    model = tiny()
    model._keep_in_fp32_modules_strict = {"mlp.gate_proj"}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    round_weights(model, torch.bfloat16)
    for name, x in model.state_dict().items():
        exact = before[name] if "gate_proj" in name else before[name].bfloat16().float()
        assert torch.equal(x, exact), name
    cast_weights(model, torch.bfloat16)
    kept = {name for name, x in model.state_dict().items() if x.dtype == torch.float32}
    assert kept == {"model.layers.0.mlp.gate_proj.weight"}
