"""Feature maps and gates in a model: generation, saving, loading, adapters, compilation."""

from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.hf.seam import cache_argument

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning")
# Each map and gate once; gates with a state of their own use a learned map
SWAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine": ("linear", {"feature_map": "cosine"}),
    "taylor": ("linear", {"feature_map": "taylor"}),
    "random": ("linear", {"feature_map": "random", "num_features": 32}),
    "mamba2": ("gated_linear", {"gate": "mamba2", "feature_map": "dpfp", "nu": 2}),
    "hgrn2": ("gated_linear", {"gate": "hgrn2", "feature_map": "softmax"}),
    "rwkv6": ("gated_linear", {"gate": "rwkv6", "feature_map": "relu"}),
    "mlstm": ("gated_linear", {"gate": "mlstm", "feature_map": "hedgehog"}),
    "matrix": ("gated_linear", {"gate": "matrix"}),
}


@pytest.fixture(params=SWAPS)
def model(request, llama):
    model = llama()
    backend, options = SWAPS[request.param]
    attnzoo.swap(model, backend, **options)
    for layer in model.model.layers:  # change the initial values
        for parameter in layer.self_attn.attnzoo.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def generate(model: Any, ids: Any, **options: Any) -> Any:
    return model.generate(ids, max_new_tokens=5, do_sample=False, **options)


def test_cached_generation(model, ids, padding):
    """Greedy and with beams, padded on the left: tokens are equal with and without a cache."""
    for options in {}, {"num_beams": 3}:
        plain = generate(model, ids, attention_mask=padding("left"), use_cache=False, **options)
        cached = generate(model, ids, attention_mask=padding("left"), **options)
        assert torch.equal(cached, plain)


def test_static_cache_and_rollback(model, ids):
    plain = generate(model, ids)
    assert torch.equal(generate(model, ids, cache_implementation="static"), plain)
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :5], **cache_argument(cache))
        cache.activate_past_recording()
        model(ids[:, 5:], **cache_argument(cache))
        cache.crop(-4)
        ours = model(ids[:, 8:], **cache_argument(cache)).logits
        assert_close(ours, model(ids, use_cache=False).logits[:, 8:], atol=1e-4, rtol=1e-4)


def test_saved_and_loaded(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.attnzoo == model.config.attnzoo
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_weights_missing_from_a_checkpoint_are_initialised(llama, llama_config, tmp_path):
    """``from_pretrained`` and a swap in memory give equal values, including frequencies."""
    llama().save_pretrained(tmp_path)
    for backend, options in SWAPS.values():
        config = llama_config(attnzoo=attnzoo.AttentionSpec(backend, **options).to_dict())
        loaded = hf.AutoModelForCausalLM.from_pretrained(
            tmp_path, config=config, attn_implementation="attnzoo"
        )
        swapped = llama()
        attnzoo.swap(swapped, backend, **options)
        expected = swapped.state_dict()
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, expected[name]), (backend, options, name)


def test_extras_train_and_are_saved_with_an_adapter(llama, ids, tmp_path):
    model = llama()
    attnzoo.swap(model, "gated_linear", gate="mlstm", feature_map="hedgehog")
    attention = model.config.attnzoo
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["attnzoo"], task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=3e-2)
    for _ in range(2):
        optimizer.zero_grad()
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    moved = [n for n, p in adapted.named_parameters() if "attnzoo" in n and p.grad is not None]
    assert len(moved) == 2 * 5  # layers, and parameters of map and gate
    adapted.eval().save_pretrained(tmp_path)
    other = llama()
    attnzoo.swap(other, attention)
    again = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, adapted(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["cosine", "mlstm"])
def test_forward_is_one_graph(name, llama, ids, padding):
    torch._dynamo.reset()
    model, (backend, options) = llama(num_hidden_layers=1), SWAPS[name]
    attnzoo.swap(model, backend, **options)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    given = {"attention_mask": padding("left"), "use_cache": False}
    with torch.no_grad():
        real = padding("left").bool()
        ours, expected = whole(ids, **given).logits[real], model(ids, **given).logits[real]
    assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


def test_offloaded_extras_are_loaded(llama, ids):
    """Accelerate keeps weights on the meta device and loads them in hooks of their modules."""
    from accelerate import cpu_offload

    model = llama()
    attnzoo.swap(model, "gated_linear", gate="hgrn2", feature_map="hedgehog")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert next(model.model.layers[0].self_attn.attnzoo.gate.parameters()).is_meta
        assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_cosine_uses_the_maximum_length_of_the_model(llama):
    model = llama()
    attnzoo.swap(model, "linear", feature_map="cosine")
    assert model.model.layers[0].self_attn.attnzoo.feature_map.length == 64
