"""Split-S in two launches for any number of sequences: keys are read where they lie, parts side by side.

`SplitAttention` is made once per set of tables and then called for each layer and step; `triton` is the same behind
`split_s_attention`, for one call. On a machine without a GPU the kernels run in Triton's interpreter
(`TRITON_INTERPRET=1`), which is for tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from pdllm_rag.attention.merge import AttentionState
from pdllm_rag.attention.split_choice import Tiles, choose
from pdllm_rag.attention.split_plan import SplitPlan, plan_splits
from pdllm_rag.attention.table import ChunkTable
from pdllm_rag.models.fused import overlap
from pdllm_rag.models.rope import Rope

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (16, 32, 64, 128, 256)


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot run here, or None."""
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install 'pdllm-rag[gpu]')"
    if device.type != "cuda" and not is_interpreted():
        return f"the device is {device.type}; triton needs a CUDA device, or TRITON_INTERPRET=1 for its interpreter"
    if dtype not in DTYPES:
        return f"the dtype is {dtype}; expected one of {', '.join(map(str, DTYPES))}"
    if head_dim not in HEAD_DIMS:
        return f"heads have {head_dim} elements; expected one of {', '.join(map(str, HEAD_DIMS))}"
    return None


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class Room(NamedTuple):
    """How much the tables of one `SplitAttention` may hold, so that they can be refilled in place.

    n_rows: query rows; max_rows: of one sequence; n_items and n_blocks: of all sequences.
    """

    n_rows: int
    max_rows: int
    n_items: int
    n_blocks: int


