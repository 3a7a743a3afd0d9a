"""Training rows: fixed-size arrays of a few items, their chunks first, then their question blocks.

Axes: B rows of a batch, L positions of a row, P predictions of a row (what is not used of them weighs nothing).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdllm_rag.attention import causal_block
from pdllm_rag.models.spec import ModelSpec
from pdllm_rag.placement import plan_offsets
from pdllm_rag.training.items import Item, Shape
from pdllm_rag.training.noise import Noise
from pdllm_rag.training.visibility import EVERY_CHUNK, Marks

Array = NDArray[np.int32]


class Row(NamedTuple):
    """Items, laid out.

    ids, positions: int32 [L]; masks are in place, what is unused holds EOS.
    sample, chunk, block, sees, order: int32 [L], see `Marks`.
    predicting: int32 [P], the positions whose hidden state predicts.
    targets: int32 [P]; weights: float32 [P].
    """

    ids: Array
    positions: Array
    sample: Array
    chunk: Array
    block: Array
    sees: Array
    order: Array
    predicting: Array
    targets: Array
    weights: NDArray[np.float32]


class Batch(NamedTuple):
    """Rows as tensors: ids, positions int64 [B, L]; marks; predicting, targets int64 [B, P], weights float32 [B, P]."""

    ids: torch.Tensor
    positions: torch.Tensor
    marks: Marks
    predicting: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Batch:
        """Stack rows."""
        stacked = [torch.from_numpy(np.stack(arrays)) for arrays in zip(*rows, strict=True)]
        ids, positions, *marks, predicting, targets, weights = stacked
        return cls(ids.long(), positions.long(), Marks(*marks), predicting.long(), targets.long(), weights)

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        marks = Marks(*(one.to(device, non_blocking=True) for one in self.marks))
        ids, positions, _, *rest = self
        ids, positions, *rest = (one.to(device, non_blocking=True) for one in (ids, positions, *rest))
        return Batch(ids, positions, marks, *rest)


def lay_out(items: Sequence[Item], shape: Shape, spec: ModelSpec, noise: Noise, rng: random.Random) -> Row:
    """Place items one after another, mask what the noise draws, and note what is to be predicted.

    Raises:
        ValueError: they do not fit into a row of that shape.
    """
    row = _Filling(shape, spec)
    for number, item in enumerate(items, start=1):
        row.add(number, item, noise, rng)
    return row.done()


class _Filling:
    """A row that is being filled."""

    def __init__(self, shape: Shape, spec: ModelSpec) -> None:
        self._shape, self._spec, self._causal = shape, spec, causal_block(spec.family)
        self._ids = np.full(shape.row_len, spec.eos_ids[0], dtype=np.int32)
        self._positions, self._sample, self._chunk, self._block, self._order = (
            np.zeros(shape.row_len, dtype=np.int32) for _ in range(5)
        )
        self._sees = np.full(shape.row_len, EVERY_CHUNK, dtype=np.int32)
        self._context, self._canvas, self._n_chunks, self._n_blocks = 0, shape.context_len, 0, 0
        self._predicted: list[tuple[int, int, float]] = []

    def add(self, number: int, item: Item, noise: Noise, rng: random.Random) -> None:
        """Place an item's chunks and blocks."""
        if self._context + item.context_len > self._shape.context_len or (
            self._canvas + item.canvas_len > self._shape.row_len
        ):
            raise ValueError(f"an item of {item.context_len} and {item.canvas_len} positions has no room in the row")
        lens = [len(tokens) for tokens in item.chunks]
        plan = plan_offsets(lens, item.placement, chunk_len=item.slot_len, multiple=self._causal or 1)
        first = self._n_chunks + 1
        for tokens, offset in zip(item.chunks, plan.offsets, strict=True):
            rows = self._put(self._context, tokens, offset, number)
            if item.view == "chunks" or self._n_chunks < first:
                self._n_chunks += 1
            self._chunk[rows] = self._n_chunks
            if item.view == "whole":
                self._block[rows] = self._n_blocks + 1
            self._context = rows.stop
        for one in item.blocks:
            self._n_blocks += 1
            rows = self._put(self._canvas, one.ids, plan.canvas_start, number)
            self._block[rows] = self._n_blocks
            if one.chunk is not None and item.view == "chunks":
                self._sees[rows] = first + one.chunk
            if noise.block_len is not None:
                behind = np.arange(len(one.ids)) - one.prompt_len
                self._order[rows] = np.where(behind < 0, 0, 1 + behind // noise.block_len)
            for row, weight in noise.masks(one, rng):
                self._ids[rows.start + row] = self._spec.mask_id
                self._predicted.append((rows.start + row - self._spec.logit_shift, one.ids[row], weight))
            self._canvas = rows.stop

    def done(self) -> Row:
        """The arrays; predictions beyond the row's room for them are dropped."""
        n = self._shape.predictions
        used = self._predicted[:n] + [(self._shape.context_len, 0, 0.0)] * (n - len(self._predicted))
        predicting, targets, weights = zip(*used, strict=True)
        return Row(
            self._ids, self._positions, self._sample, self._chunk, self._block, self._sees, self._order,
            np.array(predicting, dtype=np.int32), np.array(targets, dtype=np.int32),
            np.array(weights, dtype=np.float32),
        )  # fmt: skip

    def _put(self, start: int, tokens: Sequence[int], position: int, number: int) -> slice:
        rows = slice(start, start + len(tokens))
        self._ids[rows], self._sample[rows] = tokens, number
        self._positions[rows] = np.arange(position, position + len(tokens))
        if self._causal is not None:
            self._order[rows] = self._positions[rows] // self._causal
        return rows
