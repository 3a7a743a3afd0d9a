"""What one pass of the DyLLM decoder computes of each canvas: decided on the host, from the schedule and the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import torch

from pdllm_rag.decoding.base import Canvas


class PassKind(Enum):
    """Which rows a pass is over: FULL and WHOLE all of a canvas, RESPONSE those that predict or hold the answer.

    FULL computes them all anew in every layer; the others do so for salient rows.
    """

    FULL = "full"
    WHOLE = "whole"
    RESPONSE = "response"


@dataclass(frozen=True)
class DyLLMOptions:
    """When a row counts as salient, and which passes look at which rows.

    Attributes:
        tau: a row is salient in a layer if the cosine between its attention contexts is below this; above 1 every row
            is, None takes the family's (`TAUS`).
        similarity: the context is compared with that of the "previous" pass, as published, or with that of the pass
            that last computed the row anew in this layer ("refresh"), so that slow drift is noticed.
        union_committed: rows whose token was just committed are salient in every layer, not in the first one only.
        full_steps: so many first passes are full; so is the first one of every further answer block.
        whole_every: every so many passes one is over the question's rows as well; 1 for all of them.
        refresh_every: every so many passes one is full; 1 for all of them, None for none.
        capacity: most rows that are computed anew in a layer, as a share of a sequence's rows in the pass (the least
            similar ones; just committed ones always); None for no bound. A bound fixes the shapes, so that a GPU needs
            no word from the host between layers. With tau 2 it is the share.
    """

    tau: float | None = None
    similarity: Literal["previous", "refresh"] = "previous"
    union_committed: bool = True
    full_steps: int = 4
    whole_every: int = 4
    refresh_every: int | None = None
    capacity: float | None = None

    def __post_init__(self) -> None:
        if self.tau is not None and not 0 < self.tau <= 2:
            raise ValueError(f"tau is {self.tau}; expected above 0, 2 at most, or None")
        if self.similarity not in ("previous", "refresh"):
            raise ValueError(f"similarity is {self.similarity!r}; expected 'previous' or 'refresh'")
        if self.capacity is not None and not 0 < self.capacity <= 1:
            raise ValueError(f"capacity is {self.capacity}; expected a share above 0, 1 at most, or None")
        for name in ("full_steps", "whole_every", "refresh_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected 1 or more")

    def kind(self, number: int) -> PassKind:
        """Of the pass of this number, from 0."""
        refreshed = self.refresh_every is not None and number % self.refresh_every == 0
        if number < self.full_steps or refreshed:
            return PassKind.FULL
        return PassKind.WHOLE if number % self.whole_every == 0 else PassKind.RESPONSE

    def room(self, n_rows: int) -> int:
        """Most rows of `n_rows` that are computed anew in a layer."""
        return n_rows if self.capacity is None else math.ceil(self.capacity * n_rows)


class Part(NamedTuple):
    """What a pass computes of one canvas.

    first: its first canvas row that is in the pass; all later ones are.
    start: bool [n rows], computed anew in the first layer's keys and values.
    forced: bool [n rows], salient in every layer.
    room: most salient rows of a layer.
    """

    first: int
    start: torch.Tensor
    forced: torch.Tensor
    room: int

    @property
    def n_rows(self) -> int:
        """Rows in the pass."""
        return len(self.start)


class PassRecord(NamedTuple):
    """What one forward pass computed.

    kind: by the schedule.
    canvas_rows: rows of all canvases, which static-KV decoding computes in each pass.
    rows: those that were in the pass.
    recomputed: rows with a new feed-forward output, mean over the layers.
    left_out: rows that were salient and for which there was no room, mean over the layers.
    """

    kind: PassKind
    canvas_rows: int
    rows: int
    recomputed: float
    left_out: float

    @property
    def share(self) -> float:
        """Of the canvas rows that were computed anew."""
        return self.recomputed / self.canvas_rows


class Plan:
    """The passes of one decode.

    Args:
        shift: rows by which a prediction stands before its token: that many rows of the question predict the answer.
    """

    def __init__(self, options: DyLLMOptions, n_sequences: int, shift: int) -> None:
        self.options, self.shift = options, shift
        self._seen = [torch.zeros(0, dtype=torch.int64)] * n_sequences
        self._n_passes = 0

    def next(self, active: Sequence[int], canvases: Sequence[Canvas]) -> tuple[PassKind, list[Part]]:
        """The kind of the next pass, and its part of each active canvas; a canvas that has grown is computed whole."""
        kind = self.options.kind(self._n_passes)
        self._n_passes += 1
        parts = []
        for index, canvas in zip(active, canvases, strict=True):
            seen, self._seen[index] = self._seen[index], canvas.ids.clone()
            if kind is PassKind.FULL or len(seen) < len(canvas.ids):
                everything = torch.ones(len(canvas.ids), dtype=torch.bool)
                parts.append(Part(0, everything, everything, len(canvas.ids)))
                continue
            first = canvas.prompt_len - self.shift if kind is PassKind.RESPONSE else 0
            changed = (seen != canvas.ids)[first:]
            forced = changed if self.options.union_committed else torch.zeros_like(changed)
            parts.append(Part(first, changed, forced, max(self.options.room(len(changed)), int(changed.sum()))))
        return kind, parts
