"""The class that vLLM builds for every swapped model, on its backend for models of transformers.

That backend runs the modules of transformers, with linear layers and attention of vLLM. Here,
layers with a state get a :class:`~attnzoo_vllm.layer.StateLayer` in place of vLLM's attention, and
the weights that backends add are loaded under their own names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.transformers import TransformersForCausalLM, vllm_attention_forward
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR
from vllm.model_executor.models.transformers.fusers.attention import VLLM_ATTN_IMPL
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker import cpu_model_runner

from attnzoo.contract.backend import AttentionBackend
from attnzoo.hf.attention.call import layer_backend, pass_hidden_states
from attnzoo.hf.names import NAME
from attnzoo_vllm.config import has_keys, logits_scale, refuse_backends, restore
from attnzoo_vllm.layer import WORD, KeysLayer, Layer, StateLayer, build_again, page_shapes

IMPLEMENTATION = "attnzoo_vllm"  # the attention implementation of transformers
HIDDEN_STATES = "attnzoo_hidden_states"  # argument of attention modules, for that implementation


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Run the layer that vLLM has attached to an attention module of transformers."""
    hidden_states = kwargs.pop(HIDDEN_STATES, None)
    layer = getattr(module, VLLM_ATTN_ATTR)
    if isinstance(layer, Layer):
        scale = kwargs.get("scaling")
        if scale is not None and scale != layer.scale:
            raise ValueError(f"{layer.prefix}: scale {scale} is passed, and {layer.scale} expected")
        return layer(query, key, value, hidden_states), None
    return vllm_attention_forward(module, query, key, value, mask, **kwargs)


AttentionInterface.register(IMPLEMENTATION, attention)
if current_platform.is_cpu():
    # vLLM zeroes pages that had another content, but on CPUs not those of layers with a window,
    # where what was a state reads as NaN in bfloat16
    cpu_model_runner.FullAttentionSpec = AttentionSpec


class AttnzooForCausalLM(TransformersForCausalLM, HasInnerState, IsHybrid):
    """A swapped causal language model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.logits_processor.scale = logits_scale(self.config)

    # -- construction, called by vLLM's transformers backend -------------------------------------

    def _patch_config(self) -> None:
        self.config = restore(self.config)
        self.text_config = self.config.get_text_config()
        super()._patch_config()
        self.text_config._attn_implementation = NAME  # transformers' models attach their backends

    def recursive_replace(self) -> None:
        """Replace modules as vLLM does, but none of a backend."""
        self.text_config._attn_implementation = VLLM_ATTN_IMPL
        found = ((module, layer_backend(module)) for module in self.model.modules())
        self.backends = {m: backend for m, backend in found if backend is not None}
        for module in self.backends:
            del module._modules[NAME]
        super().recursive_replace()
        for module, backend in self.backends.items():
            module._modules[NAME] = backend
        self.text_config._attn_implementation = IMPLEMENTATION

    def init_parameters(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Give memory to parameters, as vLLM does, and to the buffers of backends."""
        super().init_parameters(module, dtype)
        for backend in self.backends.values():
            if any(x.is_meta for x in backend.buffers()):
                device = self.device_config.device
                again = build_again(backend, self.model_config.dtype, device)
                for name, part in backend.named_modules():
                    part._buffers.update(again.get_submodule(name)._buffers)

    def _get_attn_cls(self) -> Callable[..., nn.Module]:
        found = super()._get_attn_cls()
        if found is not Attention:
            raise ValueError(f"vLLM runs {found.__name__} in this model, not causal attention")
        refuse_backends(list(self.backends.values()))
        return self._attention_layer

    def _attention_layer(self, prefix: str, **kwargs: Any) -> nn.Module:
        """Return the layer that serves an attention module of transformers."""
        name, _ = self.attention_fusers[extract_layer_index(prefix)]
        module = self.get_submodule(name)
        backend = self.backends[module]
        if is_plain(backend):
            windows = (backend.geometry.window, getattr(backend.config, "window", None))
            kwargs["per_layer_sliding_window"] = min(filter(None, windows), default=None)
            return Attention(prefix=prefix, **kwargs)
        given = [x for x in ("logits_soft_cap", "sinks") if kwargs.get(x) is not None]
        if given:
            raise ValueError(
                f"{prefix}: the model has {' and '.join(given)}, which is served with 'softmax' or "
                f"'flash' without num_sinks only, not with {backend.name!r}"
            )
        if has_keys(backend):
            return KeysLayer(backend, prefix, self.model_config.dtype, kwargs["scale"])
        if backend.capabilities.needs_hidden_states:
            pass_hidden_states(module, HIDDEN_STATES)
        return StateLayer(backend, prefix, self.model_config.dtype, kwargs["scale"])

    # -- memory ----------------------------------------------------------------------------------

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Return the shape of a page; called when the model is built."""
        return page_shapes(vllm_config.compilation_config.static_forward_context)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Return the type in which pages are counted."""
        return (WORD,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """Return how prefix caching copies a page: as a whole."""
        return (get_temporal_copy_spec,)


def is_plain(backend: AttentionBackend) -> bool:
    """Return whether vLLM's own attention computes what a backend does."""
    return backend.capabilities.exact and not getattr(backend.config, "num_sinks", 0)
