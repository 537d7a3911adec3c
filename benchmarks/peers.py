"""Compare our ops with public implementations of the same mechanisms: same inputs and weights.

The results of a pair must first agree within a tolerance, which covers deviations of the peer; the
docstring of the pair names them. If the peer is a module with projections, both use these.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from linformer import LinformerSelfAttention
from performer_pytorch.performer_pytorch import FastAttention
from torch import Tensor
from transformers import LongformerConfig, ReformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.evaluation.timing import BenchmarkCase, Run, Timing, as_row, time_together
from attnzoo.ops.delta.api import delta_attention
from attnzoo.ops.linformer.api import linformer_attention
from attnzoo.ops.longformer.api import longformer_attention
from attnzoo.ops.lsh.api import shared_qk_attention
from attnzoo.registry import build_backend


class Pair(NamedTuple):
    """Two implementations of the same operation, their inputs, and the tolerance between them."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]  # of the peer, used by both; they get gradients, like the inputs
    tolerance: float  # relative to the norm of the peer's result
    shared: Callable[..., tuple[Tensor, ...]] | None = None  # projections that both compute


def longformer(case: BenchmarkCase) -> Pair:
    """Attend to 256 tokens on either side; both project a hidden state to q, k and v."""
    config = LongformerConfig(
        hidden_size=case.H * case.D,
        num_attention_heads=case.H,
        num_hidden_layers=1,
        attention_window=[512],
    )
    peer = LongformerSelfAttention(config, 0).eval()
    attention_mask = torch.zeros(case.B, case.T)
    no_tokens = torch.zeros(case.B, case.T, dtype=torch.bool)

    def ours(x: Tensor) -> Tensor:
        q, k, v = (heads(project(f, x), case) for f in (peer.query, peer.key, peer.value))
        return longformer_attention(q, k, v, window=256).out.transpose(1, 2).flatten(2)

    def theirs(x: Tensor) -> Tensor:
        return peer(  # type: ignore[no-any-return]
            x,
            attention_mask,
            is_index_masked=no_tokens,
            is_index_global_attn=no_tokens,
            is_global_attn=False,
        )[0]

    layers = peer.query, peer.key, peer.value
    weights = tuple(p for layer in layers for p in layer.parameters())
    return Pair(ours, theirs, (hidden(case),), weights, 1e-4, lambda x: tuple(f(x) for f in layers))


