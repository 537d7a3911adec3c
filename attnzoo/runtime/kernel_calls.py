"""What every call of a kernel needs: tensors as it reads them, autocast, derivatives, operators.

Kernels read rows by address, in huge pages and padded to SIMD vectors. Implementations with a
backward pass of their own compute first derivatives in reverse mode. Torch returns zeros without an
error if such a backward pass is differentiated again (``once_differentiable``), or if a custom
operator gets forward-mode tangents; the functions here raise instead. The backward pass of a custom
operator is a custom operator too, so that ``torch.compile`` sees one call per pass.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, wraps
from itertools import accumulate
from mmap import PAGESIZE
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import CustomOpDef, infer_schema

from attnzoo.errors import UnsupportedError

Backward = Callable[..., tuple[Tensor | None, ...]]
Gradients = Sequence[Tensor | None]

HUGE_BYTES = 2**22  # smaller tensors use ordinary pages
MADV_HUGEPAGE = 14  # value in the C library
BLOCK_BYTES = 2**20  # size of the input of one block of tokens
MIN_BLOCKS = 9  # fewer are not worth it: the memory of temporaries up to 8 MB is reused anyway
LANES = 16  # float32 elements of the widest vector register


# -- memory ---------------------------------------------------------------------------------------


def empty_huge_pages(
    like: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty tensor, in huge pages if it is large and Linux provides them on request.

    The system allocates the pages of large blocks on first use, which costs microseconds per page
    of 4 KiB, a sixth of the time of a forward pass over 16k tokens.
    """
    x = like.new_empty(shape, dtype=dtype or like.dtype)
    in_memory = x.device.type == "cpu" and type(x) is Tensor  # subclasses may have no data
    if in_memory and x.nbytes >= HUGE_BYTES and sys.platform == "linux":
        start = -(-x.data_ptr() // PAGESIZE) * PAGESIZE
        length = (x.data_ptr() + x.nbytes - start) // PAGESIZE * PAGESIZE
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_HUGEPAGE)
    return x


