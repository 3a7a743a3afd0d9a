"""Chunk KV gathered for the sequences of one forward pass, with room for each one's canvas.

The context of a question does not change over its denoising steps, so it is copied once into one buffer, each chunk
rotated to where it stands on the way; a step then reads one contiguous run. (The rotation can also be left to the
query: a table with offsets gives the same attention, see `attention.split_s_attention`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from pdllm_store import ChunkKV

from pdllm_rag.attention import ChunkTable
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.placement import Placement


class SequenceLayout(NamedTuple):
    """Where one sequence's keys lie.

    table: its chunks, then its canvas.
    canvas_row: first buffer row of its canvas.
    n_rows: canvas rows.
    canvas_start: position of the first canvas row.
    """

    table: ChunkTable
    canvas_row: int
    n_rows: int
    canvas_start: int

    def positions(self) -> torch.Tensor:
        """int64 [n_rows] positions of the canvas rows."""
        return torch.arange(self.canvas_start, self.canvas_start + self.n_rows)

    def slots(self) -> torch.Tensor:
        """int32 [n_rows] buffer rows of the canvas rows."""
        return torch.arange(self.canvas_row, self.canvas_row + self.n_rows, dtype=torch.int32)

    def windowed(self, window: range) -> SequenceLayout:
        """The same with a part of the canvas as its canvas, and the rows before and after it as two more runs."""
        first, after = self.canvas_row + window.start, self.canvas_row + window.stop
        runs = [*self.table.runs()][:-1]
        runs += [(self.canvas_row, window.start, 0), (after, self.n_rows - window.stop, 0), (first, len(window), 0)]
        return SequenceLayout(ChunkTable.of(runs), first, len(window), self.canvas_start + window.start)


@dataclass(frozen=True, eq=False)
class Context:
    """Buffers k, v [Y, S, G, D] and one layout per sequence.

    masks: per sequence bool [n_rows, n_rows], which canvas row sees which, instead of what the model's blocks say.
    """

    k: torch.Tensor
    v: torch.Tensor
    sequences: tuple[SequenceLayout, ...]
    masks: Sequence[torch.Tensor] | None = None

    def side_by_side(self, copies: int) -> Context:
        """The same buffers with every canvas cut into `copies` equal ones over the same chunks, copy after copy."""
        layouts = []
        for copy in range(copies):
            for layout in self.sequences:
                n_rows = layout.n_rows // copies
                first = layout.canvas_row + copy * n_rows
                table = layout.table.with_last(first, n_rows)
                layouts.append(layout._replace(table=table, canvas_row=first, n_rows=n_rows))
        return Context(self.k, self.v, tuple(layouts))

    def windowed(self, kept: Sequence[int], windows: Sequence[range]) -> Context:
        """The same buffers for some of the sequences, a part of each canvas to be computed (see `SequenceLayout`)."""
        layouts = [self.sequences[index].windowed(window) for index, window in zip(kept, windows, strict=True)]
        return Context(self.k, self.v, tuple(layouts))

    def narrowed(self, kept: Sequence[int], canvas_lens: Sequence[int]) -> Context:
        """The same buffers for some of the sequences, with canvases of other lengths within their room."""
        layouts = []
        for index, n_rows in zip(kept, canvas_lens, strict=True):
            layout = self.sequences[index]
            if n_rows > layout.n_rows:
                raise ValueError(f"canvas of {n_rows} rows in a context with room for {layout.n_rows}")
            table = layout.table.with_last(layout.canvas_row, n_rows)
            layouts.append(layout._replace(table=table, n_rows=n_rows))
        return Context(self.k, self.v, tuple(layouts))


class Placed(NamedTuple):
    """What one sequence attends to: chunks in document order and where they stand."""

    chunks: tuple[ChunkKV, ...]
    placement: Placement


def rows_needed(placed: Sequence[Placed], canvas_lens: Sequence[int]) -> int:
    """Buffer rows of chunks and canvases."""
    return sum(canvas_lens) + sum(chunk.k.shape[1] for one in placed for chunk in one.chunks)


def buffers(backbone: Backbone, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised k and v [Y, n_rows, G, D]."""
    shape = (backbone.n_layers, n_rows, backbone.n_kv_heads, backbone.head_dim)
    k = torch.empty(shape, dtype=backbone.dtype, device=backbone.device)
    return k, torch.empty_like(k)


@torch.inference_mode()
def gather(
    placed: Sequence[Placed],
    canvas_lens: Sequence[int],
    backbone: Backbone,
    *,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Context:
    """Copy chunks into one buffer, sequence after sequence, each followed by room for its canvas.

    Args:
        placed: per sequence its chunks [Y, T, G, D] (any float dtype) and their placement.
        canvas_lens: canvas rows per sequence.
        backbone: gives shape, dtype and device of the buffers; keys are rotated in float32 and rounded once.
        into: k and v [Y, S, G, D] with rows enough (`rows_needed`), instead of new ones.
    """
    rope, device = backbone.rope, backbone.device
    k, v = buffers(backbone, rows_needed(placed, canvas_lens)) if into is None else into
    sequences, row = [], 0
    for one, canvas_len in zip(placed, canvas_lens, strict=True):
        runs = []
        for chunk, offset in zip(one.chunks, one.placement.offsets, strict=True):
            length = chunk.k.shape[1]
            k[:, row : row + length] = rope.shift(chunk.k.to(device), offset) if offset else chunk.k
            v[:, row : row + length] = chunk.v
            runs.append((row, length, 0))
            row += length
        table = ChunkTable.of([*runs, (row, canvas_len, 0)])
        sequences.append(SequenceLayout(table, row, canvas_len, one.placement.canvas_start))
        row += canvas_len
    return Context(k, v, tuple(sequences))
