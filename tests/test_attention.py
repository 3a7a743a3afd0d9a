"""Split-S equals one softmax over the concatenated keys, for every backend; tolerances from a float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdllm_rag.attention import BACKENDS, AttentionState, ChunkTable, block_masks, merge, split_s_attention
from pdllm_rag.models.rope import Rope

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def one_softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: ChunkTable, mask: torch.Tensor | None = None
) -> AttentionState:
    """The oracle: gather every row of the table, one float64 softmax, no splits."""
    rows = torch.cat([torch.arange(start, start + length) for start, length, _ in table.runs()])
    group = q.shape[1] // k.shape[1]
    keys = k[rows].double().repeat_interleave(group, dim=1)
    values = v[rows].double().repeat_interleave(group, dim=1)
    scores = torch.einsum("lhd,thd->lht", q.double(), keys) / math.sqrt(q.shape[2])
    if mask is not None:
        scores[..., -mask.shape[1] :].masked_fill_(~mask[:, None], -torch.inf)
    return AttentionState(torch.einsum("lht,thd->lhd", scores.softmax(-1), values), scores.logsumexp(-1))


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ChunkTable]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    n_kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7]))
    head_dim = draw(st.sampled_from([8, 16, 64]))
    lens = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(lens), max_size=len(lens)))
    runs, row = [], 0
    for length, gap in zip(lens, gaps, strict=True):
        runs.append((row + gap, length, 0))
        row += gap + length
    order = draw(st.permutations(runs))
    n_rows = draw(st.integers(1, 17))
    q = torch.randn(n_rows, n_kv * ratio, head_dim, generator=generator) * 2
    k = torch.randn(row, n_kv, head_dim, generator=generator)
    v = torch.randn(row, n_kv, head_dim, generator=generator)
    return q, k, v, ChunkTable.of(order)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_any_partition_in_any_order_is_one_softmax(
    backend: str, dtype: torch.dtype, problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, ChunkTable]
) -> None:
    q, k, v, table = problem
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    oracle = one_softmax(q, k, v, table)
    state = split_s_attention(q, k, v, table, backend=backend)
    assert state.out.dtype == dtype
    torch.testing.assert_close(state.out.double(), oracle.out, rtol=0, atol=TOLERANCE[dtype] * float(v.abs().max()))
    torch.testing.assert_close(state.lse.double(), oracle.lse, rtol=0, atol=max(1e-4, TOLERANCE[dtype]))


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(problem=problems(), seed=st.integers(0, 99))
def test_a_mask_hides_keys_of_the_last_split_only(
    backend: str, dtype: torch.dtype, problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, ChunkTable], seed: int
) -> None:
    q, k, v, table = problem
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    mask = torch.rand(len(q), table.lens[-1], generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[:, seed % table.lens[-1]] = True
    oracle = one_softmax(q, k, v, table, mask)
    state = split_s_attention(q, k, v, table, mask=mask, backend=backend)
    torch.testing.assert_close(state.out.double(), oracle.out, rtol=0, atol=TOLERANCE[dtype] * float(v.abs().max()))
    torch.testing.assert_close(state.lse.double(), oracle.lse, rtol=0, atol=max(1e-4, TOLERANCE[dtype]))


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_rows_far_before_a_hidden_key_are_not_disturbed_by_it(backend: str) -> None:
    """A kernel goes through the keys in tiles; here whole tiles are hidden."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1300, 2, 8, generator=generator)
    k, v = torch.randn(2, 1340, 1, 8, generator=generator)
    table = ChunkTable((0, 40), (40, 1300), (0, 0))
    (mask,) = block_masks(torch.arange(1300), [1300], 4) or []
    state, oracle = split_s_attention(q, k, v, table, mask=mask, backend=backend), one_softmax(q, k, v, table, mask)
    torch.testing.assert_close(state.out.double(), oracle.out, rtol=0, atol=2e-5 * float(v.abs().max()))
    torch.testing.assert_close(state.lse.double(), oracle.lse, rtol=0, atol=1e-4)


