"""What the tests of attention share: where backends run, random cases, a float64 oracle and bounds taken from the data.

Rows of the buffers that a case's table does not read hold NaN, infinity or 1e30: a backend that touches them shows it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pdllm_rag.attention import AttentionState, ChunkTable, split_s_attention
from pdllm_rag.models.rope import Rope, rotate

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALVES = (F16, BF16)
RUNS = {
    "cpu": {"reference": (F32, *HALVES), "flash": (F32, BF16), "flex": (F32, *HALVES), "triton": (F32, *HALVES)},
    "cuda": {"reference": (F32, *HALVES), "flash": HALVES, "flex": (F32, *HALVES), "triton": (F32, *HALVES)},
}
HAS_CUDA = torch.cuda.is_available()
KERNEL_DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")  # on a CPU the kernels are interpreted
NEEDS_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU"))
INTERPRETED_HERE = pytest.mark.skipif(
    HAS_CUDA or sys.platform != "linux", reason="Triton's kernels are interpreted on Linux without a GPU"
)
# from the interpreter of triton up to 3.6, which needs a numpy before 2.4
OF_INTERPRETER = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar")
MARKS_OF_KERNELS = list(NEEDS_CUDA) if HAS_CUDA else [INTERPRETED_HERE, OF_INTERPRETER]  # on KERNEL_DEVICE


def grid(dtypes: Sequence[torch.dtype] = (F32, *HALVES), backends: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrises a test by every (backend, device, dtype) that runs, those on CUDA marked `gpu`."""
    cells = []
    for device, of_device in RUNS.items():
        for backend in backends or of_device:
            on_cpu = [INTERPRETED_HERE, OF_INTERPRETER] if backend == "triton" else []
            marks = list(NEEDS_CUDA) if device == "cuda" else on_cpu
            for dtype in (dtype for dtype in dtypes if dtype in of_device[backend]):
                name = f"{backend}-{device}-{str(dtype).removeprefix('torch.')}"
                cells.append(pytest.param(backend, device, dtype, marks=marks, id=name))
    return pytest.mark.parametrize(("backend", "device", "dtype"), cells)


class Space(NamedTuple):
    """Sizes that random cases are drawn from, and how many cases."""

    n_kv_heads: tuple[int, ...]
    ratios: tuple[int, ...]
    head_dims: tuple[int, ...]
    max_rows: int
    max_len: int
    n_cases: int


RATIOS = (1, 2, 3, 4, 7, 8)
WIDE = Space((1, 2, 3), RATIOS, (8, 16, 20, 64), max_rows=17, max_len=40, n_cases=30)
SPACES = {
    ("cpu", "flex"): WIDE._replace(n_cases=6),  # traced anew for most shapes
    ("cpu", "triton"): Space((1, 2), RATIOS, (16, 64), max_rows=6, max_len=150, n_cases=5),  # interpreted
    # on a GPU most choices of heads are a kernel to compile
    ("cuda", "reference"): Space((2,), (1, 7), (64, 128), max_rows=200, max_len=300, n_cases=6),
    ("cuda", "flash"): Space((2,), (1, 7), (64, 128), max_rows=200, max_len=300, n_cases=6),
    ("cuda", "flex"): Space((2,), (2,), (64,), max_rows=100, max_len=300, n_cases=4),
    ("cuda", "triton"): Space((2,), (1, 7), (64, 128), max_rows=200, max_len=300, n_cases=6),
}


def space_of(device: str, backend: str) -> Space:
    return SPACES.get((device, backend), WIDE)


class Case(NamedTuple):
    """Queries, buffers and a table, on the CPU; k and v may be float64 values that the backend gets in another form."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: ChunkTable
    mask: torch.Tensor | None = None
    rope: Rope | None = None

    def run(self, backend: str, device: str) -> AttentionState:
        """The backend's result, brought back to the CPU."""
        q, k, v, mask = (x if x is None else x.to(device) for x in (self.q, self.k, self.v, self.mask))
        assert q is not None
        assert k is not None
        assert v is not None
        rope = self.rope and Rope(self.rope.inv_freq.to(device), 1.0, "test")
        out, lse = split_s_attention(q, k, v, self.table, rope=rope, mask=mask, backend=backend)
        return AttentionState(out.cpu(), lse.cpu())


