r"""Dense softmax attention, the oracle of every exact implementation.

Computes :math:`o_i = \sum_j a_{ij} v_j`, :math:`a_{ij} = \mathrm{softmax}_j(s\, q_i \cdot k_j)`.
Time and memory O(T S). Source: Vaswani et al., 2017, arXiv:1706.03762.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.contract.implementation import Implementation, register_implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput
from attnzoo.contract.validation import check_qkv
from attnzoo.ops.softmax.reference import SoftmaxCall, run_reference

register_implementation(
    Implementation(
        op="softmax_attention",
        name="torch",
        run=run_reference,
        automatic="the whole score matrix, on every device",
        onnx=True,
    ),
    Implementation(  # the same
        op="softmax_attention", name="reference", run=run_reference, onnx=True
    ),
)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: AttentionMask | Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
) -> AttentionOutput:
    """Return softmax attention and its weights, computed in float32 or wider.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``; each serves H / Hkv query heads.
        v: Values, ``[B, Hkv, S, E]``.
        scale: Multiplies the products; ``None`` means ``D ** -0.5``.
        mask: Which keys each query sees, as an :class:`~attnzoo.contract.masks.AttentionMask`
            or as a bool tensor that broadcasts to ``[B, H, T, S]``. A query that sees none gives
            zeros. Hidden keys and values must be finite: their weight is 0, and 0 times NaN is NaN.
        bias: Added to the scores, broadcastable to ``[B, H, T, S]``. It hides keys where it is
            -inf; a query that sees none gives zeros.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        sinks: A logit per head, ``[H]``, or per head and query, ``[B, H, T, 1]``, that takes part
            in the softmax and has no value.
        dropout: Probability of dropping a weight.
        impl: ``"torch"``, ``"reference"``, the same here, or ``"auto"``.

    Returns:
        ``out`` as ``[B, H, T, E]`` and ``weights`` as ``[B, H, T, S]``, in the dtype of ``v``.

    Raises:
        UnsupportedError: The shapes disagree, or ``impl`` is unknown.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 10, 8)
        >>> output = attnzoo.ops.softmax_attention(q, k, v, mask=attnzoo.AttentionMask(causal=True))
        >>> output.out.shape, output.weights.shape
        (torch.Size([1, 4, 10, 8]), torch.Size([1, 4, 10, 10]))
    """
    given = mask if isinstance(mask, AttentionMask) else None
    check_qkv(q, k, v, given, bias=bias, sinks=sinks, dropout=dropout)
    if isinstance(mask, AttentionMask):
        mask = mask.dense(q.shape[2], k.shape[2], q.device)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    call = SoftmaxCall(q, k, v, scale, mask, bias, softcap, sinks, dropout)
    implementation, choice = select("softmax_attention", call, impl)
    out, weights = implementation.run(call)
    return AttentionOutput(out, weights=weights, impl=choice)