def test_reference_in_float64_is_the_oracle_to_rounding() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(5, 6, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 30, 2, 16, generator=generator, dtype=torch.float64)
    table = ChunkTable((20, 0, 7), (10, 7, 1), (0, 0, 0))
    for mask in (None, torch.ones(5, 1, dtype=torch.bool), torch.eye(5, 7, dtype=torch.bool)):
        runs = table if mask is None or mask.shape[1] == 1 else ChunkTable((20, 7, 0), (10, 1, 7), (0, 0, 0))
        state = split_s_attention(q, k, v, runs, mask=mask, backend="reference")
        oracle = one_softmax(q, k, v, runs, mask)
        torch.testing.assert_close(state.out, oracle.out, rtol=0, atol=TOLERANCE[torch.float64])


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_no_splits_give_zeros_and_an_empty_denominator(backend: str) -> None:
    q, k = torch.randn(3, 4, 8), torch.randn(5, 2, 8)
    state = split_s_attention(q, k, k, ChunkTable((), (), ()), backend=backend)
    assert torch.equal(state.out, torch.zeros_like(q))
    assert torch.isneginf(state.lse).all()


def test_merging_an_empty_part_changes_nothing() -> None:
    state = AttentionState(torch.randn(3, 2, 4), torch.randn(3, 2))
    empty = AttentionState(torch.zeros(3, 2, 4), torch.full((3, 2), -torch.inf))
    merged = merge([empty, state, empty])
    torch.testing.assert_close(merged.out, state.out)
    torch.testing.assert_close(merged.lse, state.lse)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_moving_the_query_back_equals_moving_the_keys_forward(backend: str) -> None:
    """R(p) q over R(o) R(j) k equals R(p - o) q over R(j) k."""
    steps = torch.arange(0, 16, 2) / 16
    rope = Rope(1.0 / 10000.0**steps, 1.0, "test")
    q, k, v = torch.randn(4, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    keys = torch.cat([rope.shift(k[:5], 700), rope.shift(k[5:], 41)])
    moved = split_s_attention(q, keys, v, ChunkTable((0, 5), (5, 7), (0, 0)), backend=backend)
    left = split_s_attention(q, k, v, ChunkTable((0, 5), (5, 7), (700, 41)), rope=rope, backend=backend)
    torch.testing.assert_close(left.out, moved.out, rtol=0, atol=2e-5)
    torch.testing.assert_close(left.lse, moved.lse, rtol=0, atol=2e-5)


def test_neighbouring_runs_with_one_offset_are_joined() -> None:
    table = ChunkTable((0, 4, 9, 12), (4, 5, 2, 3), (0, 0, 0, 8))
    assert table.coalesced() == ChunkTable((0, 12), (11, 3), (0, 8))
    assert ChunkTable((0, 4, 9), (4, 5, 2), (0, 0, 0)).coalesced(apart=1) == ChunkTable((0, 9), (9, 2), (0, 0))


def test_a_named_backend_never_falls_back() -> None:
    q, k = torch.randn(1, 2, 8, dtype=torch.float64), torch.randn(4, 2, 8, dtype=torch.float64)
    table = ChunkTable((0,), (4,), (0,))
    with pytest.raises(ValueError, match="'flash' runs"):
        split_s_attention(q, k, k, table, backend="flash")
    with pytest.raises(ValueError, match="unknown"):
        split_s_attention(q, k, k, table, backend="flash3")


def test_wrong_shapes_and_tables_are_refused() -> None:
    q, k = torch.randn(1, 4, 8), torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match="beyond the buffer"):
        split_s_attention(q, k, k, ChunkTable((2,), (3,), (0,)))
    with pytest.raises(ValueError, match="no rope"):
        split_s_attention(q, k, k, ChunkTable((0,), (3,), (1,)))
    with pytest.raises(ValueError, match="multiple of G"):
        split_s_attention(torch.randn(1, 3, 8), k, k, ChunkTable((0,), (3,), (0,)))
    with pytest.raises(ValueError, match="1 query rows by the last of"):
        split_s_attention(q, k, k, ChunkTable((0,), (3,), (0,)), mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="as many of each"):
        ChunkTable((0,), (), (0,))
