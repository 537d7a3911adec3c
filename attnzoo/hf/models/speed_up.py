"""Run the recurrent layers of stock models on attnzoo's ops, on CPUs.

Gated DeltaNet and KDA layers of transformers call functions of their module by name: the delta rule
(as chunks, and token by token) and a causal convolution. Mamba-2 layers (Dao and Gu, 2024,
arXiv:2405.21060) call a scan, which is linear attention with a decay per head and token. A layer
that is sped up has a ``forward`` of its own: the code of its class, in which these names refer to
attnzoo's functions. Neither the class nor the module changes. Other letters: X channels.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.sequences import Sequences, sequences_of_mask
from attnzoo.contract.states import DeltaState, LinearState
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.layers import unwrap_model
from attnzoo.hf.models.rows import update_row_hooks
from attnzoo.hf.release_check import require_working_release
from attnzoo.hf.unchanged import unchanged_on_error
from attnzoo.ops.convolution import causal_convolution
from attnzoo.ops.delta.api import delta_attention
from attnzoo.ops.linear.api import linear_attention
from attnzoo.runtime.kernel_calls import empty_huge_pages

M = TypeVar("M", bound=nn.Module)

BLOCK = 128  # tokens convolved at once, so that they stay in the CPU's cache


def speed_up(model: M) -> M:
    """Run a model's delta-rule and Mamba-2 layers on attnzoo's ops, on CPUs.

    The outputs and gradients equal those of the stock layers within float32 rounding, in prefill,
    decoding and training. Rows of several documents (``cu_seq_lens_q``, ``seq_idx`` or
    ``position_ids`` that begin again) work too: all layers keep the documents apart. Weights,
    caches, config and saved files do not change; tensors on other devices take the stock functions.
    Mamba-2 layers decode single tokens by the stock function. ``attnzoo.restore`` undoes it.

    Args:
        model: A transformers model, or a wrapper of one.

    Returns:
        ``model``, which is changed in place.

    Raises:
        SpecError: It is not a transformers model, or has none of these layers.
        UnsupportedError: The ``forward`` of such a layer has been replaced already.

    Example:
        >>> from transformers import Qwen3_5TextConfig, Qwen3_5TextModel
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
        >>> heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        >>> config = Qwen3_5TextConfig(vocab_size=64, **sizes, **heads)
        >>> model = attnzoo.speed_up(Qwen3_5TextModel(config))
        >>> model(torch.arange(64)[None]).last_hidden_state.shape
        torch.Size([1, 64, 32])
    """
    require_working_release()
    target = unwrap_model(model)
    if target is None:
        raise SpecError(
            f"{type(model).__name__} is not a transformers model; speed_up takes a PreTrainedModel"
        )
    with unchanged_on_error(target):
        if not _replace_layers(target):
            raise SpecError(_no_layer(target))
    return model


def _replace_layers(model: PreTrainedModel) -> bool:
    """Give the layers a ``forward`` of ours; return whether there are any."""
    layers = [(name, x) for name, x in model.named_modules() if _is_recurrent(type(x))]
    for name, layer in layers:
        forward = vars(layer).get(_slot(layer))
        if isinstance(forward, FastForward):
            continue
        if forward is not None and _slot(layer) == "forward":
            raise UnsupportedError(
                f"{name}: the forward of this {type(layer).__name__} has been replaced by "
                f"{forward!r}, which speed_up would disable; call speed_up before"
            )
        setattr(layer, _slot(layer), FastForward(layer))
    if layers:
        update_row_hooks(model, sped_up=True)
    return bool(layers)


def remove_speed_up(model: nn.Module) -> bool:
    """Give the layers of a model their stock ``forward`` again; return whether any was sped up."""
    layers = list(sped_up_layers(model))
    for _, layer in layers:
        if _slot(layer) == "forward":
            del layer.forward
        else:
            vars(layer)["_old_forward"] = types.MethodType(type(layer).forward, layer)
    update_row_hooks(model, sped_up=False)
    return bool(layers)


def sped_up_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name of each layer that is sped up, and the layer."""
    for name, layer in model.named_modules():
        if isinstance(vars(layer).get(_slot(layer)), FastForward):
            yield name, layer


def _slot(layer: nn.Module) -> str:
    """Return the attribute that holds a layer's ``forward``; accelerate's hooks rename it."""
    return "_old_forward" if hasattr(layer, "_hf_hook") else "forward"


def _is_recurrent(layer_class: type[nn.Module]) -> bool:
    """Return whether a layer's class is of transformers and calls one of our :data:`RULES`."""
    function = inspect.unwrap(layer_class.forward)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    is_caller = any(x in names and x in function.__globals__ for x in RULES)
    return is_caller and layer_class.__module__.startswith("transformers.")