def widen(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or unchanged if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def state_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """Return the dtype of the sums: float64 if any input is float64, else float32."""
    return torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32


def pad_to_simd(x: Tensor) -> Tensor:
    """Return ``x`` with rows padded with zeros to a multiple of ``LANES``; rows are contiguous."""
    size = x.shape[-1]
    if size % LANES == 0:
        return x if x.stride(-1) == 1 else x.contiguous()
    padded = empty_huge_pages(x, (*x.shape[:-1], size + -size % LANES))
    padded[..., :size] = x
    padded[..., size:] = 0
    return padded


# What the names of a kernel's functions end with, by the dtype of the computation
TYPE_NAMES = {torch.float32: "float", torch.float64: "double"}

# The dtypes that a kernel reads and writes through ``rows.h``, with their value of Type there
DTYPE_NUMBERS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Rows(ctypes.Structure):
    """A tensor ``[B, H, T, X]`` with contiguous rows; ``Tensor`` of ``rows.h``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int64),
        ("steps", ctypes.c_int64 * 3),
    ]


def rows_of(*tensors: Tensor) -> list[Rows]:
    """Return the structs through which a kernel accesses tensors ``[B, H, T, X]``.

    They do not keep the tensors alive.
    """
    found = []
    for x in tensors:
        steps = (ctypes.c_int64 * 3)(*x.stride()[:3])
        found.append(Rows(x.data_ptr(), DTYPE_NUMBERS[x.dtype], steps))
    return found


def rows_in(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Return tensors in a dtype, with contiguous rows; the same ones where nothing changes."""
    found = []
    for x in tensors:
        x = x if x.dtype == dtype else x.to(dtype)
        found.append(x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous())
    return found


def is_plain_call(*tensors: Tensor | None) -> bool:
    """Return whether a kernel may read the tensors of a call by address.

    The call must not be compiled, transformed or recorded for a backward pass, and the numbers in
    memory must be the values: a view such as ``z.conj().imag`` is negated when it is read.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    records = torch.is_grad_enabled()
    for x in tensors:
        if x is None:
            continue
        if x.is_neg() or (records and x.requires_grad):
            return False
    return True


def with_contiguous_rows(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with contiguous rows: the given ones, or contiguous copies."""
    found = []
    for x in tensors:
        found.append(x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous())
    return found


def with_contiguous_states(*tensors: Tensor) -> list[Tensor]:
    """Return tensors whose states ``x[i]`` are contiguous: the given ones, or contiguous copies.

    States of a pool may have gaps between them, as in the pages of a cache.
    """
    found = []
    for x in tensors:
        is_dense = x.is_contiguous() or _is_dense(x.shape[1:], x.stride()[1:])
        found.append(x if is_dense else x.contiguous())
    return found


@lru_cache(maxsize=1024)
def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape is contiguous; ``x[0]`` would take microseconds."""
    sizes = accumulate(reversed(shape), mul, initial=1)
    steps = zip(reversed(shape), reversed(strides), sizes, strict=False)
    return all(step == size or count == 1 for count, step, size in steps)


def unpad(x: Tensor, size: int) -> Tensor:
    """Return the first ``size`` elements of every row; ``x`` itself if there are no others."""
    if x.shape[-1] == size:
        return x
    return empty_huge_pages(x, (*x.shape[:-1], size)).copy_(x[..., :size])


def cat_huge_pages(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return ``torch.cat`` of tensors of one dtype, in huge pages if none needs a gradient."""
    if not _may_write_in_place(tensors):
        return torch.cat(list(tensors), dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return torch.cat(list(tensors), dim, out=empty_huge_pages(tensors[0], tuple(shape)))


def map_token_blocks(function: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    """Return ``function(x)``, computed in blocks of tokens on a CPU if none needs a gradient.

    The temporaries of a block fit into the cache, and their memory is reused. The temporaries of
    all tokens need new pages of the system, which take most of the time of a feature map at 16k
    tokens.

    Args:
        function: Maps ``[B, H, N, D]`` to ``[B, H, N, F]``, each token by itself.
        x: ``[B, H, T, D]``.
        weights: Other tensors that the function reads.
    """
    length = x.shape[2]
    # Only 1: any other number would limit the lengths that an exported program takes
    if length == 1 or not _may_write_in_place([x, *weights]):
        return function(x)
    step = max(BLOCK_BYTES * length // max(x.nbytes, 1), 1)
    if MIN_BLOCKS * step > length:
        return function(x)
    out = None
    for start in range(0, length, step):
        block = function(x[:, :, start : start + step])
        if out is None:
            out = empty_huge_pages(block, (*block.shape[:2], length, block.shape[3]))
        out[:, :, start : start + step] = block
    assert out is not None
    return out


def _may_write_in_place(tensors: Sequence[Tensor]) -> bool:
    """Return whether operations on CPU tensors may write into memory that was allocated before."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    transformed = forward_ad._current_level >= 0
    return not (
        needs_grad
        or transformed
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or tensors[0].device.type != "cpu"
    )


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


# -- autocast and derivatives ----------------------------------------------------------------------


def autocast_disabled(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast does not change the precision of operations."""
    if not torch._C._is_any_autocast_enabled():  # fast, for calls of one decoded token
        return nullcontext()
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def check_reverse_mode(op: str, *tensors: Tensor | None, instead: str = "impl='reference'") -> None:
    """Raise ``UnsupportedError`` if a tensor is differentiated in forward mode or by torch.func.

    Args:
        op: Name of the op.
        tensors: Its inputs.
        instead: The implementation that supports these derivatives.
    """
    forward_mode = forward_ad._current_level >= 0
    if torch.compiler.is_compiling():  # a graph cannot contain the checks of single tensors
        refused = forward_mode
    elif not forward_mode and torch._C._functorch.peek_interpreter_stack() is None:
        return
    else:
        found = [x for x in tensors if x is not None]
        refused = any(map(_is_differentiated_by_func, found))
        refused = refused or (forward_mode and any(map(_has_tangent, found)))
    if refused:
        raise UnsupportedError(
            f"This implementation of {op} computes derivatives by backward() and "
            "torch.autograd.grad only, and got a tensor that forward-mode differentiation or "
            f"torch.func differentiates; use {instead}."
        )


def check_not_mapped(op: str, *tensors: Tensor | None, instead: str = "impl='reference'") -> None:
    """Raise ``UnsupportedError`` under torch.vmap, which maps no ``autograd.Function`` of ours.

    Arguments as in :func:`check_reverse_mode`.
    """
    if torch.compiler.is_compiling() or not is_transformed():
        return
    if any(is_mapped(x) for x in tensors if x is not None):
        raise UnsupportedError(
            f"This implementation of {op} does not support torch.vmap; make the mapped dimension "
            f"a part of the batch, or use {instead}."
        )


def is_transformed() -> bool:
    """Return whether forward-mode differentiation or a transform of torch.func is active."""
    return forward_ad._current_level >= 0 or (
        torch._C._functorch.peek_interpreter_stack() is not None
    )


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def is_mapped(x: Tensor) -> bool:
    """Return whether torch.vmap maps ``x``."""
    return _is_wrapped(x, torch._C._functorch.is_batchedtensor)


def _is_differentiated_by_func(x: Tensor) -> bool:
    """Return whether ``grad``, ``vjp`` or ``jvp`` of torch.func differentiates by ``x``."""
    return _is_wrapped(x, torch._C._functorch.is_gradtrackingtensor)


def _is_wrapped(x: Tensor, is_kind: Callable[[Tensor], bool]) -> bool:
    """Return whether one of the wrappers of torch.func around ``x`` is of a kind."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if is_kind(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def first_derivative_only(op: str, instead: str = "impl='reference'") -> Callable[[Any], Any]:
    """Decorator of the backward pass of an autograd function: its gradients have no derivative.

    Differentiating them raises ``UnsupportedError``. Torch's ``once_differentiable`` raises only
    for derivatives with respect to the incoming gradients, and returns zeros for the others.

    Args:
        op: Name of the op.
        instead: The implementation that supports higher derivatives.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def run(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                gradients = backward(ctx, *d_outs)
            if not torch.is_grad_enabled():  # enabled by create_graph=True
                return gradients
            inputs = [x for x in (*d_outs, *ctx.saved_tensors) if x is not None and x.requires_grad]
            return tuple(
                x if x is None else _RefuseBackward.apply(op, instead, x, *inputs)
                for x in gradients
            )

        return run

    return decorate


def refuse_derivative(backward: Any, op: str, instead: str = "impl='reference'") -> None:
    """Make derivatives of a backward pass that is a custom operator raise ``UnsupportedError``."""

    def refuse(ctx: Any, *d_outs: Tensor) -> None:
        raise _second_derivative_error(op, instead)

    backward.register_autograd(refuse)


class _RefuseBackward(torch.autograd.Function):
    """Return a gradient whose derivative with respect to the inputs raises."""

    @staticmethod
    def forward(ctx: Any, op: str, instead: str, gradient: Tensor, *inputs: Tensor) -> Tensor:
        ctx.names = op, instead
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> None:
        raise _second_derivative_error(*ctx.names)


def _second_derivative_error(op: str, instead: str) -> UnsupportedError:
    return UnsupportedError(
        f"This implementation of {op} has first derivatives only, and its gradients are "
        f"differentiated again; use {instead}."
    )


# -- operators -------------------------------------------------------------------------------------


def _same_shape(number: int, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _all_outputs(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> Sequence[Tensor]:
    return output


class _Schema:
    """The arguments of an operator.

    Attributes:
        text: Their declarations.
        num_outputs: The number of tensors that it returns.
    """

    def __init__(self, forward: Callable[..., tuple[Tensor, ...]]) -> None:
        given, returned = infer_schema(forward, mutates_args=()).rsplit(" -> ", 1)
        self.text, self.num_outputs = given[1:-1], returned.count("Tensor")
        self.are_tensors = [x.startswith(("Tensor ", "Tensor? ")) for x in self.text.split(", ")]

    def tensors(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the arguments that are tensors or ``None``, or what belongs to these."""
        return [x for x, is_tensor in zip(args, self.are_tensors, strict=True) if is_tensor]

    def options(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the other arguments."""
        return [x for x, is_tensor in zip(args, self.are_tensors, strict=True) if not is_tensor]

    def join(self, tensors: Sequence[Any], options: Sequence[Any]) -> list[Any]:
        """Return all arguments in their order."""
        first, second = iter(tensors), iter(options)
        return [next(first) if is_tensor else next(second) for is_tensor in self.are_tensors]


def differentiable_op(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Gradients],
    *,
    fake: Callable[..., tuple[Tensor, ...]],
    op: str,
    save: Callable[[tuple[Any, ...], tuple[Tensor, ...]], Sequence[Tensor]] = _all_outputs,
    num_saved: int | None = None,
    instead: str = "impl='reference'",
    fake_gradient: Callable[[int, Tensor], Tensor] = _same_shape,
) -> tuple[CustomOpDef, CustomOpDef]:
    """Define an operator and that of its gradients, whose name ends in ``_backward``.

    The arguments of the second are the gradients of the outputs (``None`` for zeros), saved
    outputs, the inputs, and for each tensor of the inputs whether its gradient is needed.

    Args:
        name: Name of the operator.
        forward: Computes it, returns a tuple of tensors; its annotations give the schema.
        backward: Gets gradients of the outputs, saved outputs and needs as three lists, then the
            inputs, and returns a gradient for each tensor of the inputs; ``None`` where not needed.
        fake: Returns outputs without data.
        op: Name of the public op, for errors.
        save: Returns the outputs that the backward pass reads, from inputs and outputs. Default:
            all of them.
        num_saved: Their number. Default: that of the outputs.
        instead: The implementation that supports higher derivatives.
        fake_gradient: Returns a gradient without data, from the number of a tensor among the
            inputs and that tensor.
    """
    schema = _Schema(forward)
    num_saved = schema.num_outputs if num_saved is None else num_saved
    forward_op = torch.library.custom_op(name, forward, mutates_args=())
    forward_op.register_fake(fake)
    backward_op = _define_backward(f"{name}_backward", schema, backward, num_saved, fake_gradient)
    refuse_derivative(backward_op, op, instead)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*save(inputs, output), *schema.tensors(inputs))
        ctx.options = schema.options(inputs)
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint gives each tensor once
        inputs = schema.join(saved[num_saved:], ctx.options)
        needed = schema.tensors(ctx.needs_input_grad)
        gradients = backward_op(*d_outs, *saved[:num_saved], *inputs, needed)
        found = [x if need else None for x, need in zip(gradients, needed, strict=True)]
        return tuple(schema.join(found, [None] * len(ctx.options)))

    forward_op.register_autograd(differentiate, setup_context=setup_context)
    return forward_op, backward_op


def _define_backward(
    name: str,
    schema: _Schema,
    backward: Callable[..., Gradients],
    num_saved: int,
    fake_gradient: Callable[[int, Tensor], Tensor],
) -> CustomOpDef:
    """Define the operator of the gradients."""
    count = schema.num_outputs
    first = count + num_saved  # of the inputs
    arguments = [
        *(f"Tensor? d_out_{i}" for i in range(count)),
        *(f"Tensor saved_{i}" for i in range(num_saved)),
        schema.text,
        "bool[] needed",
    ]

    def run(*args: Any) -> list[Tensor]:
        inputs, needed = args[first:-1], args[-1]
        gradients = backward(args[:count], args[count:first], needed, *inputs)
        return [
            inputs[0].new_empty(0) if x is None or not need else x
            for x, need in zip(gradients, needed, strict=True)
        ]

    def fake(*args: Any) -> list[Tensor]:
        inputs, needed = args[first:-1], args[-1]
        return [
            fake_gradient(i, x) if need and x is not None else inputs[0].new_empty(0)
            for i, (x, need) in enumerate(zip(schema.tensors(inputs), needed, strict=True))
        ]

    text = f"({', '.join(arguments)}) -> Tensor[]"
    op = torch.library.custom_op(name, run, mutates_args=(), schema=text)
    op.register_fake(fake)
    return op
