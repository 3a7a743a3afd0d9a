"""Where the keys that one sequence attends to lie in a flat buffer of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class ChunkTable:
    """Runs of rows, one per split.

    Attributes:
        starts: first row of each run.
        lens: rows of each run, at least 1.
        offsets: positions by which the run's keys still have to be moved; 0 when they are stored where they stand.
        kept: per run the rows that are read, counted from its start, ascending, at least one; None for all of them.
            Empty: every run is read whole. The keys keep the positions that they have in the whole run.
    """

    starts: tuple[int, ...]
    lens: tuple[int, ...]
    offsets: tuple[int, ...]
    kept: tuple[tuple[int, ...] | None, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.starts) == len(self.lens) == len(self.offsets):
            raise ValueError(
                f"chunk table has {len(self.starts)} starts, {len(self.lens)} lens, {len(self.offsets)} offsets; "
                "expected as many of each"
            )
        if any(start < 0 for start in self.starts) or any(length < 1 for length in self.lens):
            raise ValueError(f"chunk table has starts {self.starts} and lens {self.lens}; expected >= 0 and >= 1")
        if self.kept and len(self.kept) != len(self.starts):
            raise ValueError(f"chunk table has kept rows of {len(self.kept)} runs for {len(self.starts)} runs")
        for rows, length in zip(self.kept, self.lens, strict=False):
            if rows is not None and not (
                rows and rows[0] >= 0 and rows[-1] < length and all(a < b for a, b in pairwise(rows))
            ):
                raise ValueError(
                    f"kept rows {rows} of a run of {length} rows; expected ascending rows of it, 1 or more"
                )

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int]]) -> ChunkTable:
        """A table of (start, len, offset) runs; runs of length 0 are left out."""
        kept = [run for run in runs if run[1] > 0]
        return cls(tuple(r[0] for r in kept), tuple(r[1] for r in kept), tuple(r[2] for r in kept))

    def with_last(self, start: int, length: int) -> ChunkTable:
        """The same runs with another last one, read whole, where it stands."""
        kept = (*self.kept[:-1], None) if self.kept else ()
        return ChunkTable((*self.starts[:-1], start), (*self.lens[:-1], length), (*self.offsets[:-1], 0), kept)

    def runs(self) -> Iterable[tuple[int, int, int]]:
        """(start, len, offset) of every split."""
        return zip(self.starts, self.lens, self.offsets, strict=True)

    def rows_of(self, index: int) -> Sequence[int]:
        """Buffer rows of a run that are read."""
        start, length = self.starts[index], self.lens[index]
        rows = self.kept[index] if self.kept else None
        return range(start, start + length) if rows is None else [start + row for row in rows]

    def coalesced(self, *, apart: int = 0) -> ChunkTable:
        """The same rows in the fewest runs: neighbours in the buffer with one offset become one split.

        Args:
            apart: so many of the last runs stay as they are, and so does a run that is not read whole.
        """
        merged: list[tuple[int, int, int]] = []
        kept: list[tuple[int, ...] | None] = []
        n_joined = len(self.starts) - apart
        for index, (start, length, offset) in enumerate(self.runs()):
            rows = self.kept[index] if self.kept else None
            follows = merged and merged[-1][2] == offset and merged[-1][0] + merged[-1][1] == start
            if follows and index < n_joined and rows is None and kept[-1] is None:
                merged[-1] = (merged[-1][0], merged[-1][1] + length, offset)
            else:
                merged.append((start, length, offset))
                kept.append(rows)
        table = ChunkTable.of(merged)
        return ChunkTable(table.starts, table.lens, table.offsets, tuple(kept)) if any(kept) else table
