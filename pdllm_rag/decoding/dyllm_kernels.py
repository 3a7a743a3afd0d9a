"""Triton kernels of the DyLLM decoder: what is done for salient rows alone, wherever they are, and how they are found.

Sequences have `n_rows` rows each and `room` for salient ones; N = sequences * n_rows, S = sequences * room. `chosen`
int32 [S] holds the row of N that stands in each place of a sequence's room, those in use first, then -1. `slots` int32
[N] is the row of the key and value buffers, `places` int64 [N] the row of the caches; rows that no canvas has have slot
-1 and share a spare place.

Source: DyLLM (arXiv 2603.08026), the kernels' tasks; the code is our own.
"""

# triton reads these functions' source, and its language has no types that a checker knows
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from pdllm_rag.attention.turn_kernel import _turned


@triton.jit
def renew_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, change_ptr, cos_ptr, sin_ptr, chosen_ptr, slots_ptr, kv_row_stride,
    N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr
):  # fmt: skip
    """One chosen row: its key k [S, G, D], turned, and value v replace the kept ones; change [S, G, D] = v - old v."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(chosen_ptr + index)
    if row < 0:
        return
    dims, heads = tl.arange(0, HEAD_DIM), tl.arange(0, KV_HEADS)
    inside = (heads < N_KV_HEADS)[:, None]
    here = index * N_KV_HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM + dims[None, :]
    kept = tl.load(slots_ptr + row).to(tl.int64) * kv_row_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    cos, sin = tl.load(cos_ptr + row * HEAD_DIM + dims), tl.load(sin_ptr + row * HEAD_DIM + dims)
    k = _turned(k_ptr + index * N_KV_HEADS * HEAD_DIM, heads, dims, inside, cos, sin, HEAD_DIM)
    tl.store(keys_ptr + kept, k.to(keys_ptr.dtype.element_ty), mask=inside)
    v, old = tl.load(v_ptr + here, mask=inside), tl.load(values_ptr + kept, mask=inside)
    tl.store(change_ptr + here, (v.to(tl.float32) - old.to(tl.float32)).to(change_ptr.dtype.element_ty), mask=inside)
    tl.store(values_ptr + kept, v, mask=inside)


@triton.jit
def shift_kernel(
    q_ptr, lse_ptr, keys_ptr, change_ptr, contexts_ptr, out_ptr, chosen_ptr, slots_ptr, places_ptr, scale_log2,
    kv_row_stride, n_rows, room,
    N_HEADS: tl.constexpr, RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """A tile of query rows of one key/value head: out [N, H, D] = kept context + softmax weights at S times change.

    q [N, H, D] turned; lse [N, H] of each row over all its keys, base 2; contexts [places, H * D].
    """
    tile, group, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = packed // RATIO < n_rows
    row = (sequence * n_rows + packed // RATIO).to(tl.int64)
    head = group * RATIO + packed % RATIO
    dims, columns = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_N)
    here = (row * N_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    is_present = is_row & (tl.load(slots_ptr + row, mask=is_row, other=-1) >= 0)  # the lse of others is anything
    q = tl.load(q_ptr + here, mask=is_present[:, None], other=0.0)
    lse = tl.load(lse_ptr + row * N_HEADS + head, mask=is_present, other=0.0)
    place = tl.load(places_ptr + row, mask=is_present, other=0)
    kept = contexts_ptr + (place * N_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    acc = tl.load(kept, mask=is_present[:, None], other=0.0).to(tl.float32)
    n_kv_heads = N_HEADS // RATIO
    for start in range(0, room, BLOCK_N):
        first = sequence * room + start
        if tl.load(chosen_ptr + first) >= 0:
            chosen = tl.load(chosen_ptr + first + columns, mask=start + columns < room, other=-1)
            is_key = chosen >= 0
            slot = tl.load(slots_ptr + chosen, mask=is_key, other=0).to(tl.int64)
            key = keys_ptr + slot[:, None] * kv_row_stride + group * HEAD_DIM + dims[None, :]
            moved = change_ptr + ((first + columns).to(tl.int64) * n_kv_heads + group)[:, None] * HEAD_DIM + dims
            k = tl.load(key, mask=is_key[:, None], other=0.0)
            change = tl.load(moved, mask=is_key[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            weights = tl.where(is_key[None, :], tl.exp2(scores - lse[:, None]), 0.0)
            acc = tl.dot(weights.to(change.dtype), change, acc, input_precision="ieee")
    tl.store(out_ptr + here, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def compare_kernel(
    out_ptr, exact_ptr, contexts_ptr, compared_ptr, exact_of_ptr, places_ptr, bias_ptr, rank_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: its context [N, WIDTH] is the exact one [S, WIDTH] if it has one; kept; rank = cosine + bias, [N].

    exact_of int32 [N], -1 for none. A context that is no number ranks as if turned around.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    exact = tl.load(exact_of_ptr + row).to(tl.int64)
    place = tl.load(places_ptr + row)
    new = tl.load(out_ptr + row * WIDTH + columns, mask=inside, other=0.0)
    if exact >= 0:
        new = tl.load(exact_ptr + exact * WIDTH + columns, mask=inside, other=0.0)
    old = tl.load(compared_ptr + place * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    wide = new.to(tl.float32)
    norms = tl.maximum(tl.sqrt(tl.sum(wide * wide, 0)), 1e-8) * tl.maximum(tl.sqrt(tl.sum(old * old, 0)), 1e-8)
    similarity = tl.sum(wide * old, 0) / norms
    similarity = tl.where(similarity == similarity, similarity, -2.0)
    tl.store(rank_ptr + row, similarity + tl.load(bias_ptr + row))
    tl.store(out_ptr + row * WIDTH + columns, new, mask=inside)
    tl.store(contexts_ptr + place * WIDTH + columns, new, mask=inside)  # after the sums: it may be where `old` was


@triton.jit
def pick_kernel(
    rank_ptr, chosen_ptr, take_ptr, exact_of_ptr, rooms_ptr, counts_ptr, tau, n_rows, room, BLOCK: tl.constexpr
):  # fmt: skip
    """Some rows of one sequence: each finds its place by counting the rows that rank before it.

    Of the rows that rank below `tau` the first rooms[sequence] are chosen; take int32 [S] is `chosen` with some row of
    the sequence instead of -1; counts int32 [2]: chosen rows, and those below tau for which there was no room.
    """
    block, sequence = tl.program_id(0), tl.program_id(1)
    rows, others = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    inside = rows < n_rows
    own = tl.load(rank_ptr + sequence * n_rows + rows, mask=inside, other=float("inf"))
    n_before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_rows, BLOCK):
        other = tl.load(rank_ptr + sequence * n_rows + start + others, mask=start + others < n_rows, other=float("inf"))
        is_tie = (other[None, :] == own[:, None]) & ((start + others)[None, :] < rows[:, None])
        n_before += tl.sum(((other[None, :] < own[:, None]) | is_tie).to(tl.int32), 1)
    salient = inside & (own < tau)
    has_room = n_before < tl.load(rooms_ptr + sequence)
    picked = salient & has_room
    place = sequence * room + n_before
    has_place = inside & (n_before < room)
    row = sequence * n_rows + rows
    tl.store(chosen_ptr + place, tl.where(picked, row, -1), mask=has_place)
    tl.store(take_ptr + place, tl.where(picked, row, sequence * n_rows), mask=has_place)
    tl.store(exact_of_ptr + row, tl.where(picked, place, -1), mask=inside)
    tl.atomic_add(counts_ptr, tl.sum(picked.to(tl.int32), 0))
    tl.atomic_add(counts_ptr + 1, tl.sum((salient & ~has_room).to(tl.int32), 0))


@triton.jit
def keep_kernel(
    new_ptr, outputs_ptr, context_ptr, reference_ptr, chosen_ptr, places_ptr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_REFERENCE: tl.constexpr
):  # fmt: skip
    """One chosen row: outputs [places, HIDDEN] = new [S, HIDDEN]; the reference becomes its context [N, WIDTH]."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(chosen_ptr + index).to(tl.int64)
    if row < 0:
        return
    place = tl.load(places_ptr + row)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    new = tl.load(new_ptr + index * HIDDEN + columns, mask=inside)
    tl.store(outputs_ptr + place * HIDDEN + columns, new, mask=inside)
    if HAS_REFERENCE:
        context = tl.load(context_ptr + row * WIDTH + columns, mask=columns < WIDTH)
        tl.store(reference_ptr + place * WIDTH + columns, context, mask=columns < WIDTH)
