"""One chunk of a sweep over linear attention: all that happens to its tokens, in every mode.

The modes, and what x, y and u are in each, are in :mod:`attnzoo.kernels.triton.linear_sweep`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.triton.linear_decays import borders, scalar_decay, through, vector_decay
from attnzoo.kernels.triton.linear_parts import (
    column_sums,
    features,
    features_backward,
    largest,
    load_rows,
    pinned,
    product,
    row_sums_of,
    store_rows,
)


@triton.jit
def query_features(
    q, tops, token, token_stride, column, inside, map_scale,
    MAP: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load queries and map them; ``tops`` has the largest exponents where rows are not whole."""
    raw = load_rows(q, token, token_stride, column, inside, D)
    top, ties = tl.zeros(token.shape, tl.float32), tl.full(token.shape, 1.0, tl.float32)
    mapped = raw
    if MAP == "exp":
        if WHOLE:
            top, ties = largest(raw.to(tl.float32), column, map_scale, D)
        else:
            top = tl.load(tops + token, mask=inside, other=0.0)
    if MAP != "identity":
        mapped = features(raw.to(tl.float32), top, column, map_scale, MAP, "queries", D)
        mapped = pinned(mapped.to(OPERAND))
    return raw, mapped.to(OPERAND), top, ties


@triton.jit
def key_features(
    k, token, token_stride, column, inside, map_scale,
    MAP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load keys and map them; zeros where a token is padding, but not past the end."""
    raw = load_rows(k, token, token_stride, column, inside, D)
    mapped = raw
    if MAP != "identity":
        nothing = tl.zeros(token.shape, tl.float32)
        mapped = features(raw.to(tl.float32), nothing, column, map_scale, MAP, "keys", D)
        if PADDED:
            mapped = tl.where(inside[:, None], mapped, 0.0)
        mapped = pinned(mapped.to(OPERAND))
    return raw, mapped.to(OPERAND)


@triton.jit
def divided(
    d_out, inverse, token, token_stride, column, inside,
    NORMALIZE: tl.constexpr, E: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load gradients of the output, divided by the denominators; rounded alike in every mode."""
    rows = load_rows(d_out, token, token_stride, column, inside, E)
    if NORMALIZE:
        rows = rows.to(tl.float32) * tl.load(inverse + token, mask=inside, other=0.0)[:, None]
    return rows.to(OPERAND)


@triton.jit
def walk_chunk(
    state, z, crossing, edge, first, stop,
    q, k, v, d_out, result, log_decay, segment_ids, real,
    inverse, shared, tops, products, d_log_decay,
    q_head, o_head, tokens, heads, all_rows, tile, bh, xc, uc, scale, map_scale, eps,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, o_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, MODE: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, WANT_DECAY: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """Walk the chunk that begins at token ``first``; pointers are those of its row and key head.

    Without WINDOWS, all of it, unless ``edge`` is 0 or a decay is too strong: then nothing is
    written, the state stays, and 0 is returned for ``edge``. With them, its rows up to the one that
    is returned, or, on the way back, from there to ``edge``.

    Returns:
        The state and its z after that, what the gradient of the decays carries on, and the edge.
    """
    REVERSE: tl.constexpr = (MODE == "dv") or (MODE == "dk")
    INNER: tl.constexpr = (MODE != "dq") and (MODE != "dk")  # keys and queries are x and y
    SCALAR: tl.constexpr = DECAY == "scalar"
    VECTOR: tl.constexpr = DECAY == "vector"
    DIVIDE: tl.constexpr = NORMALIZE and INNER and not REVERSE
    LESS: tl.constexpr = NORMALIZE and not INNER
    CANCELS: tl.constexpr = (MODE == "shared") or LESS or (WANT_DECAY and not INNER)
    FINE: tl.constexpr = "right" if CANCELS else ""
    ALONE: tl.constexpr = "both" if VECTOR and not INNER else "left"
    WEIGHTS: tl.constexpr = ALONE if CANCELS else ""
    DECAYS: tl.constexpr = VECTOR or SCALAR
    EXACT: tl.constexpr = "right" if WANT_DECAY and (not INNER) and DECAYS else ""
    KEYS: tl.constexpr = "right" if SCALAR else ""  # of z
    gc = xc if INNER else uc  # columns of queries and keys, and of a decay per channel
    vc = uc if INNER else xc  # columns of values, and of the output
    here = first.to(tl.int64)
    key = tl.arange(0, C)
    inside = key < stop - first
    own = inside
    if PADDED:
        own = own & (tl.load(real + here + key, mask=inside, other=0) != 0)
    if REVERSE:
        seen = key[:, None] <= key[None, :]
    else:
        seen = key[:, None] >= key[None, :]
    done = inside  # rows whose results are ready
    weights = tl.full((C,), 1.0, tl.float32)  # of tokens in the state
    if VECTOR:
        sums, carry, window, edge = vector_decay(
            log_decay + here * gate_token, gate_token, key, gc, stop - first, edge,
            D, INNER, REVERSE, WINDOWS, OPERAND, PRECISION,
        )  # fmt: skip
        since, until = tl.exp2(sums), tl.exp2(-sums)
        some = WINDOWS or edge == 0  # rows are left out
        fades = carry[:, None] if INNER else carry[None, :]
        done = done & window
    if SCALAR:
        since, until, carry, window, edge = scalar_decay(
            log_decay + here * gate_token,
            gate_token,
            key,
            stop - first,
            edge,
            REVERSE,
            WINDOWS,
        )
        done = done & window
        weights *= since if REVERSE else until
    if PACKED:
        part, last_part = borders(segment_ids, first, key, done)
        seen = seen & (part[:, None] == part[None, :])
        opens, stays = (part == 0).to(tl.float32), (part == last_part).to(tl.float32)
        joined = (last_part == 0).to(tl.float32)  # the chunk's end still sees its start
        weights *= opens if REVERSE else stays

    # Keys and values: y and u on the way forward, x and the rows of the result on the way back
    raw, mapped = key_features(
        k + here * k_token, key, k_token, gc, own, map_scale, MAP, PADDED, D, OPERAND
    )
    other = load_rows(v + here * v_token, key, v_token, vc, own, E).to(OPERAND)
    if REVERSE:
        if DECAYS:
            state *= fades if VECTOR else carry
            z *= carry
        x = mapped if INNER else other
        if VECTOR and INNER:
            x = pinned((x * until).to(OPERAND))
        total = tl.zeros((C, BU), tl.float32)
        total = product(x, state, total, OPERAND, PRECISION, FINE)
        if not INNER:
            total += z[None, :]
        if PACKED:
            total *= stays[:, None]
            state *= joined
            z *= joined
    if MODE == "dq" and WANT_DECAY:
        both = tl.zeros((C, BU) if VECTOR else (C,), tl.float32)

    for g in range(G):
        at = g * tokens + here
        q_raw, q_mapped, top, ties = query_features(
            q + g * q_head + here * q_token, tops + at, key, q_token, gc, inside, map_scale,
            MAP, INNER, D, OPERAND,
        )  # fmt: skip
        if INNER and not REVERSE:
            x, y, u = q_mapped, mapped, other
        else:
            d_rows = divided(
                d_out + g * o_head + here * o_token, inverse + at, key, o_token, vc, inside,
                NORMALIZE, E, OPERAND,
            )  # fmt: skip
            if INNER:
                y, u = q_mapped, d_rows
            elif REVERSE:
                y, u = d_rows, q_mapped
            else:
                x, y, u = d_rows, other, mapped
        if LESS:
            common = tl.load(shared + at + key, mask=inside, other=0.0)
        if VECTOR and INNER:
            if REVERSE:
                y = pinned((y * since).to(OPERAND))
            else:
                x = pinned((x * since).to(OPERAND))
                y = pinned((y * until).to(OPERAND))
            if some:
                y = tl.where(window[:, None], y, 0.0).to(OPERAND)
        if VECTOR and not INNER:
            u = u.to(tl.float32) * (since if REVERSE else until)
            if some:
                u = tl.where(window[:, None], u, 0.0)

        scores = tl.zeros((C, C), tl.float32)
        scores = product(x, tl.trans(y), scores, OPERAND, PRECISION, "")
        if LESS:
            scores -= common[None, :] if REVERSE else common[:, None]
        if SCALAR:
            scores *= (since if REVERSE else until)[None, :]
        scores = tl.where(seen, scores, 0.0)
        if not REVERSE:
            total = tl.zeros((C, BU), tl.float32)
            total = product(x, state, total, OPERAND, PRECISION, FINE)
            if LESS:
                total -= common[:, None] * z[None, :]
            if PACKED:
                total *= opens[:, None]
        total = product(scores, u, total, OPERAND, PRECISION, WEIGHTS)
        if not REVERSE:
            if VECTOR and not INNER:
                total *= since
            if SCALAR:
                total *= since[:, None]
        if DIVIDE:
            carried = row_sums_of(x, z, OPERAND, PRECISION)
            divisor = tl.sum(scores, 1) + (carried * opens if PACKED else carried)
            divisor = 1 / ((divisor * since if SCALAR else divisor) + eps)
            total *= divisor[:, None]
        if not NORMALIZE and not REVERSE:
            total *= scale

        if MODE == "out":
            store_rows(result + g * E + here * heads * E, total, key, heads * E, uc, done, E)
        if MODE == "shared":
            d_rows = load_rows(d_out + g * o_head + here * o_token, key, o_token, uc, inside, E).to(
                tl.float32
            )
            if NORMALIZE:
                d_rows = (d_rows * divisor[:, None]).to(OPERAND).to(tl.float32)
                tl.store(inverse + at + key, divisor, mask=done)
            if MAP == "exp":
                tl.store(tops + at + key, top, mask=done)
                tl.store(tops + all_rows + at + key, ties, mask=done)
            tl.store(result + tile * all_rows + at + key, tl.sum(total * d_rows, 1), mask=done)
        if MODE == "dq":
            if WANT_DECAY:
                each = q_mapped.to(tl.float32) * total
                both += each if VECTOR else tl.sum(each, 1)
            share = top
            if MAP == "exp":  # q dq of the whole row: what the maximum gets
                share = tl.load(shared + at + key, mask=inside, other=0.0)
                share = share * eps if NORMALIZE else share
                share /= tl.load(tops + all_rows + at + key, mask=inside, other=1.0)
            total = features_backward(
                total, q_raw.to(tl.float32), top, share, map_scale, MAP, "queries"
            )
            store_rows(result + g * D + here * heads * D, total, key, heads * D, uc, done, D)
        if REVERSE:
            if SCALAR or PACKED:
                u = u.to(tl.float32) * weights[:, None]
            state = product(tl.trans(y), u, state, OPERAND, PRECISION, EXACT)
            if LESS:
                z -= column_sums(u, common, False, OPERAND, PRECISION, "both")

    if REVERSE:
        if VECTOR and not INNER:
            total *= until
        if SCALAR:
            total *= until[:, None]
        if not NORMALIZE:
            total *= scale
    else:
        if INNER:
            y, u = mapped, other
        else:
            y, u = other, mapped
        if VECTOR and INNER:
            y = (y * until).to(OPERAND)
            if some:
                y = tl.where(window[:, None], y, 0.0).to(OPERAND)
        if VECTOR and not INNER:
            u = u.to(tl.float32) * until
            if some:
                u = tl.where(window[:, None], u, 0.0)
        if PACKED:
            state *= joined
            z *= joined
        if SCALAR or PACKED:
            u = u.to(tl.float32) * weights[:, None]
        state = product(tl.trans(y), u, state, OPERAND, PRECISION, EXACT)
        if INNER:
            if NORMALIZE or tile == 0:
                z += column_sums(y, tl.where(own, weights, 0.0), True, OPERAND, PRECISION, KEYS)
        elif LESS:
            z += column_sums(u, tl.where(own, 1.0, 0.0), False, OPERAND, PRECISION, "left")
        if DECAYS:
            state *= fades if VECTOR else carry
            z *= carry
    if MODE == "dq" and WANT_DECAY:
        if VECTOR:
            store_rows(products + (bh * tokens + here) * D, both, key, D, uc, done, D)
        else:
            tl.store(products + tile * all_rows // G + bh * tokens + here + key, both, mask=done)
    if MODE == "dv":
        store_rows(result + here * key_heads * E, total, key, key_heads * E, uc, done, E)
    if MODE == "dk":
        if WANT_DECAY:
            each = mapped.to(tl.float32) * total
            if VECTOR:
                at = (bh * tokens + here) * D
                change = load_rows(products + at, key, D, uc, done, D) - each
                change = tl.where(done[:, None], change, 0.0)
                sums = (
                    through(change, key[:, None] <= key[None, :], OPERAND, PRECISION)
                    + crossing[None, :]
                )
                store_rows(d_log_decay + at, sums, key, D, uc, done, D)
                crossing += column_sums(
                    change, tl.full((C,), 1.0, tl.float32), False, OPERAND, PRECISION, "left"
                )
            else:
                at = tile * all_rows // G + bh * tokens + here + key
                change = tl.load(products + at, mask=done, other=0.0) - tl.sum(each, 1)
                change = tl.where(done, change, 0.0)
                tl.store(d_log_decay + at, tl.cumsum(change, 0, reverse=True) + crossing, mask=done)
                crossing += tl.sum(change, 0)
        nothing = tl.zeros((C,), tl.float32)
        total = features_backward(
            total, raw.to(tl.float32), nothing, nothing, map_scale, MAP, "keys"
        )
        total = tl.where(own[:, None], total, 0.0)
        store_rows(result + here * key_heads * D, total, key, key_heads * D, uc, done, D)
    return state, z, crossing, edge
