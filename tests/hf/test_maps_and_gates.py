"""Feature maps and gates in a model: initialised when loaded, compiled."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo

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


@pytest.mark.exhaustive
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


def test_cosine_uses_the_maximum_length_of_the_model(llama):
    model = llama()
    attnzoo.swap(model, "linear", feature_map="cosine")
    assert model.model.layers[0].self_attn.attnzoo.feature_map.length == 64
