"""Recovery without the dropouts of a model: its losses are those of a model that has none."""

import pytest
import torch
import transformers as hf

from attnzoo import AttentionSpec
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.hf.configs import set_dropout
from attnzoo.training.loading import load_model
from attnzoo.training.recover import recover
from tests.training.short_runs import arguments, losses

SPEC = AttentionSpec("delta", window=5)
P = 0.3
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 600}
GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), P)
WIDE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
FAMILIES = {
    "gpt2": GPT2,
    "opt": WIDE | {"ffn_dim": 32, "word_embed_proj_dim": 32, "layerdrop": 0.9, "dropout": P},
    "gpt_neox": WIDE | {"attention_dropout": P, "hidden_dropout": P, "intermediate_size": 32},
}


def save(path, family, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 384, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    config = hf.AutoConfig.for_model(family, **(sizes | FAMILIES[family] | changes))
    model = hf.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    hf.AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(path)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_dropouts_of_modules_and_functions_are_0(tmp_path, family):
    path, tokens = save(tmp_path, family), torch.arange(4, 40)[None]
    for disabled in (True, False):
        model = load_model(
            *(path, SPEC, hf.AutoModelForCausalLM),
            disable_dropout=disabled,
        )
        expected = model.eval()(tokens).logits
        found = model.train()(tokens).logits
        torch.testing.assert_close(found, expected) if disabled else None
        assert disabled or (found - expected).abs().max() > 1e-3
    set_dropout(model.config)
    set_dropout(model.config, hf.AutoConfig.from_pretrained(path))
    assert {name: getattr(model.config, name) for name in FAMILIES[family]} == FAMILIES[family]


@pytest.mark.exhaustive
def test_losses_are_those_of_a_model_without_dropout(text, tmp_path):
    """Of transfer and of distillation; the saved model keeps its dropouts."""
    none = dict.fromkeys((name for name in GPT2 if "pdrop" in name), 0.0)
    paths = {
        "disabled": save(tmp_path / "dropout", "gpt2"),
        "without": save(tmp_path / "none", "gpt2", **none),
        "enabled": tmp_path / "dropout",
    }
    found = {}
    for name, path in paths.items():
        disabled = name != "enabled"
        args = arguments(
            tmp_path / name / "out", transfer_steps=1, max_steps=2, disable_dropout=disabled
        )
        found[name] = losses(recover(path, SPEC, [text], args))
        saved = hf.AutoConfig.from_pretrained(tmp_path / name / "out")
        assert saved.resid_pdrop == (0 if name == "without" else P)
    assert found["disabled"] == found["without"]
    pairs = zip(found["enabled"], found["without"], strict=True)
    assert all(abs(a[2] - b[2]) > 1e-4 * b[2] for a, b in pairs)
