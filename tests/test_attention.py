"""Split-S equals one softmax over the keys of its table, for every backend; tolerances from a float64 oracle."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    BF16,
    F32,
    RATIOS,
    assert_is_one_softmax,
    bounds,
    for_all_cases,
    gathered,
    grid,
    one_softmax,
    placed,
    random_case,
    with_mask,
)

from pdllm_rag.attention import AttentionState, ChunkTable, block_masks, merge, split_s_attention

FLOAT64_ROUNDING = 1e-12


@grid()
def test_any_partition_in_any_order_is_one_softmax(backend: str, device: str, dtype: torch.dtype) -> None:
    for_all_cases(backend, device, dtype, lambda case: assert_is_one_softmax(case.run(backend, device), case))


@grid()
def test_a_mask_hides_keys_of_the_last_split_only(backend: str, device: str, dtype: torch.dtype) -> None:
    for_all_cases(
        backend, device, dtype, lambda case: assert_is_one_softmax(case.run(backend, device), case), masked=True
    )


@grid()
def test_only_the_kept_rows_of_a_run_are_read(backend: str, device: str, dtype: torch.dtype) -> None:
    for_all_cases(
        backend, device, dtype, lambda case: assert_is_one_softmax(case.run(backend, device), case), kept=True
    )


@grid()
def test_an_offset_moves_the_keys_of_its_run_forward(backend: str, device: str, dtype: torch.dtype) -> None:
    """R(p) q over R(o) R(j) k equals R(p - o) q over R(j) k: the oracle moves keys, most backends move the query."""
    for_all_cases(
        backend,
        device,
        dtype,
        lambda case: assert_is_one_softmax(case.run(backend, device), case),
        offsets=True,
        kept=True,
    )


@grid([F32, BF16])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_offsets_hold_for_every_head_dim(backend: str, device: str, dtype: torch.dtype, head_dim: int) -> None:
    table = placed([9, 5, 12], [0, 2, 1], [2, 0, 1], [700, 0, 4096])
    case = random_case(table, dtype, n_rows=3, n_kv_heads=2, ratio=2, head_dim=head_dim, seed=head_dim)
    assert_is_one_softmax(case.run(backend, device), case)
    masked = with_mask(case, seed=1)
    assert_is_one_softmax(masked.run(backend, device), masked)


@grid([F32, BF16])
@pytest.mark.parametrize("n_chunks", [0, 1, 2, 64])
def test_any_number_of_chunks_and_chunks_of_one_row(
    backend: str, device: str, dtype: torch.dtype, n_chunks: int
) -> None:
    lens = [1 + 4 * (index % 3) for index in range(n_chunks)]
    offsets = [17 * (index % 5) for index in range(n_chunks)]
    order = torch.randperm(n_chunks, generator=torch.Generator().manual_seed(n_chunks)).tolist()
    for table in (
        placed(lens, [1] * n_chunks, order),
        placed(lens, [1] * n_chunks, order, offsets),
        placed([1] * n_chunks, [2] * n_chunks, order),
    ):
        case = random_case(table, dtype, n_rows=2, n_kv_heads=2, ratio=2, head_dim=64, seed=n_chunks)
        assert_is_one_softmax(case.run(backend, device), case)


@grid()
def test_no_chunks_give_zeros_and_an_empty_denominator(backend: str, device: str, dtype: torch.dtype) -> None:
    case = random_case(ChunkTable((), (), ()), dtype, n_rows=3, n_kv_heads=2, ratio=2, head_dim=64, seed=0)
    state = case.run(backend, device)
    assert torch.equal(state.out, torch.zeros_like(case.q))
    assert state.lse.isneginf().all()


@grid([F32])
def test_query_heads_share_key_heads_in_every_ratio(backend: str, device: str, dtype: torch.dtype) -> None:
    table = placed([7, 4], [1, 2], [1, 0])
    for ratio in RATIOS if device == "cpu" or backend != "flex" else (1, 7):  # each one is compiled
        case = random_case(table, dtype, n_rows=5, n_kv_heads=2, ratio=ratio, head_dim=64, seed=ratio)
        assert_is_one_softmax(case.run(backend, device), case)


@grid()
@pytest.mark.parametrize("largest_score", [100.0, 1e4])
def test_large_scores_neither_overflow_nor_vanish(
    backend: str, device: str, dtype: torch.dtype, largest_score: float
) -> None:
    table = placed([20, 1, 30], [1, 0, 2], [1, 2, 0])
    case = random_case(table, dtype, n_rows=6, n_kv_heads=2, ratio=2, head_dim=64, seed=7, largest_score=largest_score)
    assert one_softmax(case).lse.abs().max() > largest_score / 2
    assert_is_one_softmax(case.run(backend, device), case)
    masked = with_mask(case, seed=3)
    assert_is_one_softmax(masked.run(backend, device), masked)


@grid()
def test_a_row_that_a_mask_hides_all_from_sees_the_other_splits(backend: str, device: str, dtype: torch.dtype) -> None:
    table = placed([5, 40], [1, 1], [0, 1])
    case = random_case(table, dtype, n_rows=4, n_kv_heads=2, ratio=2, head_dim=64, seed=4)
    mask = torch.rand(4, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[1] = False
    case = case._replace(mask=mask)
    assert_is_one_softmax(case.run(backend, device), case)
    alone = case._replace(table=ChunkTable(table.starts[1:], table.lens[1:], table.offsets[1:]))
    state = alone.run(backend, device)
    assert_is_one_softmax(state, alone)
    assert state.lse.isneginf().all(dim=1).tolist() == [False, True, False, False]


@grid()
def test_keeping_all_rows_is_keeping_nothing_back_and_some_are_those_gathered(
    backend: str, device: str, dtype: torch.dtype
) -> None:
    table = placed([6, 9, 4], [1, 0, 2], [1, 0, 2], [0, 41, 0])
    case = random_case(table, dtype, n_rows=3, n_kv_heads=2, ratio=2, head_dim=64, seed=5)
    out_bound, lse_bound = bounds(case)
    whole = case.run(backend, device)
    full = ChunkTable(table.starts, table.lens, table.offsets, tuple(tuple(range(length)) for length in table.lens))
    kept = case._replace(table=full).run(backend, device)
    assert ((whole.out.double() - kept.out.double()).abs() <= 2 * out_bound).all()
    assert ((whole.lse.double() - kept.lse.double()).abs() <= 2 * lse_bound).all()

    some = ChunkTable(table.starts, table.lens, table.offsets, ((0, 3, 8), None, (3,)))
    case = random_case(some, dtype, n_rows=3, n_kv_heads=2, ratio=2, head_dim=64, seed=5)
    keys, values = gathered(case)  # at their positions
    copied = case._replace(k=keys.to(dtype), v=values.to(dtype), table=ChunkTable((0, 3, 9), (3, 6, 1), (0, 0, 0)))
    kept, copy = case.run(backend, device), copied.run(backend, device)
    out_bound, lse_bound = bounds(case)
    assert ((copy.out.double() - kept.out.double()).abs() <= 2 * out_bound).all()
    assert ((copy.lse.double() - kept.lse.double()).abs() <= 2 * lse_bound).all()


@grid([F32])
def test_rows_may_lie_apart_in_memory(backend: str, device: str, dtype: torch.dtype) -> None:
    case = random_case(placed([6, 9], [1, 2], [1, 0]), dtype, n_rows=3, n_kv_heads=2, ratio=2, head_dim=64, seed=6)
    apart = case._replace(q=wider(case.q), k=wider(case.k), v=wider(case.v))
    assert_is_one_softmax(apart.run(backend, device), case)


def wider(x: torch.Tensor) -> torch.Tensor:
    """x as the first half of wider rows whose other half must not be read."""
    return torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, : x.shape[1]]


@grid([F32])
def test_rows_far_before_a_hidden_key_are_not_disturbed_by_it(backend: str, device: str, dtype: torch.dtype) -> None:
    """A kernel goes through the keys in tiles; here whole tiles are hidden."""
    n = 160 if (backend, device) == ("triton", "cpu") else 1300
    table = ChunkTable((0, 40), (40, n), (0, 0))
    (mask,) = block_masks(torch.arange(n), [n], 4) or []
    case = random_case(table, dtype, n_rows=n, n_kv_heads=2, ratio=2, head_dim=64, seed=2)._replace(mask=mask)
    assert_is_one_softmax(case.run(backend, device), case)


def test_reference_in_float64_is_the_oracle_to_rounding() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(5, 6, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 30, 2, 16, generator=generator, dtype=torch.float64)
    table = ChunkTable((20, 0, 7), (10, 7, 1), (0, 0, 0))
    case = random_case(table, F32, n_rows=5, n_kv_heads=2, ratio=3, head_dim=16, seed=1)._replace(q=q, k=k, v=v)
    for mask in (None, torch.ones(5, 1, dtype=torch.bool), torch.eye(5, 7, dtype=torch.bool)):
        runs = table if mask is None or mask.shape[1] == 1 else ChunkTable((20, 7, 0), (10, 1, 7), (0, 0, 0))
        state = split_s_attention(q, k, v, runs, mask=mask, backend="reference")
        oracle = one_softmax(case._replace(table=runs, mask=mask))
        torch.testing.assert_close(state.out, oracle.out, rtol=0, atol=FLOAT64_ROUNDING)


def test_merging_an_empty_part_changes_nothing() -> None:
    state = AttentionState(torch.randn(3, 2, 4), torch.randn(3, 2))
    empty = AttentionState(torch.zeros(3, 2, 4), torch.full((3, 2), -torch.inf))
    merged = merge([empty, state, empty])
    torch.testing.assert_close(merged.out, state.out)
    torch.testing.assert_close(merged.lse, state.lse)


def test_neighbouring_runs_with_one_offset_are_joined() -> None:
    table = ChunkTable((0, 4, 9, 12), (4, 5, 2, 3), (0, 0, 0, 8))
    assert table.coalesced() == ChunkTable((0, 12), (11, 3), (0, 8))
    assert ChunkTable((0, 4, 9), (4, 5, 2), (0, 0, 0)).coalesced(apart=1) == ChunkTable((0, 9), (9, 2), (0, 0))


def test_a_run_that_is_not_read_whole_is_not_joined() -> None:
    table = ChunkTable((0, 4, 9, 11), (4, 5, 2, 3), (0, 0, 0, 0), (None, None, (0,), None))
    assert table.coalesced() == ChunkTable((0, 9, 11), (9, 2, 3), (0, 0, 0), (None, (0,), None))
    assert [list(table.rows_of(index)) for index in (0, 2)] == [[0, 1, 2, 3], [9]]