def linformer(case: BenchmarkCase) -> Pair:
    """Attend to 256 rows; both project four times: queries, keys, values, outputs."""
    peer = LinformerSelfAttention(case.H * case.D, case.T, k=256, heads=case.H).eval()

    def ours(x: Tensor) -> Tensor:
        q, k, v = (heads(project(f, x), case) for f in (peer.to_q, peer.to_k, peer.to_v))
        rows = peer.proj_k[None], peer.proj_v[None]
        out = linformer_attention(q, k, v, *rows, scale=case.D**-0.5).out
        return peer.to_out(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def shared(x: Tensor) -> tuple[Tensor, ...]:
        return peer.to_out(peer.to_q(x)), peer.to_k(x), peer.to_v(x)

    return Pair(ours, peer, (hidden(case),), tuple(peer.parameters()), 1e-4, shared)


def reformer(case: BenchmarkCase) -> Pair:
    """Run four hash rounds with chunks of 64 and equal rotations; both project to q and v.

    If the scores of two buckets are equal up to rounding, the two may select different buckets.
    """
    config = ReformerConfig(
        attention_head_size=case.D,
        num_attention_heads=case.H,
        hidden_size=case.H * case.D,
        num_hashes=4,
        num_buckets=[16, 16],
        lsh_attn_chunk_length=64,
        is_decoder=True,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=case.T,
        hash_seed=0,
    )
    peer = LSHSelfAttention(config).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rotations = torch.randn(case.H, case.D, 4, 16)

    def ours(x: Tensor) -> Tensor:
        q, v = heads(project(peer.query_key, x), case), heads(project(peer.value, x), case)
        options = {"num_hashes": 4, "chunk_size": 64, "num_buckets": [16, 16]}
        mask = AttentionMask(causal=True)
        out = shared_qk_attention(q, q, v, mask=mask, rotations=rotations, **options).out
        return out.transpose(1, 2).flatten(2)

    def theirs(x: Tensor) -> Tensor:
        return peer(x).hidden_states  # type: ignore[no-any-return]

    layers = peer.query_key, peer.value
    weights = tuple(p for layer in layers for p in layer.parameters())
    return Pair(ours, theirs, (hidden(case),), weights, 0.02, lambda x: tuple(f(x) for f in layers))


def project(layer: Any, x: Tensor) -> Tensor:
    """Apply a projection of the peer."""
    out: Tensor = layer(x)
    return out


def performer(case: BenchmarkCase, *, causal: bool) -> Pair:
    """Use the same 128 features; the peer adds 1e-4, which matters little for small inputs."""
    place = Geometry(num_heads=case.H, num_key_heads=case.H, head_dim=case.D, causal=causal)
    backend: Any = build_backend("performer", {"num_features": 128}, place)
    with contextlib.redirect_stdout(None):  # it prints that it found no CUDA code
        peer = FastAttention(case.D, nb_features=128, causal=causal)
    peer.projection_matrix.copy_(backend.projection)
    q, k, v = (torch.randn(case.B, case.H, case.T, case.D) for _ in range(3))
    return Pair(lambda *x: backend(*x).out, peer, (0.2 * q, 0.2 * k, v), (), 0.05)


def delta_rule(case: BenchmarkCase) -> Pair:
    """Use a decay per token and normalised queries and keys; inputs are ``[B, T, H, D]``."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    # If flash-linear-attention is installed, the function is replaced by its GPU kernel
    peer = inspect.unwrap(qwen3_next.torch_chunk_gated_delta_rule)
    shape = case.B, case.T, case.H
    q, k, v = (torch.randn(*shape, case.D) for _ in range(3))
    decay, beta = -0.1 * torch.rand(shape), torch.rand(shape)

    def ours(*x: Tensor) -> Tensor:
        q, k, v, log_decay, beta = (y.transpose(1, 2) for y in x)
        options: dict[str, Any] = {"normalize_qk": True, "scale": case.D**-0.5}
        out = delta_attention(q, k, v, beta, log_decay=log_decay, **options).out
        return out.transpose(1, 2)

    def theirs(*x: Tensor) -> Tensor:
        out: Tensor = peer(*x, use_qk_l2norm_in_kernel=True)[0]
        return out

    return Pair(ours, theirs, (q, k, v, decay, beta), (), 1e-4)


def hidden(case: BenchmarkCase) -> Tensor:
    """Return a random hidden state, ``[B, T, H D]``."""
    return torch.randn(case.B, case.T, case.H * case.D)


def heads(x: Tensor, case: BenchmarkCase) -> Tensor:
    """Split ``[B, T, H D]`` into heads, ``[B, H, T, D]``."""
    return x.unflatten(-1, (case.H, case.D)).transpose(1, 2)


# Name: the peer, the tokens, the function that makes the pair, and the maximum number of rounds.
# The causal Performer is slow. It is last, because it leaves a large heap, in which the calls
# after it would cause no page faults.
PEERS: dict[str, tuple[str, int, Callable[[BenchmarkCase], Pair], int]] = {
    **{
        f"delta rule, {length}": (
            "transformers torch_chunk_gated_delta_rule",
            length,
            delta_rule,
            9,
        )
        for length in (4096, 16384)
    },
    "longformer, with projections": ("transformers LongformerSelfAttention", 4096, longformer, 9),
    "linformer, with projections": ("linformer LinformerSelfAttention", 4096, linformer, 9),
    "reformer, with projections": ("transformers LSHSelfAttention", 8192, reformer, 5),
    "performer, all keys": (
        "performer-pytorch FastAttention, all keys",
        8192,
        partial(performer, causal=False),
        9,
    ),
    "performer, causal": (
        "performer-pytorch FastAttention, causal",
        8192,
        partial(performer, causal=True),
        2,
    ),
}


def measure_peer(name: str, base: BenchmarkCase, rounds: int) -> list[dict[str, Any]]:
    """Check that the results of a pair agree, and time both in alternation."""
    peer, length, make, most = PEERS[name]
    case = replace(base, op=name, impl="torch", T=length)
    pair = make(case)
    with torch.no_grad():
        right = pair.theirs(*pair.inputs)
        worst = float((pair.ours(*pair.inputs) - right).norm() / right.norm())
    if worst > pair.tolerance:
        raise SystemExit(
            f"{name} and {peer} differ by {worst:.2g}, more than {pair.tolerance:g}: "
            "they do not compute the same"
        )
    runs = {name: _run(pair.ours, pair, case), peer: _run(pair.theirs, pair, case)}
    if pair.shared is not None:
        runs["shared"] = _run(pair.shared, pair, case)
    taken = time_together(runs, rounds=min(rounds, most), seconds=0.01)
    figures = {"over_peer": taken[name].times_faster_than(taken[peer])}
    if pair.shared is not None:
        ours, theirs = (_subtract(taken[x], taken["shared"]) for x in (name, peer))
        figures["over_peer_alone"] = ours.times_faster_than(theirs)
    return [
        as_row(case, taken[name], **figures),
        as_row(replace(case, op=peer, impl="peer"), taken[peer]),
    ]


def _subtract(whole: Timing, part: Timing) -> Timing:
    """Return the time of the whole without that of a part, round by round."""
    pairs = zip(whole.rounds_ms, part.rounds_ms, strict=True)
    return Timing(rounds_ms=tuple(a - b for a, b in pairs))


def _run(attend: Callable[..., Any], pair: Pair, case: BenchmarkCase) -> Run:
    if case.mode == "forward":
        run: Run = torch.no_grad()(lambda: attend(*pair.inputs))
        return run
    leaves = [x.detach().requires_grad_() for x in pair.inputs]
    outs = attend(*leaves)
    upstream = [torch.randn_like(x) for x in (outs if isinstance(outs, tuple) else (outs,))]

    def train() -> Any:
        given = [*leaves, *pair.weights]
        # the projections alone do not use all weights
        return torch.autograd.grad(attend(*leaves), given, upstream, allow_unused=True)

    return train
