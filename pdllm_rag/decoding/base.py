"""The canvas, what a decoder is asked, and what it reports after each denoising step.

- prompt tokens never change, whatever their ids: holes are known by position, not by the mask id;
- the canvas holds whole blocks of masks; an answer shorter than a block is a prefix of the same computation;
- blocks are filled left to right; the masks of later ones are not there yet, or (`whole`) all stand from the start;
- a committed end-of-answer token fills what follows it: nothing after it is ever computed or shown;
- for a block-causal model answer blocks end where the model's blocks do: the prompt's tail stands fixed in the first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pdllm_store import ChunkKV

from pdllm_rag.attention import causal_block
from pdllm_rag.context import Placed
from pdllm_rag.models.families import Family
from pdllm_rag.placement import Placement, round_up

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy and deterministic; above 0 `seed` makes a run repeatable.

    top_p: above temperature 0, only the likeliest tokens that have this probability together are drawn.
    """

    temperature: float = 0.0
    seed: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; expected a number of 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected a number above 0 and up to 1")


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

    def placed(self) -> Placed:
        """The chunks' stored KV where it stands.

        Raises:
            ValueError: there are not as many chunks as places.
        """
        if len(self.chunk_kv) != len(self.placement.offsets):
            raise ValueError(
                f"request has KV of {len(self.chunk_kv)} chunks for {len(self.placement.offsets)} places; expected as "
                "many"
            )
        return Placed(tuple(self.chunk_kv), self.placement)

    def as_prompt(self) -> DecodeRequest:
        """The same with its chunks as part of the prompt, to be computed with it.

        Raises:
            ValueError: the chunks do not stand one after another before the canvas.
        """
        starts = [*self.placement.offsets, self.placement.canvas_start]
        if any(
            end != start + len(ids) for ids, start, end in zip(self.chunk_ids, starts[:-1], starts[1:], strict=True)
        ):
            raise ValueError(
                f"chunks of {[len(ids) for ids in self.chunk_ids]} tokens stand at {starts[:-1]}, the canvas at "
                f"{starts[-1]}; expected one after another, as placement 'sequential' has them"
            )
        prompt = [*(token for ids in self.chunk_ids for token in ids), *self.prompt_ids]
        return replace(self, prompt_ids=prompt, placement=Placement((), starts[0]), chunk_ids=(), chunk_kv=())


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
    """Fills the masks of a batch of sequences; each comes out as it would alone.

    backend: how it attends, resolved when it is made, in words for statistics.
    """

    name: str
    needs_kv: bool

    @property
    def backend(self) -> str: ...

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
        whole: the masks of all blocks stand from the start, as LLaDA and Fast-dLLM have it: the answer then depends on
            how many there are.

    Attributes:
        ids: int64 [prompt_len + answer rows], masks at uncommitted answer rows.
        masked: bool [answer rows].
        block: answer rows of the current block.
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
        whole: bool = False,
    ) -> None:
        if not prompt_ids:
            raise ValueError("the prompt has no tokens; expected at least one before the answer")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; expected 1 or more")
        self.prompt_len = len(prompt_ids)
        self._mask_id = mask_id
        self._eos = frozenset(eos_ids)
        self._block_len = block_len
        self._max_new_tokens = max_new_tokens
        self._lead = lead
        self._end: int | None = None  # first end-of-answer token
        self._set(np.array(prompt_ids, dtype=np.int64), np.zeros(0, dtype=np.bool_))
        self.block = range(block_len - self.prompt_len % align)
        self._n_ahead = round_up(max(0, max_new_tokens - len(self.block)), block_len) if whole else 0  # rows after it
        self._add_rows(len(self.block) + self._n_ahead)

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
        return torch.from_numpy(self._open())

    def commit(self, rows: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill masked answer rows for good; whatever was masked after the first end-of-answer token repeats it.

        Returns what was filled: rows ascending, and their tokens.

        Raises:
            ValueError: a row is not masked.
        """
        chosen, values = rows.numpy(), tokens.numpy()
        masked, answer = self._masked, self._ids[self.prompt_len :]
        if not masked[chosen].all():
            raise ValueError(f"rows {rows.tolist()} are not all masked; a committed token is never replaced")
        was_masked = masked.copy()
        answer[chosen] = values
        masked[chosen] = False
        ends = [row for row, token in zip(chosen.tolist(), values.tolist(), strict=True) if token in self._eos]
        self._end = min([*ends, *([] if self._end is None else [self._end])], default=None)
        if self._end is not None:
            tail = np.flatnonzero(was_masked[self._end + 1 :]) + self._end + 1
            answer[tail] = answer[self._end]
            masked[tail] = False
        filled = np.flatnonzero(was_masked & ~masked)
        return torch.from_numpy(filled), torch.from_numpy(answer[filled])

    def advance(self) -> FinishReason | None:
        """Why the answer is complete, or None; opens the next block when this one is full."""
        open_rows = self._open()
        n_rows = len(self._masked) - self._n_ahead
        n_ready = int(open_rows[0]) if len(open_rows) else n_rows
        if self._end is not None and self._end < n_ready:
            return "stop" if self._end < self._max_new_tokens else "length"
        if n_ready >= self._max_new_tokens:
            return "length"
        if n_ready == n_rows:
            self.block = range(n_ready, n_ready + self._block_len)
            if self._n_ahead:
                self._n_ahead -= self._block_len
            else:
                self._add_rows(self._block_len)
        return None

    def _open(self) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = np.flatnonzero(self._masked[: len(self._masked) - self._n_ahead])
        if self._lead == 1:
            return rows
        leading = (rows + self.prompt_len) // self._lead * self._lead - self.prompt_len  # below 0: in the prompt
        is_open: NDArray[np.bool_] = (leading < 0) | (leading == rows) | ~self._masked[np.maximum(leading, 0)]
        return rows[is_open]

    def _add_rows(self, n_rows: int) -> None:
        self._set(
            np.concatenate((self._ids, np.full(n_rows, self._mask_id, dtype=np.int64))),
            np.concatenate((self._masked, np.ones(n_rows, dtype=np.bool_))),
        )

    def _set(self, ids: NDArray[np.int64], masked: NDArray[np.bool_]) -> None:
        """Arrays, and tensors over the same memory: a few elements are handled ten times faster by numpy."""
        self._ids, self._masked = ids, masked
        self.ids, self.masked = torch.from_numpy(ids), torch.from_numpy(masked)
