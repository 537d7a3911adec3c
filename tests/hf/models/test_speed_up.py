"""attnzoo.speed_up: stock recurrent layers on our ops, against the stock layers."""

import copy
import inspect
import pickle
import sys

import pytest
import torch
import transformers
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf.models import speed_up as module
from attnzoo.hf.models.speed_up import sped_up_layers
from attnzoo.hf.seam import cache_argument, output_cache
from tests.helpers import run_torch_functions

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
GATED_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MAMBA = {  # two groups, for two heads each
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "qwen3_next": {
        **GATED_DELTA_NET,
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "qwen3_5_text": GATED_DELTA_NET,
    "olmo_hybrid": {**GATED_DELTA_NET, "linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "kimi_linear": {
        **EXPERTS,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "granitemoehybrid": {**MAMBA, "num_local_experts": 0, "position_embedding_type": "rope"},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 12,
        "expand": 2,
        "chunk_size": 16,
        "intermediate_size": 48,
    },
}
LINEAR = ("granitemoehybrid", "nemotron_h")


def make(family, seed=0, **changes):
    """Return a small random model of a family on torch's functions, as without a GPU."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so large that the states matter
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(autouse=True)
def torch_functions(monkeypatch):
    """Let stock layers run torch's functions where flash-linear-attention is installed."""
    run_torch_functions(monkeypatch, *FAMILIES)


def tokens(*shape):
    return torch.randint(1, 99, shape, generator=torch.Generator().manual_seed(3))


def pair(family):
    """Return a stock model, and a copy that is sped up."""
    stock = make(family)
    return stock, attnzoo.speed_up(copy.deepcopy(stock))


def test_logits_and_gradients_are_those_of_the_stock_model(family):
    stock, ours = pair(family)
    ids = tokens(2, 70)
    found = []
    for model in (stock, ours):
        out = model(ids, labels=ids)
        out.loss.backward()
        found.append((out.logits, {n: p.grad for n, p in model.named_parameters()}))
    assert_close(found[1][0], found[0][0], atol=2e-4, rtol=1e-3)
    for name, grad in found[0][1].items():
        other = found[1][1][name]
        assert (grad is None) == (other is None), name
        if grad is not None:
            assert (other - grad).norm() <= 1e-3 * grad.norm().clamp(min=1e-6), name


def test_it_runs_our_ops(family, monkeypatch):
    _, ours = pair(family)
    op, ran = "linear_attention" if family in LINEAR else "delta_attention", []

    def recorded(*args, **kwargs):
        found = function(*args, **kwargs)
        ran.append(found.impl.impl)
        return found

    function = getattr(module, op)
    monkeypatch.setattr(module, op, recorded)
    with torch.no_grad():
        ours(tokens(1, 20))
    assert ran in (["cpp"] * 2, ["torch"] * 2)


def test_generation_is_that_of_the_stock_model(family):
    stock, ours = pair(family)
    ids, mask = tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[0, :6] = 0
    ids[0, :6] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected, found = (model.generate(ids, **options) for model in (stock, ours))
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=2e-4, rtol=1e-3)


def test_a_prompt_in_two_parts(family):
    ids, found = tokens(1, 40), []
    for model in pair(family):
        with torch.no_grad():
            first = model(ids[:, :23], use_cache=True)
            found.append(model(ids[:, 23:], **cache_argument(output_cache(first))).logits)
            whole = model(ids).logits[:, 23:]
    assert_close(found[1], found[0], atol=2e-4, rtol=1e-3)
    assert_close(found[1], whole, atol=2e-4, rtol=1e-3)


def test_restore_copies_pickles_and_saved_files(family, tmp_path):
    stock, ours = pair(family)
    ids = tokens(1, 20)
    with torch.no_grad():
        expected = ours(ids).logits
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            layers = list(sped_up_layers(other))
            assert len(layers) == 2
            assert all(layer.forward.layer is layer for _, layer in layers)
            assert torch.equal(other(ids).logits, expected)
    ours.save_pretrained(tmp_path)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    loaded = type(stock).from_pretrained(tmp_path)
    assert not list(sped_up_layers(loaded))
    assert loaded.config.to_dict().keys() == stock.config.to_dict().keys()
    assert attnzoo.speed_up(ours) is ours  # again changes nothing
    attnzoo.restore(ours)
    assert not list(sped_up_layers(ours))
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, stock(ids).logits)
    with pytest.warns(UserWarning, match="nothing to restore"):
        attnzoo.restore(ours)


def test_classes_and_modules_do_not_change(family):
    stock, ours = pair(family)
    layer = next(layer for _, layer in sped_up_layers(ours))
    name = type(layer).__module__
    before = dict(vars(sys.modules[name]))
    ours(tokens(1, 5))
    assert vars(sys.modules[name]) == before
    assert inspect.signature(layer.forward) == inspect.signature(
        next(x for x in stock.modules() if type(x) is type(layer)).forward
    )


def test_swap_of_a_model_that_is_sped_up():
    _, ours = pair("qwen3_5_text")
    attnzoo.swap(ours, "linear")
    assert [row.backend for row in attnzoo.describe(ours)] == ["linear"]
    assert len(list(sped_up_layers(ours))) == 2
    attnzoo.restore(ours)
    assert not list(sped_up_layers(ours))


def test_accelerate_hooks_stay():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    calls = []

    class Count(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return args, kwargs

    stock = make("qwen3_5_text")
    layer = stock.model.layers[0].linear_attn
    expected = stock(tokens(1, 9)).logits
    add_hook_to_module(layer, Count())
    attnzoo.speed_up(stock)
    assert_close(stock(tokens(1, 9)).logits, expected, atol=2e-4, rtol=1e-3)
    assert calls == [layer]
    assert len(list(sped_up_layers(stock))) == 2
    attnzoo.restore(stock)
    assert torch.equal(stock(tokens(1, 9)).logits, expected)
    assert len(calls) == 2
    remove_hook_from_module(layer)


def test_unsupported_models_are_refused(llama):
    with pytest.raises(SpecError, match=r"LlamaForCausalLM has no .* it has LlamaAttention"):
        attnzoo.speed_up(llama())
    with pytest.raises(SpecError, match="Linear is not a transformers model"):
        attnzoo.speed_up(torch.nn.Linear(2, 2))
    model = make("qwen3_5_text")
    layer = model.model.layers[0].linear_attn
    layer.forward = lambda *args, **kwargs: None
    with pytest.raises(UnsupportedError, match="has been replaced"):
        attnzoo.speed_up(model)
