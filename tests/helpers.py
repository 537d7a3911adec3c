"""Small layers, models and inputs, error budgets, and fewer garbage collections."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.sequences import sequences_of_mask
from attnzoo.registry import build_backend

H, HKV, D, E, M = 4, 2, 8, 6, 12  # query heads, key heads, key, value and hidden sizes
MODEL_SIZES: dict[str, Any] = {  # of a small transformers model, by the names of most configs
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def geometry(**changes: Any) -> Geometry:
    """Return a small layer of :data:`H` query heads, with some fields replaced."""
    sizes = {"num_heads": H, "num_key_heads": HKV, "head_dim": D, "value_dim": E, "hidden_size": M}
    return Geometry(**{**sizes, "name": "layer.attn", **changes})


def build(
    name: str,
    dtype: torch.dtype = torch.float64,
    *,
    noise: float = 0.0,
    causal: bool = True,
    cross_attention: bool = False,
    layer: int = 0,
    sizes: Mapping[str, Any] = {},
    **options: Any,
) -> AttentionBackend:
    """Build a backend for a small layer.

    Args:
        name: Name of the backend.
        dtype: Dtype of its parameters.
        noise: Standard deviation of noise that is added to the parameters' initial values.
        causal: Whether the layer is causal.
        cross_attention: Whether keys come from another sequence than queries.
        layer: Number of the layer.
        sizes: Other fields of :func:`geometry`.
        options: Options of the backend.
    """
    layout = {"causal": causal, "cross_attention": cross_attention, "layer": layer}
    place = geometry(**{**layout, **sizes})
    backend = build_backend(name, options, place)
    if noise:
        add_noise(backend, noise)
    return backend.to(dtype)


@torch.no_grad()
def add_noise(module: nn.Module, std: float) -> None:
    """Add normal noise to every parameter: in a new model, biases are zero and norms are one."""
    for parameter in module.parameters():
        parameter.add_(std * torch.randn_like(parameter))


@torch.no_grad()
def redrawn(model: nn.Module, seed: int = 5) -> Any:
    """Draw large weights, because the usual small ones make all attention uniform."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(1.5 * noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.1 * noise)
    return model.eval()


