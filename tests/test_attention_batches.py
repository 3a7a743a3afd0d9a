"""Many sequences in one call of the Triton kernels are each what they are alone, however the keys are dealt out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from attention_cases import (
    F32,
    KERNEL_DEVICE,
    MARKS_OF_KERNELS,
    Case,
    assert_is_one_softmax,
    grid,
    placed,
    poisoned,
    random_case,
    rope_of,
    space_of,
    with_mask,
)

from pdllm_rag.attention import AttentionState, ChunkTable
from pdllm_rag.attention.split_choice import Tiles
from pdllm_rag.attention.triton import Room, SplitAttention
from pdllm_rag.models.rope import Rope

# int8 buffers with a float32 scale per row and head
Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
DEALS = [  # parts, tiles, masked, with a sequence that keeps some rows only: then no block is read as a whole
    (1, None, False, False),
    (2, Tiles(16, 16, 4, 2), True, True),
    (7, Tiles(32, 16, 4, 2), False, False),
    (7, None, True, False),
    (40, Tiles(16, 32, 4, 2), False, True),
]


def run_together(
    cases: Sequence[Case],
    device: str,
    *,
    n_splits: int | None = None,
    tiles: Tiles | None = None,
    quantised: Quantised | None = None,
) -> list[AttentionState]:
    """Each case's result from one call on all of them, which share k and v; the output's buffer holds NaN before."""
    first = cases[0]
    n_rows = [len(case.q) for case in cases]
    masks = [
        torch.ones(len(case.q), case.table.lens[-1] if case.table.lens else 0, dtype=torch.bool)
        if case.mask is None
        else case.mask
        for case in cases
    ]
    n_kv_heads, head_dim = first.k.shape[1:]
    attention = SplitAttention(
        [case.table for case in cases],
        n_rows,
        n_heads=first.q.shape[1],
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        dtype=first.q.dtype,
        device=torch.device(device),
        rope=Rope(rope_of(head_dim).inv_freq.to(device), 1.0, "test"),
        masks=None if all(case.mask is None for case in cases) else [mask.to(device) for mask in masks],
        n_splits=n_splits,
        tiles=tiles,
    )
    q = torch.cat([case.q for case in cases]).to(device)
    out = torch.full_like(q, torch.nan)
    if quantised is None:
        state = attention(q, first.k.to(device), first.v.to(device), out=out)
    else:
        k, k_scale, v, v_scale = (x.to(device) for x in quantised)
        state = attention(q, k, v, k_scale=k_scale, v_scale=v_scale, out=out)
    assert state.out is out
    lse = state.lse.cpu() * math.log(2)
    return [AttentionState(*parts) for parts in zip(out.cpu().split(n_rows), lse.split(n_rows), strict=True)]


def sequences(dtype: torch.dtype, *, head_dim: int, masked: bool, kept: bool) -> list[Case]:
    """Sequences of one buffer: chunks out of order, overlapping, moved, kept in part, of one row, none at all."""
    some = (tuple(range(0, 30, 2)), (9,), None) if kept else ()
    tables = [
        placed([70, 33, 5], [1, 3, 2], [0, 1, 2]),
        placed([40, 30, 38], [1, 0, 3], [2, 0, 1], [0, 700, 41]),
        ChunkTable((1,), (1,), (0,)),
        ChunkTable((), (), ()),
        ChunkTable((20, 60, 80), (30, 10, 33), (5, 0, 0), some),
        placed([1] * 20, [3] * 20, range(20)),
    ]
    whole = random_case(
        ChunkTable((0,), (120,), (0,)), dtype, n_rows=25, n_kv_heads=2, ratio=3, head_dim=head_dim, seed=11
    )
    k, v = (poisoned(x, union_of(tables)) for x in (whole.k, whole.v))
    queries = whole.q.split([5, 1, 3, 2, 4, 10])
    cases = [Case(q, k, v, table, rope=rope_of(head_dim)) for q, table in zip(queries, tables, strict=True)]
    if masked:
        cases = [case if index in (0, 3) else with_mask(case, seed=index) for index, case in enumerate(cases)]
    return cases


def union_of(tables: Sequence[ChunkTable]) -> ChunkTable:
    """One run that reads every row that some table reads."""
    read = {row for table in tables for index in range(len(table.starts)) for row in table.rows_of(index)}
    return ChunkTable((0,), (max(read) + 1,), (0,), (tuple(sorted(read)),))


@grid(backends=["triton"])
def test_each_sequence_of_a_batch_is_its_own_softmax(backend: str, device: str, dtype: torch.dtype) -> None:
    del backend
    cases = sequences(dtype, head_dim=64, masked=True, kept=True)
    for state, case in zip(run_together(cases, device), cases, strict=True):
        assert_is_one_softmax(state, case)


@grid([F32], backends=["triton"])
@pytest.mark.parametrize(("n_splits", "tiles", "masked", "kept"), DEALS)
def test_a_batch_is_the_same_however_its_keys_are_dealt_out(
    backend: str, device: str, dtype: torch.dtype, n_splits: int, tiles: Tiles | None, masked: bool, kept: bool
) -> None:
    cases = sequences(dtype, head_dim=min(space_of(device, backend).head_dims), masked=masked, kept=kept)
    for state, case in zip(run_together(cases, device, n_splits=n_splits, tiles=tiles), cases, strict=True):
        assert_is_one_softmax(state, case)


@grid([F32], backends=["triton"])
def test_a_sequence_alone_is_the_same_as_among_others(backend: str, device: str, dtype: torch.dtype) -> None:
    """The same parts of the same size, so the same bits."""
    del backend
    cases = sequences(dtype, head_dim=64, masked=False, kept=False)[:2]
    tiles = Tiles(16, 32, 4, 2)
    for together, case in zip(run_together(cases, device, n_splits=1, tiles=tiles), cases, strict=True):
        (alone,) = run_together([case], device, n_splits=1, tiles=tiles)
        assert torch.equal(together.out, alone.out)
        assert torch.equal(together.lse, alone.lse)


@grid(backends=["triton"])
def test_int8_keys_and_values_are_what_their_scales_make_of_them(backend: str, device: str, dtype: torch.dtype) -> None:
    del backend
    cases = sequences(dtype, head_dim=64, masked=True, kept=False)
    shape, union = cases[0].k.shape, union_of([case.table for case in cases])
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randint(-127, 128, (2, *shape), generator=generator).to(torch.int8)
    k_scale, v_scale = (torch.rand(2, *shape[:2], 1, generator=generator) + 0.1) * 0.02
    k_scale, v_scale = poisoned(k_scale, union), poisoned(v_scale, union)
    cases = [case._replace(k=k.double() * k_scale, v=v.double() * v_scale) for case in cases]
    tiles = Tiles(16, 16, 4, 2)
    quantised = (k, k_scale[..., 0].contiguous(), v, v_scale[..., 0].contiguous())
    for state, case in zip(
        run_together(cases, device, n_splits=2, tiles=tiles, quantised=quantised), cases, strict=True
    ):
        assert_is_one_softmax(state, case)


@grid([F32], backends=["triton"])
@pytest.mark.parametrize("n_splits", [1, 3])
def test_tables_that_are_refilled_in_place_are_as_good_as_new(
    backend: str, device: str, dtype: torch.dtype, n_splits: int
) -> None:
    del backend
    first = random_case(placed([90, 40], [1, 2], [1, 0]), dtype, n_rows=9, n_kv_heads=2, ratio=2, head_dim=64, seed=2)
    attention = SplitAttention(
        [first.table],
        [9],
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,
        dtype=dtype,
        device=torch.device(device),
        n_splits=n_splits,
        tiles=Tiles(16, 32, 4, 2),
    )
    attention.reserve(Room(n_rows=9, max_rows=9, n_items=8, n_blocks=16))
    assert_is_one_softmax(rows_of_run(attention, first, device, slice(0, 9)), first)
    for tables, first_rows, n_rows in (
        ([ChunkTable((3,), (80,), (0,)), ChunkTable((94, 100), (2, 33), (0, 0))], [5, 1], [4, 2]),
        ([ChunkTable((120,), (1,), (0,))], [8], [1]),
        ([first.table], [0], [9]),
    ):
        attention.refill(tables, first_rows, n_rows)
        for table, row, count in zip(tables, first_rows, n_rows, strict=True):
            rows = slice(row, row + count)
            case = first._replace(q=first.q[rows], table=table)
            assert_is_one_softmax(rows_of_run(attention, first, device, rows), case)


def rows_of_run(attention: SplitAttention, case: Case, device: str, rows: slice) -> AttentionState:
    """What becomes of some query rows."""
    state = attention(case.q.to(device), case.k.to(device), case.v.to(device))
    return AttentionState(state.out[rows].cpu(), state.lse[rows].cpu() * math.log(2))


@pytest.mark.parametrize("device", [pytest.param(KERNEL_DEVICE, marks=MARKS_OF_KERNELS, id=KERNEL_DEVICE.type)])
def test_layouts_that_the_kernel_cannot_read_are_refused(device: torch.device) -> None:
    q, k = torch.randn(3, 2, 16, device=device), torch.randn(20, 2, 16, device=device)
    shape = {"n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "dtype": torch.float32, "device": device}
    attention = SplitAttention([ChunkTable((0,), (20,), (0,))], [3], **shape)
    apart = torch.randn(20, 4, 16, device=device)[:, :2]
    for keys, values in ((k, apart), (apart, k), (k[:10], k[:10])):
        with pytest.raises(ValueError, match="20 of them"):
            attention(q, keys, values)
    kept = ChunkTable((0,), (20,), (0,), ((1, 2),))
    with pytest.raises(ValueError, match="only some rows"):
        SplitAttention([kept], [3], masks=[torch.ones(3, 20, dtype=torch.bool)], **shape)
