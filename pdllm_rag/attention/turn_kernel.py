"""The Triton kernel that turns queries and keys to their positions and puts keys and values where they belong."""

# triton reads these functions' source, and its language has no types that a checker knows
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from pdllm_rag.models.fused_kernels import wait_for_inputs


@triton.jit
def _turned(base, heads, dims, inside, cos, sin, HEAD_DIM: tl.constexpr):
    """float32 [heads, D] at `base`, turned in the half-rotation layout."""
    swapped = (dims + HEAD_DIM // 2) % HEAD_DIM
    x = tl.load(base + heads[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(base + heads[:, None] * HEAD_DIM + swapped[None, :], mask=inside, other=0.0).to(tl.float32)
    sign = tl.where(dims < HEAD_DIM // 2, -1.0, 1.0)
    return x * cos[None, :] + (other * sign[None, :]) * sin[None, :]


@triton.jit
def turn_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_row_stride,
    k_row_stride,
    v_row_stride,
    out_row_stride,
    N_HEADS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    COPIES_V: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One row. q_out [N, H, D]; k_out, v_out [S, G, D], written at row slots[n], not at all if that is -1."""
    if OVERLAPS:
        wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    cos, sin = tl.load(cos_ptr + row * HEAD_DIM + dims), tl.load(sin_ptr + row * HEAD_DIM + dims)
    heads = tl.arange(0, HEADS)
    inside = (heads < N_HEADS)[:, None]
    q = _turned(q_ptr + row * q_row_stride, heads, dims, inside, cos, sin, HEAD_DIM)
    q_out = q_out_ptr + row * N_HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(q_out, q.to(q_out_ptr.dtype.element_ty), mask=inside)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    kv_heads = tl.arange(0, KV_HEADS)
    is_kept = ((kv_heads < N_KV_HEADS) & (slot + 0 * kv_heads >= 0))[:, None]
    place = slot * out_row_stride + kv_heads[:, None] * HEAD_DIM + dims[None, :]
    k = _turned(k_ptr + row * k_row_stride, kv_heads, dims, is_kept, cos, sin, HEAD_DIM)
    tl.store(k_out_ptr + place, k.to(k_out_ptr.dtype.element_ty), mask=is_kept)
    if COPIES_V:
        v_place = v_ptr + row * v_row_stride + kv_heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(v_out_ptr + place, tl.load(v_place, mask=is_kept, other=0.0), mask=is_kept)