def _no_layer(model: PreTrainedModel) -> str:
    kinds = [type(x).__name__ for x in model.modules()]
    found = sorted({x for x in kinds if "Attention" in x or "Mixer" in x or "Mamba" in x})
    return (
        f"{type(model).__name__} has no Gated DeltaNet, KDA or Mamba-2 layer "
        f"(Qwen3-Next, Qwen3.5, OLMo hybrid, Kimi Linear, Granite 4, ...); it has "
        f"{', '.join(found) or 'no attention layer'}. attnzoo.swap replaces softmax attention."
    )


class FastForward:
    """The ``forward`` of a layer that is sped up; copies and pickles of the layer contain it.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._function = _fast_function(type(layer))  # torch.compile cannot trace this

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        return self._function(self.layer, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy from the copy of the layer."""
        return FastForward, (self.layer,)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the stock ``forward``."""
        return inspect.signature(types.MethodType(type(self.layer).forward, self.layer))


def _fast_function(layer_class: type[nn.Module]) -> Callable[..., Any]:
    """Return the ``forward`` of a class, with our functions in place of those that it calls."""
    stock: Any = layer_class.forward
    names = inspect.unwrap(stock).__globals__
    ours = {**RULES, **OTHERS}
    replaced = {x: partial(_on_cpu, own, names[x]) for x, own in ours.items() if x in names}
    found: Callable[..., Any] = _with_globals(stock, replaced)
    return found


def _on_cpu(
    own: Callable[..., Any], stock: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call our function for tensors on a CPU, and the stock one for others."""
    return (own if x.device.type == "cpu" else stock)(x, *args, **kwargs)


def _with_globals(function: Any, replaced: dict[str, Any]) -> Any:
    """Return a function, and those that it decorates, with other values of some global names."""
    inner = getattr(function, "__wrapped__", None)
    cells, names = function.__closure__, function.__globals__
    if inner is not None:
        made = _with_globals(inner, replaced)
        cells = tuple(types.CellType(made) if x.cell_contents is inner else x for x in cells or ())
    else:
        # torch.compile looks names up in the module called __name__
        names = {k: v for k, v in names.items() if k != "__name__"} | replaced
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, cells
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _as_one_row(inputs: tuple[Tensor, ...], sequences: Sequences | None) -> tuple[Tensor, ...]:
    """Return tensors ``[B, T, ...]`` as one row of sequences, if there are any."""
    if sequences is None:
        return inputs
    return tuple(x.reshape(1, -1, *x.shape[2:]) for x in inputs)


def _scan_state(initial_states: Tensor) -> LinearState:
    """Return states of a scan, ``[B, H, E, N]``, as those of linear attention."""
    kv = initial_states.float().transpose(2, 3)
    return LinearState(kv, kv.new_zeros(kv.shape[:3]))


def _narrow(x: Tensor) -> Tensor:
    """Return float64 as float32, in which transformers computes the delta rule."""
    return x.float() if x.dtype == torch.float64 else x


