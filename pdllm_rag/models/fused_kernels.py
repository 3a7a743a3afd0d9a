"""Triton kernels for what stands between the matrix products of a layer, each one pass over its rows.

Rounding follows the library's modules: a norm is computed in float32, cast, and then multiplied by its weight; the
activated gate is cast before it is multiplied.
"""

# triton reads these functions' source, and its language has no types that a checker knows
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_inputs():
    """For a kernel that is launched while the one before it ends: wait for that one's results, let the next one start.

    Source: CUDA, programmatic dependent launch (compute capability 9.0).
    """
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def add_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, normed_ptr, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """One row: sum = x + delta (with `ADDS`), normed = RMSNorm(sum) * weight."""
    if OVERLAPS:
        wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * WIDTH + columns, mask=inside, other=0.0)
    if ADDS:
        delta = tl.load(delta_ptr + row * WIDTH + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * WIDTH + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = (wide * scale).to(normed_ptr.dtype.element_ty)
    normed = (normed.to(tl.float32) * weight.to(tl.float32)).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * WIDTH + columns, normed, mask=inside)


@triton.jit
def head_norm_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, eps, row_stride, N_HEADS: tl.constexpr, N_NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """One row of packed q, k, v heads, in place: RMSNorm of every query and key head, each kind with its weight."""
    row = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS), tl.arange(0, HEAD_DIM)
    inside = (heads < N_NORMED)[:, None]
    place = qkv_ptr + row * row_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
    q_weight, k_weight = tl.load(q_weight_ptr + dims), tl.load(k_weight_ptr + dims)
    weight = tl.where((heads < N_HEADS)[:, None], q_weight[None, :], k_weight[None, :]).to(tl.float32)
    normed = (x * scale[:, None]).to(qkv_ptr.dtype.element_ty).to(tl.float32)
    tl.store(place, (normed * weight).to(qkv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Part of one row: silu(gate) * up, from [gate | up] side by side."""
    if OVERLAPS:
        wait_for_inputs()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (active * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def propose_kernel(
    logits_ptr, parts_ptr, best_ptr, row_stride, n_tokens, mask_id, N_PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Part of one row of logits: its largest value, the first token that has it, and the sum of exp(logit - largest).

    parts float32 [rows, N_PARTS, 2]: largest and sum; best int32 [rows, N_PARTS]. The mask's own logit and those from
    `n_tokens` on are left out.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    counts = (columns < n_tokens) & (columns != mask_id)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=counts, other=-float("inf")).to(tl.float32)
    is_nan = tl.max((logits != logits).to(tl.int32), 0) > 0
    largest = tl.max(logits, 0)
    first = tl.min(tl.where(logits == largest, columns, 2147483647), 0)
    anchor = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp(logits - anchor), 0)
    total = tl.where(is_nan, float("nan"), total)
    place = row * N_PARTS + part
    tl.store(parts_ptr + place * 2, largest)
    tl.store(parts_ptr + place * 2 + 1, total)
    tl.store(best_ptr + place, first)


@triton.jit
def propose_merge_kernel(parts_ptr, best_ptr, out_ptr, N_PARTS: tl.constexpr, PARTS: tl.constexpr):
    """One row of all parts. out int32 [rows, 3]: token, and the bits of float32 confidence and log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    inside = parts < N_PARTS
    largest = tl.load(parts_ptr + (row * N_PARTS + parts) * 2, mask=inside, other=-float("inf"))
    totals = tl.load(parts_ptr + (row * N_PARTS + parts) * 2 + 1, mask=inside, other=0.0)
    first = tl.load(best_ptr + row * N_PARTS + parts, mask=inside, other=2147483647)
    best = tl.max(largest, 0)
    anchor = tl.where(best == -float("inf"), 0.0, best)
    total = tl.sum(totals * tl.exp(largest - anchor), 0)
    token = tl.min(tl.where(largest == best, first, 2147483647), 0)
    tl.store(out_ptr + row * 3, token)
    tl.store(out_ptr + row * 3 + 1, tl.exp(-tl.log(total)).to(tl.int32, bitcast=True))
    tl.store(out_ptr + row * 3 + 2, (anchor + tl.log(total)).to(tl.int32, bitcast=True))