def rope_of(head_dim: int) -> Rope:
    return Rope(1.0 / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim), 1.0, "test")


def placed(lens: Sequence[int], gaps: Sequence[int], order: Sequence[int], offsets: Sequence[int] = ()) -> ChunkTable:
    """A table of runs that lie one after another with gaps between, named in another order."""
    runs, row = [], 0
    for length, gap, offset in zip(lens, gaps, offsets or [0] * len(lens), strict=True):
        runs.append((row + gap, length, offset))
        row += gap + length
    return ChunkTable.of([runs[index] for index in order])


def random_case(
    table: ChunkTable,
    dtype: torch.dtype,
    *,
    n_rows: int,
    n_kv_heads: int,
    ratio: int,
    head_dim: int,
    seed: int,
    largest_score: float | None = None,
) -> Case:
    """Normal q, k, v; `largest_score` is about how large a score may get (ordinarily some 10)."""
    generator = torch.Generator().manual_seed(seed)
    n_stored = max((start + length for start, length, _ in table.runs()), default=0) + 2
    q = torch.randn(n_rows, n_kv_heads * ratio, head_dim, generator=generator) * 2
    k = torch.randn(n_stored, n_kv_heads, head_dim, generator=generator)
    v = torch.randn(n_stored, n_kv_heads, head_dim, generator=generator)
    if largest_score is not None:
        q = q * (largest_score / 6)  # the largest is some three times as large as their deviation, which is 2
    return Case(q.to(dtype), poisoned(k, table).to(dtype), poisoned(v, table).to(dtype), table, rope=rope_of(head_dim))


def poisoned(x: torch.Tensor, table: ChunkTable) -> torch.Tensor:
    """x with what must not be read in every row that the table does not read."""
    untouched = torch.ones(len(x), dtype=torch.bool)
    for index in range(len(table.starts)):
        untouched[list(table.rows_of(index))] = False
    poison = torch.tensor([torch.nan, 1e30, torch.inf]).repeat(len(x))[: len(x)].to(x.dtype)
    return torch.where(untouched[:, None, None], poison[:, None, None], x)


@st.composite
def tables(draw: st.DrawFn, space: Space, *, offsets: bool = False, kept: bool = False) -> ChunkTable:
    """One to five runs in any order, with gaps between some."""
    lens = draw(st.lists(st.integers(1, space.max_len), min_size=1, max_size=5))
    n = len(lens)
    gaps = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    moves = draw(st.lists(st.sampled_from([0, 1, 41, 700, -3]), min_size=n, max_size=n)) if offsets else []
    table = placed(lens, gaps, draw(st.permutations(range(n))), moves)
    if not kept:
        return table
    keeps = [
        draw(st.none() | st.sets(st.integers(0, length - 1), min_size=1).map(lambda rows: tuple(sorted(rows))))
        for length in table.lens
    ]
    return ChunkTable(table.starts, table.lens, table.offsets, tuple(keeps))


def for_all_cases(
    backend: str,
    device: str,
    dtype: torch.dtype,
    check: Callable[[Case], None],
    *,
    offsets: bool = False,
    kept: bool = False,
    masked: bool = False,
) -> None:
    """Calls `check` with random cases, the same ones each time."""
    space = space_of(device, backend)
    phases = list(Phase) if space is WIDE else [Phase.generate]  # elsewhere a search for a smaller case takes minutes

    @settings(max_examples=space.n_cases, phases=phases, deadline=None, derandomize=True, database=None)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        table = data.draw(tables(space, offsets=offsets, kept=kept))
        seed = data.draw(st.integers(0, 2**16))
        case = random_case(
            table,
            dtype,
            n_rows=data.draw(st.integers(1, space.max_rows)),
            n_kv_heads=data.draw(st.sampled_from(space.n_kv_heads)),
            ratio=data.draw(st.sampled_from(space.ratios)),
            head_dim=data.draw(st.sampled_from(space.head_dims)),
            seed=seed,
        )
        if masked:
            case = with_mask(case, seed=seed)
        check(case)

    run()


def with_mask(case: Case, *, seed: int) -> Case:
    """A case whose rows see half of the last run; some rows may see none of it."""
    shape = (len(case.q), case.table.lens[-1])
    return case._replace(mask=torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5)


