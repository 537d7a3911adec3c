"""A swapped model continues from a cache of keys and values, as PEFT's prefix tuning passes it."""

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.hf.cache.state_layer import state_of_keys
from attnzoo.hf.seam import cache_argument
from attnzoo.registry import build_backend

READ = {
    "linear": {},
    "linear, window": {"window": 4},
    "linear, positions": {"feature_map": "cosine"},
    "gated_linear": {"gate": "retnet"},
    "performer": {"num_features": 16},
    "softmax, window": {"window": 4},
    "flash, window": {"window": 4, "num_sinks": 2},
}


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", READ)
def test_prompt_from_before_the_swap(name, side, llama, ids, padding):
    """The keys of a first layer do not depend on its attention, so one pass has the same result.

    With padding, a row has no real token in the prompt.
    """
    model = llama(num_hidden_layers=1)
    mask = padding(side) if side == "left" else torch.ones_like(ids)
    cache = hf.DynamicCache()
    with torch.no_grad():
        model(ids[:, :5], attention_mask=mask[:, :5], **cache_argument(cache))
        attnzoo.swap(model, name.partition(",")[0], **READ[name])
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        for begin, end in ((5, 11), (11, 12)):
            given = {"attention_mask": mask[:, :end], **cache_argument(cache)}
            found = model(ids[:, begin:end], **given).logits
            real = mask[:, begin:end].bool()
            assert_close(found[real], expected[:, begin:end][real], atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == 12


# Gates of hidden states: those of a prefix are zero
GATED = {
    **{f"gated_linear, {gate}": {"gate": gate} for gate in ("gla", "mamba2", "mlstm", "rwkv6")},
    "gated_linear, window": {"window": 4},
    "delta": {"window": 4},
    "delta, kda": {"gate": "vector"},
}


@pytest.mark.parametrize("name", [*READ, *GATED])
def test_gradients_of_a_prefix(name):
    """Prefix tuning trains the keys and values; the oracle is one call on all tokens."""
    sizes = {"num_heads": 4, "num_key_heads": 2, "head_dim": 8, "hidden_size": 32}
    geometry = Geometry(**sizes, causal=True, max_length=16)
    backend = build_backend(name.partition(",")[0], (READ | GATED)[name], geometry).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in backend.parameters():
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(2, 9, 32, generator=generator, dtype=torch.float64)
    hidden[:, :3] = 0
    q, k, v = (
        torch.randn(2, heads, 9, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    weight = torch.randn(2, 4, 6, 8, generator=generator, dtype=torch.float64)
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, 0] = False
    mask = AttentionMask(causal=True, padding=padding, q_offset=3)
    state = state_of_keys(backend, k[:, :, :3], v[:, :, :3], mask, None)
    new = (x[:, :, 3:] for x in (q, k, v))
    options = {"mask": mask.of_new_tokens(6), "hidden_states": hidden[:, 3:]}
    found = backend(*new, **options, state=state, return_state=True).out
    all_tokens = AttentionMask(causal=True, padding=padding)
    expected = backend(q, k, v, mask=all_tokens, hidden_states=hidden).out[:, :, 3:]
    assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), (k, v)),
        torch.autograd.grad((expected * weight).sum(), (k, v)),
        strict=True,
    ):
        assert_close(ours, theirs)


REFUSED = {
    "gated_linear": "it computes gates from hidden states",
    "longformer": "its state is not a sum",
    "static cache": "a StaticLayer does not hold all of them",
}


@pytest.mark.parametrize("case", REFUSED)
def test_caches_that_are_not_read(case, llama, llama_config, ids):
    model, cache = llama(), hf.DynamicCache()
    if case == "static cache":
        cache = hf.StaticCache(config=llama_config(), max_cache_len=20)
    with torch.no_grad():
        model(ids[:, :5], **cache_argument(cache))
        attnzoo.swap(model, "linear" if case == "static cache" else case)
        with pytest.raises(UnsupportedError, match=rf"already holds 5 tokens .*{REFUSED[case]}"):
            model(ids[:, 5:], **cache_argument(cache))


def test_a_mask_without_the_earlier_tokens_is_refused(llama):
    backend = build_backend("linear", {}, Geometry(num_heads=2, num_key_heads=2, head_dim=4))
    mask = AttentionMask(causal=True, padding=torch.ones(1, 6, dtype=torch.bool))
    keys = torch.randn(1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match="holds 3 tokens, but attention_mask covers 0"):
        state_of_keys(backend, keys, keys, mask, None)
