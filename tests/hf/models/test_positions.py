import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

import attnzoo
from attnzoo.errors import SpecError, UnsupportedError

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
TINY = {"d_model": 32, "vocab_size": 99, "max_position_embeddings": 32}
BART = TINY | {
    "decoder_layers": 1,
    "encoder_layers": 1,
    "decoder_attention_heads": 2,
    "encoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
    "encoder_ffn_dim": 32,
}
MADE = {
    "bert": lambda: BertModel(
        BertConfig(**SMALL, intermediate_size=32, max_position_embeddings=32)
    ),
    "roberta": lambda: RobertaModel(
        RobertaConfig(**SMALL, intermediate_size=32, max_position_embeddings=34)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99, n_positions=32)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**SMALL, ffn_dim=32, max_position_embeddings=32, word_embed_proj_dim=32)
    ),
    "bart": lambda: BartForCausalLM(BartConfig(**BART)),
    "marian": lambda: MarianForCausalLM(MarianConfig(**BART, pad_token_id=0)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, intermediate_size=32, max_position_embeddings=32)
    ),
}


def make(name):
    torch.manual_seed(0)
    return MADE[name]().eval()


def run(model, length, **given):
    tokens = torch.arange(length)[None] % 90 + 5
    with torch.no_grad():
        return model(tokens, **given)[0]


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "opt", "bart", "marian"])
def test_a_longer_input_runs_and_is_saved(name, tmp_path):
    model = make(name)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        run(model, 80)
    before = run(model, 32)
    assert attnzoo.extend_positions(model, 80) is model
    torch.testing.assert_close(run(model, 32), before, rtol=0, atol=1e-6)
    out = run(model, 80)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(run(again, 80), out, rtol=0, atol=1e-6)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        run(model, 120)


def test_copy_repeats_the_learned_rows():
    model = make("gpt2")
    rows = model.transformer.wpe.weight.detach().clone()
    attnzoo.extend_positions(model, 80, method="copy")
    now = model.transformer.wpe.weight
    assert torch.equal(now, torch.cat([rows, rows, rows[:16]]))
    assert model.config.n_positions == 80


def test_interpolation_keeps_the_ends_and_averages_neighbours():
    model = make("bert")
    rows = model.embeddings.position_embeddings.weight.detach().clone()
    attnzoo.extend_positions(model, 63, method="interpolate")  # 62 steps over 31: halves
    now = model.embeddings.position_embeddings.weight.detach()
    torch.testing.assert_close(now[::2], rows)
    torch.testing.assert_close(now[1::2], (rows[1:] + rows[:-1]) / 2)


def test_rows_before_the_first_position_stay():
    """RoBERTa's first two rows and OPT's are no positions."""
    roberta, opt = make("roberta"), make("opt")
    tables = [roberta.embeddings.position_embeddings, opt.model.decoder.embed_positions]
    before = [table.weight.detach().clone() for table in tables]
    for model, table, rows in zip((roberta, opt), tables, before, strict=True):
        attnzoo.extend_positions(model, 64, method="copy")
        assert torch.equal(table.weight[:34], rows)
        assert torch.equal(table.weight[34:], rows[2:])
    assert roberta.config.max_position_embeddings == 66
    assert opt.config.max_position_embeddings == 64


@pytest.mark.parametrize(
    ("name", "length", "method", "message"),
    [
        ("bert", 32, None, "greater than the 32 positions"),
        ("bert", 0, None, "number of tokens"),
        ("bert", 64.0, None, "number of tokens"),
        ("bert", 64, "yarn", "Available: copy, interpolate"),
        ("gpt2", 64, "copi", "Did you mean 'copy'"),
        ("roberta", 32, None, "greater than the 32 positions"),
        ("marian", 64, "copy", "Available: computed"),
    ],
)
def test_mistakes_change_nothing(name, length, method, message):
    model = make(name)
    before = (model.config.to_dict(), {k: v.clone() for k, v in model.state_dict().items()})
    with pytest.raises(SpecError, match=message):
        attnzoo.extend_positions(model, length, method=method)
    assert model.config.to_dict() == before[0]
    assert all(torch.equal(v, before[1][k]) for k, v in model.state_dict().items())


def test_unsupported_models_are_refused():
    with pytest.raises(UnsupportedError, match=r"config\.rope_parameters"):
        attnzoo.extend_positions(make("llama"), 128)
    t5 = T5EncoderModel(
        T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=99)
    )
    with pytest.raises(UnsupportedError, match="ALiBi and relative biases are unlimited"):
        attnzoo.extend_positions(t5, 4096)
    vit = ViTModel(
        ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )
    with pytest.raises(UnsupportedError, match="nothing can be extended"):
        attnzoo.extend_positions(vit, 4096)
    bert = make("bert")
    attnzoo.swap(bert, "linformer", num_rows=4)
    with pytest.raises(UnsupportedError, match="extend the model before"):
        attnzoo.extend_positions(bert, 64)
    with pytest.raises(SpecError, match="not a transformers model"):
        attnzoo.extend_positions(torch.nn.Linear(2, 2), 64)