def gathered(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [T, G, D]: the keys that the table reads, at their positions, and the values."""
    keys, values = [case.k[:0].double()], [case.v[:0].double()]
    for index, offset in enumerate(case.table.offsets):
        rows = list(case.table.rows_of(index))
        keys.append(case.k[rows].double())
        values.append(case.v[rows].double())
        if offset:
            assert case.rope is not None
            angles = (case.rope.inv_freq * offset).repeat(2).double()  # a position's angle is a float32 by definition
            keys[-1] = rotate(keys[-1], angles.cos(), angles.sin())
    return torch.cat(keys), torch.cat(values)


def one_softmax(case: Case) -> AttentionState:
    """The oracle: gather every row that the table reads, move its keys, one float64 softmax, no splits."""
    keys, values = (x.repeat_interleave(case.q.shape[1] // x.shape[1], dim=1) for x in gathered(case))
    scores = torch.einsum("lhd,thd->lht", case.q.double(), keys) / math.sqrt(case.q.shape[2])
    if case.mask is not None:
        scores[..., len(keys) - case.mask.shape[1] :].masked_fill_(~case.mask[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
    return AttentionState(torch.einsum("lht,thd->lhd", weights, values), lse)


def bounds(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """How far out [L, H, 1] and lse [L, H] may be off for q's dtype, from the data.

    u and u32 are the unit roundoffs of q's dtype and of float32. A score is a sum of D products, at most
    s = |q| max|k| / sqrt(D), with float32 rounding errors that add like a random walk, then scaled, made a power of 2
    and reduced by a maximum: (sqrt(D) + 4) u32 s. Moving queries or keys rounds them to the dtype once more: u s, and
    in float32 a few u32 s. An lse adds the rounding of a sum over n keys, of logarithms and of the merge. A weight
    exp(score - lse) is off by a factor exp(error of the score + error of the lse). Weights, a part's output and the
    output are each rounded to the dtype: 3 u, relative to the largest value. A kernel may sum the rounded weights, or
    have exponentials that are no better: u more in the lse. Triton's interpreter cuts bfloat16 off instead of rounding.
    """
    u, u32 = torch.finfo(case.q.dtype).eps / 2, torch.finfo(F32).eps / 2
    if case.q.dtype == BF16 and not HAS_CUDA:
        u *= 2
    keys, values = gathered(case)
    group = case.q.shape[1] // keys.shape[1]
    longest = keys.norm(dim=-1).amax(dim=0).repeat_interleave(group) if len(keys) else torch.zeros(1).double()
    head_dim, n_keys = case.q.shape[2], len(keys)
    size = case.q.double().norm(dim=-1) * longest / math.sqrt(head_dim)
    score_error = (math.sqrt(head_dim) + 4) * u32 * size
    if any(case.table.offsets):
        score_error += (u + 4 * u32) * size
    lse_error = score_error + u32 * (4 * size + math.sqrt(n_keys) + 8) + u
    largest = values.abs().amax(dim=(0, 2)).repeat_interleave(group) if len(values) else torch.zeros(1).double()
    out_error = largest * (torch.expm1(score_error + lse_error) + 3 * u)
    return out_error[..., None], lse_error


def assert_is_one_softmax(state: AttentionState, case: Case) -> None:
    """The state is the oracle's within the bounds; rows that see nothing are exact."""
    oracle, (out_bound, lse_bound) = one_softmax(case), bounds(case)
    assert state.out.dtype == case.q.dtype
    assert state.lse.dtype == F32
    assert state.out.shape == case.q.shape
    assert state.lse.shape == case.q.shape[:2]
    blind = oracle.lse.isneginf()
    assert torch.equal(state.lse.isneginf(), blind)
    assert not state.out[blind].any()
    out_error = (state.out.double() - oracle.out).abs()
    lse_error = (state.lse.double() - oracle.lse).masked_fill(blind, 0.0).abs()
    assert (out_error <= out_bound).all(), f"out is off by {(out_error / out_bound).max():.3g} times the bound"
    assert (lse_error <= lse_bound).all(), f"lse is off by {(lse_error / lse_bound).max():.3g} times the bound"
