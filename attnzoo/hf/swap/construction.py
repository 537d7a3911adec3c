"""Attach the backends of a config's spec to a model that is being built."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import SpecError
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.names import IN_SWAPPED, NAME, REQUESTED
from attnzoo.hf.release_check import require_working_release
from attnzoo.hf.swap.backends import (
    attach,
    build_backends,
    config_spec,
    read_spec,
    warn_of_image_masks,
    write_config,
)
from attnzoo.hf.swap.extras import warn


def attach_when_built(model: PreTrainedModel) -> None:
    """Build and attach the backends of a config's spec; runs in the model's ``post_init``."""
    data = getattr(model.config, NAME, None)
    implementation = model.config._attn_implementation
    if data is None and implementation != NAME:
        return
    require_working_release()
    enclosing = _enclosing_model(model)
    if enclosing is not None:
        if data in (None, config_spec(enclosing)):
            return  # the post_init of the enclosing model attaches the backends
        vars(model)[IN_SWAPPED] = True
    if data is None:
        raise SpecError(
            "attn_implementation='attnzoo' requires a spec: set config.attnzoo = "
            'attnzoo.AttentionSpec("linear") before the model is built, or load the '
            'model unchanged and call attnzoo.swap(model, "linear"). For one submodel of a '
            'composite model pass attn_implementation={"text_config": "attnzoo"} and set '
            "config.text_config.attnzoo"
        )
    if implementation != NAME:
        _check_disabled(model, data, implementation)
    spec = read_spec(data)
    layers = attention_layers(model)
    rest = [layer for layer in layers if layer_backend(layer.module) is None]
    if rest or not layers:  # submodels with their own specs already have backends
        backends = build_backends(model, rest, spec)
        warn_of_image_masks(model, rest, backends)
        attach(rest, backends)
        _ignore_when_missing(model, backends)
    if implementation == NAME:
        write_config(model.config, spec)


def _ignore_when_missing(model: Any, backends: Iterable[AttentionBackend]) -> None:
    """Keep buffers that a checkpoint may lack out of the report that transformers prints."""
    keys = {key for backend in backends for key in backend.optional_buffers}
    patterns = {rf"\.{NAME}\.{re.escape(key)}$" for key in keys}
    known = model._keys_to_ignore_on_load_missing or ()
    model._keys_to_ignore_on_load_missing = {*known, *patterns}


def _check_disabled(model: PreTrainedModel, spec: Any, implementation: str) -> None:
    """Warn that a model is built with its swap disabled, or raise if that was not requested."""
    backend = spec.get("backend") if isinstance(spec, Mapping) else spec
    if not vars(model).get(REQUESTED):
        raise SpecError(
            f"config.attnzoo names backend {backend!r}, but no attn_implementation is given, and "
            f"the default is {implementation!r}; pass attn_implementation='attnzoo', or delete "
            "config.attnzoo"
        )
    warn(
        f"{type(model).__name__} runs attn_implementation={implementation!r}, as requested; the "
        f"swap to {backend!r} in its config is disabled. "
        "model.set_attn_implementation('attnzoo') enables it"
    )


def _enclosing_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the swapped model whose ``__init__`` builds ``model``, found on the call stack.

    Submodels are built first, but only the enclosing model has all layers.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            other = frame.f_locals.get("self")
            if isinstance(other, PreTrainedModel) and other is not model:
                config = getattr(other, "config", None)
                if getattr(config, NAME, None) is not None:
                    return other
        frame = frame.f_back  # type: ignore[assignment]
    return None
