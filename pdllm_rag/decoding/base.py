"""The canvas, what a decoder is asked, and what it reports after each denoising step.

- prompt tokens never change, whatever their ids: holes are known by position, not by the mask id;
- the canvas holds whole blocks of masks; an answer shorter than a block is a prefix of the same computation;
- a committed end-of-answer token fills what follows it: nothing after it is ever computed or shown;
- for a block-causal model answer blocks end where the model's blocks do: the prompt's tail stands fixed in the first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from pdllm_store import ChunkKV

from pdllm_rag.attention import causal_block
from pdllm_rag.models.families import Family
from pdllm_rag.placement import Placement

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy and deterministic; above 0 `seed` makes a run repeatable."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; expected a number of 0 or more")


@dataclass(frozen=True, eq=False)
class DecodeRequest:
    """One sequence to decode.

    Attributes:
        prompt_ids: canvas rows before the answer (the templated question).
        chunk_ids: token ids of each context chunk, BOS first, in document order.
        chunk_kv: their stored KV, for decoders that need it, else empty.
        placement: where chunks and canvas stand.
        max_new_tokens: at least 1.
        probe_ids: a text whose mean log-probability in the first step is reported.
        cancel: set it to end this sequence before the next step.
    """

    prompt_ids: Sequence[int]
    placement: Placement
    max_new_tokens: int
    chunk_ids: Sequence[Sequence[int]] = ()
    chunk_kv: Sequence[ChunkKV] = ()
    sampling: Sampling = Sampling()
    probe_ids: Sequence[int] = ()
    cancel: threading.Event = field(default_factory=threading.Event)


class DecodeStep(NamedTuple):
    """What one denoising step did to one sequence.

    sequence: index of the request.
    rows: answer positions that were filled, ascending.
    tokens: their token ids.
    confidence: probability of each when it was committed (1.0 for fill after an end-of-answer token).
    nfe: forward passes that this sequence has taken part in.
    finished: why the sequence ended with this step, or None.
    probe: mean ln p of `probe_ids` at the answer's start, first step only.
    """

    sequence: int
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    nfe: int
    finished: FinishReason | None
    probe: float | None = None


class Decoder(Protocol):
    """Fills the masks of a batch of sequences; each comes out as it would alone."""

    name: str
    needs_kv: bool

    def steps(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeStep]:
        """One event per active sequence and denoising step; ends when every sequence has finished.

        Raises:
            NumericsError: the model's logits are not finite.
            ValueError: a request is malformed.
        """
        ...


class Canvas:
    """Prompt and answer rows of one sequence.

    Args:
        block_len: masked rows of one answer block, a multiple of `align`.
        align: rows of one block of the model's mask, 1 if it has none; row 0 begins one. The first answer block is
            shorter by the prompt rows that stand in its first mask block.
        lead: `align`, if the first token of a mask block is committed before its others, else 1. (Under logit shift the
            row that predicts it lies in the block before and does not see its block, and the other rows were trained
            on blocks whose first token is known.)

    Attributes:
        ids: int64 [prompt_len + answer rows], masks at uncommitted answer rows.
        masked: bool [answer rows].
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        mask_id: int,
        eos_ids: Sequence[int],
        block_len: int,
        max_new_tokens: int,
        align: int = 1,
        lead: int = 1,
    ) -> None:
        if not prompt_ids:
            raise ValueError("the prompt has no tokens; expected at least one before the answer")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; expected 1 or more")
        self.prompt_len = len(prompt_ids)
        self._mask_id = mask_id
        self._eos = torch.tensor(list(eos_ids))
        self._block_len = block_len
        self._max_new_tokens = max_new_tokens
        self._lead = lead
        self.ids = torch.tensor(list(prompt_ids), dtype=torch.int64)
        self.masked = torch.zeros(0, dtype=torch.bool)
        self._add_rows(block_len - self.prompt_len % align)

    @staticmethod
    def room(prompt_len: int, max_new_tokens: int, family: Family) -> int:
        """Rows that a canvas may come to: the prompt and whole blocks.

        Raises:
            ValueError: the family's blocks do not fit its mask.
        """
        tail = prompt_len % (causal_block(family) or 1)
        return prompt_len - tail + -(-(tail + max_new_tokens) // family.block_len) * family.block_len

    @property
    def answer(self) -> torch.Tensor:
        """int64 [answer rows]"""
        return self.ids[self.prompt_len :]

    def open_rows(self) -> torch.Tensor:
        """int64 [M], answer positions that may be filled now, ascending: masked ones that wait for no leading token."""
        rows = self.masked.nonzero()[:, 0]
        if self._lead == 1:
            return rows
        leading = (rows + self.prompt_len) // self._lead * self._lead - self.prompt_len  # below 0: in the prompt
        return rows[(leading < 0) | (leading == rows) | ~self.masked[leading.clamp(min=0)]]

    def commit(self, rows: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill masked answer rows for good; whatever was masked after the first end-of-answer token repeats it.

        Returns what was filled: rows ascending, and their tokens.

        Raises:
            ValueError: a row is not masked.
        """
        if not self.masked[rows].all():
            raise ValueError(f"rows {rows.tolist()} are not all masked; a committed token is never replaced")
        was_masked = self.masked.clone()
        self.answer[rows] = tokens
        self.masked[rows] = False
        end = self._first_eos()
        if end is not None:
            tail = was_masked.nonzero()[:, 0]
            tail = tail[tail > end]
            self.answer[tail] = int(self.answer[end])
            self.masked[tail] = False
        filled = (was_masked & ~self.masked).nonzero()[:, 0]
        return filled, self.answer[filled]

    def advance(self) -> FinishReason | None:
        """Why the answer is complete, or None; opens the next block when this one is full."""
        open_rows = self.open_rows()
        n_ready = int(open_rows[0]) if len(open_rows) else len(self.masked)
        end = self._first_eos()
        if end is not None and end < n_ready:
            return "stop" if end < self._max_new_tokens else "length"
        if n_ready >= self._max_new_tokens:
            return "length"
        if n_ready == len(self.masked):
            self._add_rows(self._block_len)
        return None

    def _first_eos(self) -> int | None:
        found = (torch.isin(self.answer, self._eos) & ~self.masked).nonzero()[:, 0]
        return int(found[0]) if len(found) else None

    def _add_rows(self, n_rows: int) -> None:
        self.ids = torch.cat((self.ids, torch.full((n_rows,), self._mask_id)))
        self.masked = torch.cat((self.masked, torch.ones(n_rows, dtype=torch.bool)))
