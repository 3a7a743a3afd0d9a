"""How the keys of several sequences are dealt out to parts that are computed side by side.

A block is up to `block_n` keys that lie one after another (or are named by a list of kept rows); an item is a few
blocks of one sequence under one offset. As many items are made as keep the device's multiprocessors busy; the plan
depends on lengths only, so it is made once per question and holds for every layer and step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdllm_rag.attention.table import ChunkTable

IntArray = NDArray[np.int32]
_Block = tuple[int, int, int, int]
NOWHERE = -1  # no turn; no column of the canvas


@dataclass(frozen=True)
class SplitPlan:
    """Tables that the kernels of `split_kernel` read, int32.

    Attributes:
        items: [I, 12]: first query row, query rows, first block, blocks that are read whole, blocks (those first),
            turn or -1, first partial row, where the sequence's mask begins, the length of its rows, 0, 0, 0.
        blocks: [B, 4]: first key row (or entry of `rows`), keys, masked column of the first key or -1, 0.
        row_items: [N, 4]: the query row's first partial row, its partial results, rows from one to the next, 0.
        rows: key rows of every block, [R], if the tables keep only some; else empty.
        turns: positions that the queries of a turn are moved by, one for each distinct offset other than 0.
        n_part_rows: rows of all items together.
        is_split: whether some sequence has several items, whose results are to be merged.
        max_rows: query rows of the longest sequence.
    """

    items: IntArray
    blocks: IntArray
    row_items: IntArray
    rows: IntArray
    turns: tuple[int, ...]
    n_part_rows: int
    is_split: bool
    max_rows: int


def plan_splits(
    tables: Sequence[ChunkTable],
    n_rows: Sequence[int],
    *,
    block_n: int,
    n_splits: int,
    with_masks: bool = False,
) -> SplitPlan:
    """Deal out the runs of each sequence.

    Args:
        n_rows: query rows of each sequence, which lie one after another.
        block_n: keys of a block.
        n_splits: items of the sequence with most blocks, if it has so many; the others get items of like size.
        with_masks: the last run of each table is masked, so its blocks say which columns they are.
    """
    keeps = any(table.kept for table in tables)
    turns = sorted({offset for table in tables for offset in table.offsets if offset})
    rows: list[int] = []
    segments: list[list[_Segment]] = []  # per sequence
    for table in tables:
        joined = table.coalesced(apart=1 if with_masks else 0)
        own: list[_Segment] = []
        for index, (start, length, offset) in enumerate(joined.runs()):
            is_masked = with_masks and index == len(joined.starts) - 1
            turn = turns.index(offset) if offset else NOWHERE
            if not own or own[-1].turn != turn:
                own.append(_Segment(turn, [], []))
            kept = joined.rows_of(index) if keeps else range(length)
            for begin in range(0, len(kept), block_n):
                n_keys = min(block_n, len(kept) - begin)
                is_full = n_keys == block_n and not keeps and not is_masked
                block = (len(rows) if keeps else start + begin, n_keys, begin if is_masked else NOWHERE, 0)
                (own[-1].full if is_full else own[-1].rest).append(block)
                if keeps:
                    rows.extend(kept[begin : begin + n_keys])
        segments.append(own or [_Segment(NOWHERE, [], [])])
    most = max((sum(len(s.full) + len(s.rest) for s in own) for own in segments), default=0)
    per_item = max(1, -(-most // max(1, n_splits)))

    blocks: list[_Block] = []
    items: list[tuple[int, ...]] = []
    row_items: list[tuple[int, int, int, int]] = []
    part_row = mask_start = 0
    is_split = False
    for first_row, length, table, own in zip(accumulate(n_rows, initial=0), n_rows, tables, segments, strict=False):
        first_item = len(items)
        columns = table.lens[-1] if with_masks and table.lens else 0
        for segment in own:
            for full, rest in segment.shares(per_item):
                place = (len(blocks), len(full), len(full) + len(rest), segment.turn)
                items.append((first_row, length, *place, part_row, mask_start, columns, 0, 0, 0))
                blocks += [*full, *rest]
                part_row += length
        mask_start += length * columns
        is_split |= len(items) - first_item > 1
        first_part = items[first_item][6]
        row_items += [(first_part + row, len(items) - first_item, length, 0) for row in range(length)]
    return SplitPlan(
        items=_array(items, 12),
        blocks=_array(blocks, 4),
        row_items=_array(row_items, 4),
        rows=np.asarray(rows, dtype=np.int32),
        turns=tuple(turns),
        n_part_rows=part_row,
        is_split=is_split,
        max_rows=max(n_rows, default=0),
    )


class _Segment(NamedTuple):
    """Blocks of one sequence that share a turn: those that are read whole, and the rest."""

    turn: int
    full: list[_Block]
    rest: list[_Block]

    def shares(self, per_item: int) -> Iterator[tuple[list[_Block], list[_Block]]]:
        """Its blocks in the fewest items of at most `per_item`, as even as can be; at least one, if an empty one."""
        count = len(self.full) + len(self.rest)
        n_items = max(1, -(-count // per_item))
        for number in range(n_items):
            begin, end = number * count // n_items, (number + 1) * count // n_items
            n_full = len(self.full)
            yield self.full[begin:end], self.rest[max(0, begin - n_full) : max(0, end - n_full)]


def _array(rows: Sequence[tuple[int, ...]], width: int) -> IntArray:
    return np.asarray(rows, dtype=np.int32).reshape(len(rows), width)
