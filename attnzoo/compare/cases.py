"""Cases of a comparison, by level, mode and length, and the calls that they measure."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.evaluation.equal_memory import PREFILL_TOKENS, saved_cache_bytes
from attnzoo.evaluation.models import spec_label
from attnzoo.evaluation.presets import preset_specs
from attnzoo.evaluation.timing import Run
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.configs import read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.files import model_class, read_config
from attnzoo.hf.seam import cache_argument
from attnzoo.registry import available_backends, build_backend, get_backend
from attnzoo.spec import AttentionSpec

LEVELS = ("model", "op")  # in the order in which they are measured
MODES = ("forward", "train", "decode")
BASELINE = "flash"  # the exact attention that others are compared with


@dataclass(frozen=True, kw_only=True)
class CostCase:
    """One measurement as plain data that another process can receive.

    Attributes:
        attention: Name of the attention in tables.
        spec: Its spec as plain data.
        T: Tokens per row.
        level: ``"model"``, the whole model; ``"op"``, the backend on random queries, keys and
            values.
        mode: ``"forward"``; ``"train"``, forward + backward; ``"decode"``, one token after T.
        B: Rows.
        dtype: Data type of weights and inputs.
        device: ``"cpu"`` or ``"cuda"``.
    """

    attention: str
    spec: dict[str, Any] = field(hash=False)
    T: int
    level: str = "model"
    mode: str = "forward"
    B: int = 1
    dtype: str = "float32"
    device: str = "cpu"

    @classmethod
    def of(cls, spec: AttentionSpec, length: int, **fields: Any) -> CostCase:
        """Return the case of a spec at a length, with other fields than the defaults."""
        return cls(attention=spec_label(spec), spec=spec.to_dict(), T=length, **fields)


def default_specs(
    names: Sequence[str] | None, *, causal: bool = True, use_case: str = "long"
) -> list[AttentionSpec]:
    """Return the presets of the given backends, or of every backend, exact ones first.

    Args:
        names: Backends; all when ``None``.
        causal: Whether the model is causal; encoders have presets of their own.
        use_case: That of :data:`~attnzoo.evaluation.presets.PRESETS` for a causal model.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    chosen = dict.fromkeys(names or ("softmax", BASELINE, *available_backends()))
    return preset_specs(chosen, *((use_case,) if causal else ("bidirectional", "long")))


def is_exact(spec: dict[str, Any]) -> bool:
    """Whether every layer computes softmax attention over all keys."""
    entries = [spec, *spec.get("layers", {}).values()]
    return all(
        get_backend(entry["backend"]).capabilities.exact
        and not entry.get("options", {}).get("window")
        for entry in entries
    )


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The compared model as plain data.

    Attributes:
        path: Folder of the saved model.
        name: Name in reports.
        sha: Hash of its config and its parameter shapes.
        geometry: Geometry of its first attention layer.
        causal: Whether all layers are causal.
        generates: Whether it is causal and predicts the next token.
        max_positions: Number of positions, if limited.
        trained_positions: Number of positions that it was trained on, if its config has it.
        text_model: Whether it runs on token ids alone, so that the model can run.
        module: Module that defines its class.
        dtype: Data type in which caches and memory are counted.
    """

    path: str
    name: str
    sha: str
    geometry: Geometry
    causal: bool
    generates: bool
    max_positions: int | None
    trained_positions: int | None
    text_model: bool
    module: str
    dtype: str


DROPOUT_FIELDS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def prepare(case: CostCase, info: ModelInfo) -> Run:
    """Return the function that a case measures.

    Raises:
        AttnzooError: The backend does not support the layer or the call.
    """
    torch.manual_seed(0)
    if case.level == "op":
        return _op_step(case, info) if case.mode == "decode" else _op(case, info)
    needed = case.T + (case.mode == "decode")
    if info.max_positions is not None and info.max_positions < needed:
        raise UnsupportedError(
            f"the model has {info.max_positions} positions, but the case needs {needed}; "
            "attnzoo.extend_positions adds positions"
        )
    return _model(case, info, load(info, case))


def cache_size(case: CostCase, info: ModelInfo) -> int:
    """Return the bytes of the cache after T tokens: of the model, or of its first attention layer.

    Raises:
        AttnzooError: The backend does not support the model, or the bytes depend on values.
    """
    dtype = getattr(torch, info.dtype)
    sizes = saved_cache_bytes(Path(info.path), _spec(case), case.T, dtype)
    return case.B * (sum(sizes.values()) if case.level == "model" else sizes[info.geometry.layer])


def _prefill_chunks(length: int) -> Iterator[int]:
    """Yield the chunk lengths in which a state or cache of ``length`` tokens is computed."""
    for start in range(0, length, PREFILL_TOKENS):
        yield min(PREFILL_TOKENS, length - start)


# -- operator ------------------------------------------------------------------------------------


def _spec(case: CostCase) -> AttentionSpec:
    """Return the spec of a case."""
    return AttentionSpec.from_dict(case.spec)


def _backend(case: CostCase, info: ModelInfo) -> Any:
    """Build the backend for the model's first attention layer."""
    entry = _spec(case).for_layer(info.geometry.layer)
    max_length = max(case.T, info.geometry.max_length or 0)
    geometry = replace(info.geometry, max_length=max_length)
    backend = build_backend(entry.backend, entry.config, geometry)
    return backend.to(case.device, getattr(torch, case.dtype)).train(case.mode == "train")