def _delta_rule(
    query: Tensor,  # [B, T, Hkv, D]
    key: Tensor,  # [B, T, Hkv, D]
    value: Tensor,  # [B, T, H, E]; H is a multiple of Hkv
    g: Tensor,  # log decays, [B, T, H] or [B, T, H, D]
    beta: Tensor,  # [B, T, H]
    initial_state: Tensor | None = None,  # [B, H, D, E]
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule as transformers' functions do, in float32."""
    seam.refuse_unknown_arguments("speed_up of the delta rule", kwargs, seam.IGNORED_RULE_ARGUMENTS)
    dtype = query.dtype
    if (repeats := value.shape[2] // key.shape[2]) > 1:
        query, key = (x.repeat_interleave(repeats, 2) for x in (query, key))
    inputs: tuple[Tensor, ...] = (query, key, value, beta, g)
    batch, tokens = query.shape[:2]
    state = None if initial_state is None else DeltaState(initial_state.float())
    has_state = state is not None or output_final_state
    sequences = read_sequences(batch, tokens, kwargs, has_state=has_state)
    inputs = _as_one_row(inputs, sequences)
    q, k, v, beta, log_decay = (_narrow(x).transpose(1, 2) for x in inputs)
    found = delta_attention(
        *(q, k, v, beta),
        sequences=sequences,
        log_decay=log_decay,
        scale=q.shape[3] ** -0.5,
        normalize_qk=use_qk_l2norm_in_kernel,
        state=state,
        return_state=output_final_state,
    )
    out = found.out.transpose(1, 2).reshape(batch, tokens, *value.shape[2:])
    return out.to(dtype), None if found.state is None else found.state.kv


def _scan(
    hidden_states: Tensor,  # x, [B, T, H, E]
    dt: Tensor,  # step sizes before dt_bias and the softplus, [B, T, H]
    A: Tensor,  # rates of the decay, negative, [H]
    B: Tensor,  # [B, T, G, N], for groups of H / G heads
    C: Tensor,  # [B, T, G, N]
    chunk_size: int,  # of the stock function
    D: Tensor | None = None,  # [H]
    dt_bias: Tensor | None = None,  # [H]
    initial_states: Tensor | None = None,  # [B, H, E, N]
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    r"""Compute the scan of Mamba-2 as transformers' function does, in float32.

    .. math:: S_t = e^{dt_t A} S_{t-1} + dt_t B_t x_t^T, \quad y_t = C_t S_t + D x_t
    """
    given = {name: x for name, x in kwargs.items() if name != "z" or x is not None}
    seam.refuse_unknown_arguments(
        "speed_up of the Mamba-2 scan", given, seam.IGNORED_RULE_ARGUMENTS
    )
    batch, tokens, heads = hidden_states.shape[:3]
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    x = hidden_states.float()
    groups = (t.float().repeat_interleave(heads // t.shape[2], 2) for t in (C, B))
    inputs: tuple[Tensor, ...] = (*groups, x * dt[..., None], A.float() * dt)
    state = None if initial_states is None else _scan_state(initial_states)
    has_state = state is not None or return_final_states
    sequences = read_sequences(batch, tokens, kwargs, has_state=has_state)
    q, k, v, log_decay = (t.transpose(1, 2) for t in _as_one_row(inputs, sequences))
    found = linear_attention(
        *(q, k, v),
        sequences=sequences,
        log_decay=log_decay,
        state=state,
        return_state=return_final_states,
    )
    out = found.out.transpose(1, 2).reshape(x.shape)
    out = out if D is None else out + D[:, None] * x
    if not return_final_states:
        return out
    assert isinstance(found.state, LinearState)
    return out, found.state.kv.transpose(2, 3)


def _no_fused_layer(*args: Any, **kwargs: Any) -> None:
    """Return ``None``: no kernel for CPUs computes a layer at once."""


def _convolution(
    hidden_states: Tensor,  # [B, X, T]; a cache puts earlier tokens before those of the call
    weight: Tensor,  # [X, width]
    bias: Tensor | None = None,  # [X]
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute the causal convolution of each channel, not across packed sequences."""
    seam.refuse_unknown_arguments(
        "speed_up of the convolution", kwargs, seam.IGNORED_RULE_ARGUMENTS
    )
    batch, _, tokens = hidden_states.shape
    sequences = read_sequences(batch, tokens, kwargs)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    x, weight = hidden_states.transpose(1, 2).to(dtype).contiguous(), weight.to(dtype)
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    )
    act = (lambda out: out) if activation is None else ACT2FN[activation]
    if sequences is None and not needs_grad and not torch.compiler.is_compiling():
        out = _convolve_blocks(x, weight, bias, act)
    else:
        row = x if sequences is None else x.reshape(1, -1, x.shape[2])
        out = causal_convolution(row, weight, sequences=sequences).view(x.shape)
        out = act(out if bias is None else out + bias)
    return out.transpose(1, 2).to(hidden_states.dtype)


def _convolve_blocks(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the convolution of ``[B, T, X]`` without gradients, in blocks of tokens."""
    taps, out = weight.t().contiguous(), empty_huge_pages(x, x.shape)
    for start in range(0, x.shape[1], BLOCK):
        stop = min(start + BLOCK, x.shape[1])
        block = torch.mul(x[:, start:stop], taps[-1], out=out[:, start:stop])
        for shift in range(1, len(taps)):
            if (first := max(start, shift)) < stop:
                earlier = x[:, first - shift : stop - shift]
                block[:, first - start :].addcmul_(earlier, taps[-1 - shift])
        block.copy_(act(block if bias is None else block + bias))
    return out


def read_sequences(
    batch: int, tokens: int, kwargs: dict[str, Any], *, has_state: bool = False
) -> Sequences | None:
    """Return the sequences of packed rows, one row after another; ``None`` if each row is one.

    ``kwargs`` of a layer may contain ``seq_idx [B, T]``; no cache may get or have its state then.
    """
    ids = kwargs.get("seq_idx")
    if ids is None:
        return None
    if has_state or ids.shape not in ((batch, tokens), (1, tokens)):
        raise UnsupportedError(
            f"a recurrent layer got seq_idx of shape {tuple(ids.shape)} for {batch} rows of "
            f"{tokens} tokens{' and a cache' if has_state else ''}; call the model, which is sped "
            "up, and not the layer, and call it without a cache"
        )
    mask = AttentionMask(causal=True, segment_ids=ids)
    return sequences_of_mask(mask, (batch, tokens), ids.device)[0]


# Functions of transformers' modules by name: those of the delta rule and the scan of Mamba-2, which
# is all that stands between its convolution and its norm; and others of the layers that call them.
RULES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
}
OTHERS: dict[str, Callable[..., Any]] = {
    "mamba2_split_conv1d_scan_combined": _no_fused_layer,
    "causal_conv1d_fn": _convolution,
}
