"""Where the keys that one sequence attends to lie in a flat buffer of rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkTable:
    """Runs of rows, one per split.

    Attributes:
        starts: first row of each run.
        lens: rows of each run, at least 1.
        offsets: positions by which the run's keys still have to be moved; 0 when they are stored where they stand.
    """

    starts: tuple[int, ...]
    lens: tuple[int, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.starts) == len(self.lens) == len(self.offsets):
            raise ValueError(
                f"chunk table has {len(self.starts)} starts, {len(self.lens)} lens, {len(self.offsets)} offsets; "
                "expected as many of each"
            )
        if any(start < 0 for start in self.starts) or any(length < 1 for length in self.lens):
            raise ValueError(f"chunk table has starts {self.starts} and lens {self.lens}; expected >= 0 and >= 1")

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int]]) -> ChunkTable:
        """A table of (start, len, offset) runs; runs of length 0 are left out."""
        kept = [run for run in runs if run[1] > 0]
        return cls(tuple(r[0] for r in kept), tuple(r[1] for r in kept), tuple(r[2] for r in kept))

    def runs(self) -> Iterable[tuple[int, int, int]]:
        """(start, len, offset) of every split."""
        return zip(self.starts, self.lens, self.offsets, strict=True)

    def coalesced(self, *, apart: int = 0) -> ChunkTable:
        """The same rows in the fewest runs: neighbours in the buffer with one offset become one split.

        Args:
            apart: so many of the last runs stay as they are.
        """
        merged: list[tuple[int, int, int]] = []
        n_joined = len(self.starts) - apart
        for index, (start, length, offset) in enumerate(self.runs()):
            follows = merged and merged[-1][2] == offset and merged[-1][0] + merged[-1][1] == start
            if follows and index < n_joined:
                merged[-1] = (merged[-1][0], merged[-1][1] + length, offset)
            else:
                merged.append((start, length, offset))
        return ChunkTable.of(merged)