def tiny_llama_config(**changes: Any) -> Any:
    """Return the config of a Llama of :data:`MODEL_SIZES`."""
    from transformers import LlamaConfig  # most layer tests do not need transformers

    sizes = {"num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return LlamaConfig(**{**MODEL_SIZES, **sizes, **tokens, **changes})


def tiny_llama(**changes: Any) -> Any:
    """Return a :func:`redrawn` Llama with eager attention and the same weights in every call."""
    from transformers import AutoModelForCausalLM

    config = tiny_llama_config(**changes)
    return redrawn(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def nan_padded(x: Tensor) -> Tensor:
    """Copy a tensor into storage that continues with NaN, to reveal reads past the end."""
    storage = torch.full((x.numel() + 4096,), torch.nan, dtype=x.dtype, device=x.device)
    storage[: x.numel()] = x.flatten()
    return storage[: x.numel()].view(x.shape)


def nan_surrounded(x: Tensor) -> Tensor:
    """Copy ``[B, H, T, X]`` into storage with NaN around each row, to reveal reads outside it."""
    batch, heads, tokens, size = x.shape
    storage = torch.full((batch, tokens + 2, heads, size + 8), torch.nan, dtype=x.dtype)
    return storage.transpose(1, 2)[:, :, 1:-1, 4:-4].copy_(x)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return standard normal numbers, drawn in float64, in storage that continues with NaN."""
    return nan_padded(torch.randn(shape, dtype=torch.float64).to(dtype))


def qkv(
    length: int = 9,
    keys: int | None = None,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (H, HKV),
    sizes: tuple[int, int] = (D, E),
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Return random queries, keys and values for the layer of :func:`geometry`.

    Args:
        length: Number of queries.
        keys: Number of keys; ``None`` means ``length``.
        batch: Number of rows.
        heads: Numbers of query heads and of key heads.
        sizes: Sizes of keys and of values per head.
        dtype: Dtype of the tensors.
    """
    keys = length if keys is None else keys
    shapes = (heads[0], length, sizes[0]), (heads[1], keys, sizes[0]), (heads[1], keys, sizes[1])
    return [draw(batch, *shape, dtype=dtype) for shape in shapes]


def hidden_states(length: int, *, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random hidden states, ``[B, T, M]``."""
    return draw(batch, length, M, dtype=dtype)


def gradients(results: Sequence[Tensor], inputs: Iterable[Tensor | None], seed: int = 7) -> Any:
    """Return the gradients of a fixed random sum of the results, for all inputs but ``None``."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]
    total = sum((x * weight).sum() for x, weight in zip(results, weights, strict=True))
    return torch.autograd.grad(total, [x for x in inputs if x is not None])


def assert_within(ours: Tensor, plain: Tensor, exact: Tensor, eps: float) -> None:
    """Compare with float64; the error of the plain form in the same dtype sets the tolerance."""
    budget = 2 * (plain.double() - exact).abs().max() + 4 * eps * exact.abs().max()
    worst = (ours.double() - exact).abs().max()
    assert worst <= budget, f"error {worst:.2e} exceeds {budget:.2e}"


def check_operator(operator: Any, arguments: Iterable[Any], *, trace: bool) -> None:
    """Check an operator's schema, its fake and its autograd registration.

    The fake depends on which tensors are given, so that each combination is worth a check.

    Args:
        operator: The operator.
        arguments: Its arguments.
        trace: Whether its gradient is traced too, which takes ten times as long. One combination
            of arguments suffices; a backward operator is traced with its forward operator.
    """
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] * trace
    torch.library.opcheck(operator, tuple(arguments), test_utils=checks)


def freeze_garbage_collector() -> None:
    """Exclude all present objects from later garbage collections.

    Accelerate and torch.compile collect garbage explicitly. Each collection visits the modules and
    test items of the session, which takes up to a second, and longer than most tests.
    """
    gc.collect()
    gc.freeze()


def in_form(form: str, op: Callable[..., Any]) -> Any:
    """Return an op in a form: ``"chunk"``, ``"steps"``, or ``"parallel"``, in one chunk."""

    def attend(q: Tensor, k: Tensor, *args: Any, chunk_size: Any = None, **options: Any) -> Any:
        if form == "steps":
            return in_steps(op, q, k, *args, **options)
        if form == "parallel":
            chunk_size = max(k.shape[2], 1)
        return op(q, k, *args, chunk_size=chunk_size, **options)

    return attend


def in_steps(
    op: Callable[..., Any], *given: Any, state: Any = None, return_state: Any = None, **options: Any
) -> Any:
    """Return the output and the state of an op that gets one token a call; not in packed rows."""
    tokens = given[1].shape[2]
    if options.get("sequences") is not None or tokens < 2:
        return op(*given, state=state, return_state=return_state, **options)

    def at(x: Any, t: int) -> Any:
        if isinstance(x, Tensor) and x.dim() > 2 and x.shape[2] == tokens:
            return x[:, :, t : t + 1]
        return x

    def widen_shared(x: Any) -> Any:  # its gradient sums over calls
        is_shared = isinstance(x, Tensor) and x.dim() < 3
        return x.float() if is_shared and x.dtype in (torch.float16, torch.bfloat16) else x

    given = tuple(map(widen_shared, given))
    options = {name: widen_shared(x) for name, x in options.items()}
    outs = []
    for t in range(tokens):
        here = {name: at(x, t) for name, x in options.items()}
        found = op(*(at(x, t) for x in given), state=state, return_state=True, **here)
        state = found.state
        outs.append(found.out)
    return found._replace(out=torch.cat(outs, 2))


def change_implementation(monkeypatch: Any, op: str, name: str, **changes: Any) -> None:
    """Register an implementation with other fields until the end of a test."""
    from attnzoo.contract import implementation

    table = dict(implementation._NAMED[op])
    table[name] = replace(table[name], **changes)
    monkeypatch.setitem(implementation._NAMED, op, table)
    monkeypatch.setitem(implementation._AUTOMATIC, op, implementation._automatic(table.values()))


def by_sequence(op):
    """Return an op of sequences as one of rows with a mask of padding and segments.

    Every tensor ``[B, H, T, ...]`` in its arguments, of the tokens of k, becomes one row.
    """

    def call(*given, mask=None, **options):
        mask = AttentionMask(causal=True) if mask is None else mask
        if not mask.causal:
            options["causal"] = False
        if mask.padding is None and mask.segment_ids is None:
            return op(*given, **options)
        k = [x for x in given if isinstance(x, Tensor)][1]
        shape = k.shape[0], k.shape[2]
        sequences, layout = sequences_of_mask(mask, shape, k.device)

        def row(x):
            if type(x) is tuple or hasattr(x, "_fields"):
                made = [row(y) for y in x]
                return tuple(made) if type(x) is tuple else type(x)(*made)
            is_tokens = isinstance(x, Tensor) and x.dim() > 2 and (len(x), x.shape[2]) == shape
            return layout.to_row(x) if is_tokens else x

        state = options.pop("state", None)
        if state is not None:
            options["state"] = layout.state_to_sequences(state, sequences.count)
        options = {name: row(x) if name != "state" else x for name, x in options.items()}
        output = op(*map(row, given), sequences=sequences, **options)
        last = output.state
        if last is not None:
            last = layout.state_to_rows(last, sequences.count)
        tokens = row(k).shape[2]
        is_row = output.out.shape[2] == tokens and len(output.out) == 1
        out = layout.to_rows(output.out) if is_row else output.out
        return output._replace(out=out, state=last)

    return call


def run_torch_functions(patch: Any, *families: str) -> None:
    """Let stock recurrent layers run torch's functions where flash-linear-attention is installed.

    Args:
        patch: The fixture ``monkeypatch``, or the like.
        families: Families of the models, ``config.model_type``.
    """
    from attnzoo.hf.models.speed_up import RULES

    for family in families:
        name = family.removesuffix("_text")
        module = import_module(f"transformers.models.{name}.modeling_{name}")
        for rule in {*RULES} & {*vars(module)}:
            patch.setattr(module, rule, inspect.unwrap(getattr(module, rule)))