class SplitAttention:
    """Attention of several sequences' query rows over the runs of their tables.

    Args:
        tables: per sequence; offsets need `rope`.
        n_rows: query rows of each sequence, which lie one after another in q.
        n_heads, n_kv_heads, head_dim, dtype, device: of queries and keys.
        masks: per sequence bool [rows, rows of its last run], or None for all of them.
        n_splits, tiles: instead of the choice by shapes.

    Raises:
        ValueError: the kernels cannot run here.
    """

    def __init__(
        self,
        tables: Sequence[ChunkTable],
        n_rows: Sequence[int],
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        rope: Rope | None = None,
        masks: Sequence[torch.Tensor] | None = None,
        n_splits: int | None = None,
        tiles: Tiles | None = None,
    ) -> None:
        reason = why_not(device, dtype, head_dim)
        if reason is not None:
            raise ValueError(f"backend 'triton' cannot run: {reason}; ask for 'reference'")
        self._n_heads, self._n_kv_heads, self._head_dim = n_heads, n_kv_heads, head_dim
        self._ratio = n_heads // n_kv_heads
        self._device, self._dtype = device, dtype
        self._out: torch.Tensor | None = None
        chosen = choose(
            device,
            dtype,
            head_dim,
            n_kv_heads,
            [rows * self._ratio for rows in n_rows],
            max((sum(table.lens) for table in tables), default=0),
        )
        self.tiles, self.n_splits = tiles or chosen.tiles, n_splits or chosen.n_splits
        plan = self._plan(tables, n_rows, masks)
        self._tables = KernelTables.of(plan, device, rope, masks)
        self._room = Room(sum(n_rows), plan.max_rows, len(plan.items), len(plan.blocks))
        self._is_split = plan.is_split
        self._make_parts(plan.n_part_rows, int(plan.row_items[:, 1].max(initial=1)))

    def reserve(self, room: Room) -> None:
        """Make the tables as large as `room`, so that `refill` never has to move them.

        Raises:
            ValueError: there are masks, or the present tables do not fit.
        """
        old = self._tables
        if old.has_mask or old.has_rows or old.has_turns:
            raise ValueError("tables with masks, kept rows or offsets cannot be refilled; make a SplitAttention anew")

        def grown(table: torch.Tensor, n_rows: int) -> torch.Tensor:
            if len(table) > n_rows:
                raise ValueError(f"tables of {len(table)} rows do not fit room for {n_rows}")
            return F.pad(table.view(len(table), -1), (0, 0, 0, n_rows - len(table)))

        self._tables = old._replace(
            items=grown(old.items, room.n_items),
            blocks=grown(old.blocks, room.n_blocks),
            row_items=grown(old.row_items, room.n_rows),
        )
        self._room = room
        self._is_split = self.n_splits > 1
        self._out = torch.zeros(room.n_rows, self._n_heads, self._head_dim, dtype=self._dtype, device=self._device)
        self._make_parts(room.n_items * room.max_rows, self.n_splits)

    def refill(self, tables: Sequence[ChunkTable], first_rows: Sequence[int], n_rows: Sequence[int]) -> None:
        """Other tables, in the place of the present ones: a captured graph goes on with them.

        Args:
            first_rows: first query row of each sequence; rows of no sequence come out as anything.

        Raises:
            ValueError: they do not fit what was reserved.
        """
        plan = self._plan(tables, n_rows, None)
        room = self._room
        if (
            plan.turns
            or len(plan.rows)
            or len(plan.items) > room.n_items
            or len(plan.blocks) > room.n_blocks
            or plan.max_rows > room.max_rows
            or max((a + b for a, b in zip(first_rows, n_rows, strict=True)), default=0) > room.n_rows
        ):
            raise ValueError(
                f"tables with {len(plan.items)} items, {len(plan.blocks)} blocks, {plan.max_rows} rows, offsets "
                f"{plan.turns} and {len(plan.rows)} kept rows do not fit {room}, which has no offsets and keeps all"
            )
        items = np.zeros((room.n_items, plan.items.shape[1]), np.int32)
        items[: len(plan.items)] = plan.items
        row_items = np.zeros((room.n_rows, plan.row_items.shape[1]), np.int32)
        moved = dict(zip(accumulate(n_rows, initial=0), first_rows, strict=False))  # planned first row: the real one
        items[: len(plan.items), 0] = [moved[row] for row in plan.items[:, 0]]
        if not self._is_split:
            items[: len(plan.items), 6] = items[: len(plan.items), 0]
        taken = 0
        for first, count in zip(first_rows, n_rows, strict=True):
            row_items[first : first + count] = plan.row_items[taken : taken + count]
            taken += count
        self._tables.items.copy_(torch.from_numpy(items))
        self._tables.row_items.copy_(torch.from_numpy(row_items))
        self._tables.blocks[: len(plan.blocks)].copy_(torch.from_numpy(plan.blocks))

    def _tiled(self, rows: torch.Tensor) -> Any:
        """[S, G, D] as a matrix [S, G * D] that is fetched by tiles of one block and head."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape = [rows.shape[0], self._n_kv_heads * self._head_dim]
        return TensorDescriptor(rows, shape, [rows.stride(0), 1], [self.tiles.block_n, self._head_dim])

    def _plan(
        self, tables: Sequence[ChunkTable], n_rows: Sequence[int], masks: Sequence[torch.Tensor] | None
    ) -> SplitPlan:
        if masks is not None and any(table.kept and table.kept[-1] is not None for table in tables):
            raise ValueError("a mask on a run of which only some rows are kept; expected the whole run there")
        self._last_row = max((start + length for table in tables for start, length, _ in table.runs()), default=0)
        return plan_splits(
            tables, n_rows, block_n=self.tiles.block_n, n_splits=self.n_splits, with_masks=masks is not None
        )

    def _make_parts(self, n_part_rows: int, max_parts: int) -> None:
        from triton import next_power_of_2

        room = self._room
        self._grid = (-(-room.max_rows * self._ratio // self.tiles.block_m), self._n_kv_heads, room.n_items)
        shape = (n_part_rows if self._is_split else 1, self._n_heads)
        self._parts = torch.empty(*shape, self._head_dim, dtype=torch.float32, device=self._device)
        self._part_lse = torch.empty(shape, dtype=torch.float32, device=self._device)
        self._max_parts = next_power_of_2(max(2, min(32, max_parts)))

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> AttentionState:
        """out [N, H, D] in q's dtype; lse [N, H] in base 2.

        Args:
            q: [N, H, D], heads and their elements next to each other.
            k, v: [S, G, D] of one layer, of q's dtype, or int8 with `k_scale`, `v_scale` float32 [S, G].
                v None: see `lse`.
        """
        from pdllm_rag.attention import split_kernel

        last_row, has_out = self._last_row, v is not None
        v = k if v is None else v
        if k.stride(0) != v.stride(0) or not all(part[:1].is_contiguous() for part in (q, k, v)) or len(k) < last_row:
            raise ValueError(
                f"got q, k and v of strides {q.stride()}, {k.stride()}, {v.stride()} and {len(k)} key rows; "
                f"expected heads next to each other, rows equally far apart in k and v, and {last_row} of them"
            )
        out = self._out if out is None else out
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        tables = self._tables
        split_kernel.split_kernel[self._grid](
            q,
            self._tiled(k),
            self._tiled(v),
            k,
            v,
            tables.turns if k_scale is None else k_scale,
            tables.turns if v_scale is None else v_scale,
            self._parts if self._is_split else out,
            self._part_lse if self._is_split else lse,
            tables.items,
            tables.blocks,
            tables.turns,
            tables.rows,
            tables.mask,
            math.log2(math.e) / math.sqrt(self._head_dim),
            q.stride(0),
            k.stride(0),
            N_HEADS=self._n_heads,
            RATIO=self._ratio,
            HEAD_DIM=self._head_dim,
            BLOCK_M=self.tiles.block_m,
            BLOCK_N=self.tiles.block_n,
            HAS_TURNS=tables.has_turns,
            HAS_ROWS=tables.has_rows,
            HAS_MASK=tables.has_mask,
            IS_INT8=k.dtype == torch.int8,
            HAS_OUT=has_out,
            UPCAST=is_interpreted() and q.dtype == torch.bfloat16,
            **overlap(q.device),
            num_warps=self.tiles.warps,
            num_stages=self.tiles.stages,
        )
        if self._is_split:
            split_kernel.merge_kernel[(self._room.n_rows, self._n_heads)](
                self._parts,
                self._part_lse,
                out,
                lse,
                tables.row_items,
                N_HEADS=self._n_heads,
                HEAD_DIM=self._head_dim,
                MAX_PARTS=self._max_parts,
                HAS_OUT=has_out,
                **overlap(q.device),
                num_warps=2,
            )
        return AttentionState(out, lse)

    def lse(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The lse [N, H] of a call, in base 2, for which no value is read."""
        return self(q, k, None).lse


