"""The Triton kernels of Split-S: partial softmaxes over parts of the keys, and their merge.

One program holds a tile of query rows of one key/value head and goes through one part of the keys ("item"). The query
heads that share the key/value head are packed into the tile's rows, so each key is read once for all of them. Keys and
values are read where they lie: an item is a list of blocks, a block is up to `BLOCK_N` rows from some first row on.
Full blocks come first and are fetched by the tensor memory accelerator, without masks; what is left (the end of a run,
the rows of a masked canvas, lists of kept rows) goes through masked loads.

Axes: N packed query rows, H query heads, G key/value heads, D head dim, P partial rows (rows of all items).
"""

# triton reads these functions' source, and its language has no types that a checker knows
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from pdllm_rag.models.fused_kernels import wait_for_inputs


@triton.jit
def _add_block(
    q, k, v, visible, best, total, acc, k_scale, v_scale, scale_log2,
    MASKED: tl.constexpr, IS_INT8: tl.constexpr, HAS_OUT: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Running softmax (best [M], total [M], with `HAS_OUT` acc [M, D]) with one more block of keys, in base 2."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if IS_INT8:
        scores *= k_scale[None, :]
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * scale_log2)
    anchor = new_best
    if MASKED:  # a row may see no key of this block, nor of those before
        anchor = tl.where(new_best == -float("inf"), 0.0, new_best)
    weights = tl.exp2(scores * scale_log2 - anchor[:, None])
    fade = tl.exp2(best - anchor)
    total = total * fade + tl.sum(weights, 1)
    if IS_INT8:
        weights *= v_scale[None, :]
    if HAS_OUT:
        acc = tl.dot(weights.to(DTYPE).to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return new_best, total, acc


@triton.jit
def split_kernel(
    q_ptr,
    k_tiles,
    v_tiles,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    lse_ptr,
    items_ptr,
    blocks_ptr,
    turns_ptr,
    rows_ptr,
    mask_ptr,
    scale_log2,
    q_row_stride,
    kv_row_stride,
    N_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TURNS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_OUT: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attention of one tile of query rows over the blocks of one item.

    q [N, H, D]; k, v [S, G, D], heads next to each other (int8: with scales float32 [S, G]), also as `k_tiles` and
    `v_tiles`, descriptors of [S, G * D] with tiles of [BLOCK_N, D]; out [P, H, D] and lse [P, H], base 2, if the items
    are parts, else out [N, H, D]. turns float32 [T, 2, D]: cos and sin that a query is turned by.
    HAS_OUT: without, only lse is computed and no value is read.
    UPCAST: products of float32 copies, since Triton's interpreter multiplies no bfloat16; the values are the same.
    """
    if OVERLAPS:
        wait_for_inputs()
    tile, group, item = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = items_ptr + item * 12
    first_row, n_rows = tl.load(fields), tl.load(fields + 1)
    if tile * BLOCK_M >= n_rows * RATIO:
        return
    first_block, n_full, n_blocks = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = packed // RATIO
    head = group * RATIO + packed % RATIO
    is_row = row < n_rows
    dims = tl.arange(0, HEAD_DIM)
    q_base = q_ptr + (first_row + row).to(tl.int64) * q_row_stride + head * HEAD_DIM
    q = tl.load(q_base[:, None] + dims[None, :], mask=is_row[:, None], other=0.0)
    if HAS_TURNS:
        turn = tl.load(fields + 5)
        if turn >= 0:
            swapped = (dims + HEAD_DIM // 2) % HEAD_DIM
            other = tl.load(q_base[:, None] + swapped[None, :], mask=is_row[:, None], other=0.0)
            cos = tl.load(turns_ptr + turn * 2 * HEAD_DIM + dims)
            sin = tl.load(turns_ptr + turn * 2 * HEAD_DIM + HEAD_DIM + dims)
            sign = tl.where(dims < HEAD_DIM // 2, -1.0, 1.0)
            turned = q.to(tl.float32) * cos[None, :] + other.to(tl.float32) * (sign * sin)[None, :]
            q = turned.to(q.dtype)
    if UPCAST:
        q = q.to(tl.float32)

    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    columns = tl.arange(0, BLOCK_N)
    n_kv_heads = N_HEADS // RATIO
    k_scale, v_scale = best, best  # overwritten where there are scales
    for index in range(first_block, first_block + n_full):
        key_row = tl.load(blocks_ptr + index * 4)
        k = k_tiles.load([key_row, group * HEAD_DIM])
        v = k
        if HAS_OUT:
            v = v_tiles.load([key_row, group * HEAD_DIM])
        if IS_INT8:
            k_scale = tl.load(k_scale_ptr + (key_row + columns) * n_kv_heads + group)
            v_scale = tl.load(v_scale_ptr + (key_row + columns) * n_kv_heads + group)
        best, total, acc = _add_block(
            q, k, v, None, best, total, acc, k_scale, v_scale, scale_log2, False, IS_INT8, HAS_OUT,
            q_ptr.dtype.element_ty
        )  # fmt: skip
    if HAS_MASK:
        mask_base = mask_ptr + tl.load(fields + 7) + row * tl.load(fields + 8)
    for index in range(first_block + n_full, first_block + n_blocks):
        block = blocks_ptr + index * 4
        is_key = columns < tl.load(block + 1)
        if HAS_ROWS:
            key_row = tl.load(rows_ptr + tl.load(block) + columns, mask=is_key, other=0)
        else:
            key_row = tl.load(block) + columns
        key_base = key_row.to(tl.int64) * kv_row_stride + group * HEAD_DIM
        k = tl.load(k_ptr + key_base[:, None] + dims[None, :], mask=is_key[:, None], other=0.0)
        v = k
        if HAS_OUT:
            v = tl.load(v_ptr + key_base[:, None] + dims[None, :], mask=is_key[:, None], other=0.0)
        if IS_INT8:
            k_scale = tl.load(k_scale_ptr + key_row * n_kv_heads + group, mask=is_key, other=0.0)
            v_scale = tl.load(v_scale_ptr + key_row * n_kv_heads + group, mask=is_key, other=0.0)
        visible = is_row[:, None] & is_key[None, :]
        if HAS_MASK:  # of the canvas alone: elsewhere every key is seen
            first_column = tl.load(block + 2)
            is_canvas = is_row & (first_column + 0 * row >= 0)
            seen = tl.load(
                mask_base[:, None] + (first_column + columns)[None, :],
                mask=is_canvas[:, None] & is_key[None, :],
                other=1,
            )
            visible = visible & (seen != 0)
        best, total, acc = _add_block(
            q, k, v, visible, best, total, acc, k_scale, v_scale, scale_log2, True, IS_INT8, HAS_OUT,
            q_ptr.dtype.element_ty
        )  # fmt: skip

    safe = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, -float("inf"), best + tl.log2(safe))
    out_row = tl.load(fields + 6) + row
    if HAS_OUT:
        acc = acc / safe[:, None]
        out_base = out_ptr + out_row.to(tl.int64) * (N_HEADS * HEAD_DIM) + head * HEAD_DIM
        tl.store(out_base[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
    tl.store(lse_ptr + out_row * N_HEADS + head, lse, mask=is_row)


@triton.jit
def merge_kernel(
    parts_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    row_items_ptr,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    HAS_OUT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One row and head: its partial results, weighted by exp2(lse - max), as one. A row without items gets zeros.

    HAS_OUT: without, only the lse of the parts is merged.

    row_items int32 [N, 4]: first partial row, partial results, rows from one to the next, unused.
    """
    if OVERLAPS:
        wait_for_inputs()
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, HEAD_DIM)
    first_part = tl.load(row_items_ptr + row * 4)
    n_parts = tl.load(row_items_ptr + row * 4 + 1)
    step = tl.load(row_items_ptr + row * 4 + 2)
    best = -float("inf")
    total = 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, n_parts, MAX_PARTS):
        parts = start + tl.arange(0, MAX_PARTS)
        is_part = parts < n_parts
        part_row = first_part + parts * step
        lse = tl.load(part_lse_ptr + part_row * N_HEADS + head, mask=is_part, other=-float("inf"))
        new_best = tl.maximum(best, tl.max(lse, 0))
        anchor = tl.where(new_best == -float("inf"), 0.0, new_best)
        weight = tl.exp2(lse - anchor)
        fade = tl.exp2(best - anchor)
        total = total * fade + tl.sum(weight, 0)
        if HAS_OUT:
            values = tl.load(
                parts_ptr + (part_row.to(tl.int64) * N_HEADS + head)[:, None] * HEAD_DIM + dims[None, :],
                mask=is_part[:, None],
                other=0.0,
            )
            acc = acc * fade + tl.sum(values * weight[:, None], 0)
        best = new_best
    safe = tl.where(total == 0.0, 1.0, total)
    if HAS_OUT:
        tl.store(out_ptr + (row * N_HEADS + head) * HEAD_DIM + dims, (acc / safe).to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + row * N_HEADS + head, tl.where(total == 0.0, -float("inf"), best + tl.log2(safe)))