def _inputs(case: CostCase, info: ModelInfo, length: int, backend: Any) -> dict[str, Tensor]:
    """Draw queries, keys and values, and hidden states if the backend needs them."""
    geometry = info.geometry
    assert geometry.value_dim is not None
    options = {"dtype": getattr(torch, case.dtype), "device": case.device}
    heads = (geometry.num_heads, geometry.num_key_heads, geometry.num_key_heads)
    sizes = (geometry.head_dim, geometry.head_dim, geometry.value_dim)
    inputs = {
        name: torch.randn(case.B, number, length, size, **options)
        for name, number, size in zip("qkv", heads, sizes, strict=True)
    }
    if backend.capabilities.needs_hidden_states:
        inputs["hidden_states"] = torch.randn(case.B, length, geometry.hidden_size or 1, **options)
    return inputs


def _op(case: CostCase, info: ModelInfo) -> Run:
    """Prepare forward, or forward + backward, over T tokens."""
    backend = _backend(case, info)
    inputs = _inputs(case, info, case.T, backend)
    if case.mode == "forward":
        return torch.no_grad()(lambda: backend(**inputs).out)
    wanted = [*(x.requires_grad_() for x in inputs.values()), *backend.parameters()]

    def train() -> Any:
        out = backend(**inputs).out
        return out, torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    return train


@torch.no_grad()
def _op_step(case: CostCase, info: ModelInfo) -> Run:
    """Prepare one token after T tokens, from all keys or from the state of the earlier tokens."""
    backend = _backend(case, info)
    token = _inputs(case, info, 1, backend)
    if backend.keeps_all_keys:
        before = _inputs(case, info, case.T, backend)
        k, v = (torch.cat([before[name], token[name]], 2) for name in "kv")
        mask = AttentionMask(causal=True, q_offset=case.T)
        inputs = token | {"k": k, "v": v}
        return torch.no_grad()(lambda: backend(**inputs, mask=mask).out)
    state = None
    for length in _prefill_chunks(case.T):
        chunk = _inputs(case, info, length, backend)
        state = backend(**chunk, state=state, return_state=True).state
    return torch.no_grad()(lambda: backend(**token, state=state, return_state=True).out)


# -- model ---------------------------------------------------------------------------------------


def load(info: ModelInfo, case: CostCase) -> PreTrainedModel:
    """Load the model with the attention of a case."""
    path = Path(info.path)
    config = read_config(path)
    config.attnzoo = _spec(case).to_dict()
    for name in DROPOUT_FIELDS:
        if read_field(config, name):
            setattr(config, name, 0.0)  # backends have different forms of dropout
    model: PreTrainedModel = load_pretrained(
        model_class(config, path),
        path,
        config=config,
        attn_implementation=NAME,
        dtype=getattr(torch, case.dtype),
    )
    model.to(torch.device(case.device))  # type: ignore[arg-type]
    model.train(case.mode == "train")
    return model


def _arguments(
    model: PreTrainedModel, case: CostCase, info: ModelInfo, length: int
) -> dict[str, Any]:
    """Draw token ids, and turn off outputs that the measurement does not need."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    arguments: dict[str, Any] = {
        "input_ids": torch.randint(vocabulary, (case.B, length), device=case.device)
    }
    known = inspect.signature(type(model).forward).parameters
    if info.causal and "use_cache" in known:
        arguments["use_cache"] = case.mode == "decode"
    if case.mode != "train" and "logits_to_keep" in known:
        arguments["logits_to_keep"] = 1
    return arguments


def _model(case: CostCase, info: ModelInfo, model: PreTrainedModel) -> Run:
    """Prepare a forward pass, a training step without optimizer, or a decoding step."""
    if case.mode == "decode":
        cache = filled_cache(model, case, info)
        arguments = _arguments(model, case, info, 1) | cache_argument(cache)
        if "position_ids" in inspect.signature(type(model).forward).parameters:
            # each call grows the cache, and must not leave the positions that a model has
            arguments["position_ids"] = torch.full((case.B, 1), case.T, device=case.device)
        return torch.no_grad()(lambda: model(**arguments))
    arguments = _arguments(model, case, info, case.T)
    if case.mode == "forward":
        return torch.no_grad()(lambda: model(**arguments))
    if "labels" in inspect.signature(type(model).forward).parameters and info.causal:
        arguments["labels"] = arguments["input_ids"]

    def train() -> None:
        model.zero_grad(set_to_none=True)
        out = model(**arguments)
        (out.loss if "labels" in arguments else out[0].float().mean()).backward()

    return train


@torch.no_grad()
def filled_cache(model: PreTrainedModel, case: CostCase, info: ModelInfo) -> DynamicCache:
    """Return a cache of T tokens: random keys and values if all are kept, else a computed state."""
    cache = DynamicCache(config=model.config)
    layers = attention_layers(model)
    if all(layer_backend(layer.module).keeps_all_keys for layer in layers):
        for layer in layers:
            geometry = layer.geometry
            k, v = (
                torch.randn(case.B, geometry.num_key_heads, case.T, size)
                for size in (geometry.head_dim, geometry.value_dim or geometry.head_dim)
            )
            options = {"device": case.device, "dtype": getattr(torch, case.dtype)}
            cache.update(k.to(**options), v.to(**options), geometry.layer)
        return cache
    for length in _prefill_chunks(case.T):
        model(**_arguments(model, case, info, length), **cache_argument(cache))
    return cache