class KernelTables(NamedTuple):
    """A plan on the device."""

    items: torch.Tensor
    blocks: torch.Tensor
    row_items: torch.Tensor
    rows: torch.Tensor
    turns: torch.Tensor
    mask: torch.Tensor
    has_turns: bool
    has_rows: bool
    has_mask: bool

    @classmethod
    def of(
        cls, plan: SplitPlan, device: torch.device, rope: Rope | None, masks: Sequence[torch.Tensor] | None
    ) -> KernelTables:
        """Copies of the plan's arrays, and what the turns and masks come to."""
        nothing = torch.zeros(1, dtype=torch.int32, device=device)

        def on_device(array: object) -> torch.Tensor:
            tensor = torch.as_tensor(array)
            return tensor.to(device) if tensor.numel() else nothing

        if plan.turns and rope is None:
            raise ValueError("chunk table has offsets but no rope was given; pass the model's rope")
        turns = torch.zeros(1, dtype=torch.float32, device=device)
        if plan.turns and rope is not None:
            angles = -rope.inv_freq[None, :] * torch.tensor(plan.turns, device=rope.inv_freq.device)[:, None]
            angles = torch.cat((angles, angles), dim=-1)
            turns = torch.stack((angles.cos(), angles.sin()), dim=1).to(device, torch.float32).contiguous()
        mask = nothing
        if masks is not None:
            mask = torch.cat([one.reshape(-1).to(device, torch.uint8) for one in masks])
        return cls(
            on_device(plan.items),
            on_device(plan.blocks),
            on_device(plan.row_items),
            on_device(plan.rows),
            turns,
            mask,
            bool(plan.turns),
            len(plan.rows) > 0,
            masks is not None,
        )


def triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: ChunkTable,
    *,
    rope: Rope | None,
    mask: torch.Tensor | None,
) -> AttentionState:
    """As `split_s_attention`, for the devices, dtypes and head dims that `why_not` allows."""
    attention = SplitAttention(
        [table],
        [q.shape[0]],
        n_heads=q.shape[1],
        n_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        dtype=q.dtype,
        device=q.device,
        rope=rope,
        masks=None if mask is None else [mask],
    )
    out, lse = attention(q.contiguous(), k, v)
    return AttentionState(out, lse * math.log(2))
