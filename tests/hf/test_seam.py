"""Names of transformers that attnzoo reads: an unknown one is refused, never ignored."""

import importlib

import pytest
import torch
import transformers as hf
from transformers import cache_utils

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.attention.call import ForwardArguments, attention
from attnzoo.hf.cache.state_layer import StaticStateLayer
from attnzoo.hf.masks import make_mask
from attnzoo.hf.models.speed_up import sped_up_layers
from tests.hf.models.test_speed_up import FAMILIES, SIZES

UNKNOWN = r"'brand_new'.*transformers \d"


@pytest.fixture
def ids():
    return torch.arange(12).view(1, 12) * 7 % 90


def test_the_attention_function_refuses_unknown_arguments(llama):
    layer = attnzoo.swap(llama(), "linear").model.layers[0].self_attn
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn.*'brand_new'"):
        attention(layer, q, q, q, None, brand_new=1)


def test_the_mask_function_refuses_unknown_arguments():
    sizes = {"batch_size": 1, "q_length": 3, "kv_length": 3}
    make_mask(**sizes, brand_new=None, config=object())
    with pytest.raises(UnsupportedError, match=UNKNOWN):
        make_mask(**sizes, brand_new=True)


def test_states_refuse_unknown_arguments(llama, ids):
    model, cache = attnzoo.swap(llama(), "linear"), hf.DynamicCache()
    model(ids, **seam.cache_argument(cache))
    static = StaticStateLayer(model.model.layers[0].self_attn.attnzoo, 8)
    for layer in (cache.layers[0], static):
        with pytest.raises(UnsupportedError, match=UNKNOWN):
            layer.update(torch.zeros(1), torch.zeros(1), brand_new=1)


def sped_up_models():
    for family, options in FAMILIES.items():
        config = hf.AutoConfig.for_model(family, **SIZES | options)
        yield pytest.param(lambda c=config: hf.AutoModelForCausalLM.from_config(c), id=family)


@pytest.mark.parametrize("build", list(sped_up_models()))
def test_layers_that_are_sped_up_refuse_unknown_arguments(build, ids):
    """Their stock methods end in ``**kwargs``; a renamed cache would be lost there."""
    model = attnzoo.speed_up(build().eval())
    _, layer = next(sped_up_layers(model))
    calls = []
    handle = layer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    model(ids)
    handle.remove()
    args, kwargs = calls[0]
    layer(*args, **kwargs)
    with pytest.raises(UnsupportedError, match=UNKNOWN):
        layer(*args, **kwargs, brand_new=1)


@pytest.mark.parametrize("backend", ["linear", "delta", "longformer"])
def test_a_cache_under_an_unknown_name_is_refused(backend, llama, ids, monkeypatch):
    """At the layer that would not write its state, not at the next token."""
    model = attnzoo.swap(llama(), backend)
    monkeypatch.setattr(seam, "CACHE", ("an_old_name",))
    model(ids, use_cache=False)
    with pytest.raises(UnsupportedError, match=rf"{seam.CACHE_ARGUMENT}'.*not know.*an_old_name"):
        model(ids, use_cache=True)


def test_arguments_by_position_and_by_keyword():
    def forward(self, hidden_states, mask=None, cache=None):
        raise AssertionError

    arguments, cache = ForwardArguments(forward), hf.DynamicCache()
    x = torch.ones(1)
    for args, kwargs in (((x, None, cache), {}), ((x,), {"cache": cache})):
        assert arguments.cache(args, kwargs) is cache
        assert arguments.find(args, kwargs, seam.HIDDEN_STATES)[0] is x
    assert arguments.cache((x,), {}) is None


def test_mask_functions_of_other_names_are_unknown():
    def new_overlay(size):
        def inner(batch, head, q, kv):
            return q - kv < size

        return inner

    assert seam.mask_parts(new_overlay(3)) == ("", "test_mask_functions_of_other_names_are_unknown")


def test_cache_layers_that_hold_more_than_keys_are_known():
    """A state must not replace a layer whose further methods the model calls."""
    module = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    for owner in (cache_utils, module):
        for cls in vars(owner).values():
            if isinstance(cls, type) and cls.__name__.endswith(("Layer", "HCACache", "CSACache")):
                more = {name for name in dir(cls) if name.startswith("update_")}
                assert more <= {*seam.MORE_THAN_KEYS}, cls
