"""Decoding with several open blocks: a canvas that opens them early, and the passes that run what is not kept yet.

- the prompt is the first block, so its K/V are kept after the first pass; under a block-causal model's mask its last,
  unfinished block belongs to the first answer block;
- finished blocks run once more, in the same pass as the blocks after them, and are then kept: exactly;
- blocks behind an end-of-answer token are dropped, and so is, in a pass, what no open row is predicted from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from pdllm_rag.attention import causal_block
from pdllm_rag.decoding.base import Canvas, DecodeRequest, DecodeStep, FinishReason
from pdllm_rag.decoding.denoise import CommitRule, denoise
from pdllm_rag.decoding.growing import GrowingKV, Tail
from pdllm_rag.decoding.pipeline import OPENING, D2FOptions, Phase, advance
from pdllm_rag.decoding.predictions import Predictions
from pdllm_rag.decoding.sampling import Proposal
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.models.spec import ModelSpec


class PipelinedCanvas(Canvas):
    """A canvas whose blocks are opened by the state machine.

    Args:
        sub_block: rows of a block that are filled before the next ones of it, counted from the block's start; a divisor
            of the block, or None for all of them together.
        block_cache: once a sub-block's first token is final, passes run its rows only, over what the latest whole pass
            has left of the block's other rows. For one open block.

    Attributes:
        phases: of the blocks of the next pass, the prompt's first.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        spec: ModelSpec,
        options: D2FOptions,
        sub_block: int | None = None,
        block_cache: bool = False,
    ) -> None:
        self._mask_block = causal_block(spec.family)
        align = self._mask_block or 1
        block_len = options.block_len or spec.family.block_len
        super().__init__(
            prompt_ids,
            mask_id=spec.mask_id,
            eos_ids=spec.eos_ids,
            block_len=block_len,
            max_new_tokens=max_new_tokens,
            align=align,
            lead=align if spec.logit_shift else 1,
        )
        self._options = options
        self._sub_block = sub_block
        self._block_cache = block_cache
        self._n_run = 0  # rows up to the last that a pass has run
        self._shift = int(spec.logit_shift)
        self._before = self.prompt_len - self.prompt_len % align
        self._passes: Counter[int] = Counter()
        self.phases: tuple[Phase, ...] = OPENING
        self._turn()

    @property
    def most_rows(self) -> int:
        """Rows that it may come to."""
        return self._bounds(self._max_new_tokens)[-1]

    def open_rows(self) -> torch.Tensor:
        """See `Canvas.open_rows`; of a block that is filled by sub-blocks, only the first one with masks."""
        rows = super().open_rows()
        if self._sub_block is None:
            return rows
        numbers = (self.prompt_len + rows) // self._sub_block
        return rows[numbers == numbers[:1]]

    def choose(self, rows: torch.Tensor, proposal: Proposal, rule: CommitRule) -> torch.Tensor:
        """bool [M]: which open rows are committed, each block by its own phase."""
        numbers = np.searchsorted(self._bounds(self._max_new_tokens), self.prompt_len + rows.numpy(), side="right")
        chosen = proposal.confidence > rule.threshold
        for number in np.unique(numbers).tolist():
            own = torch.from_numpy(numbers == number)
            if self.phases[number] is Phase.ACTIVE:
                chosen[own] = rule.chosen(proposal.confidence[own], self._passes[number], proposal.rank[own])
                self._passes[number] += 1
        return chosen

    def advance(self) -> FinishReason | None:
        """See `Canvas.advance`; blocks are opened as the state machine says."""
        finished = super().advance()
        if finished is None:
            self._turn()
        return finished

    def tail(self) -> Tail:
        """What the next pass runs; asked for once before it."""
        bounds = self._bounds(self._last_row())
        ends = [0, *bounds]
        start = ends[self.phases.count(Phase.CACHED)]
        final = ends[sum(not phase.is_open for phase in self.phases)]
        predicting = self.prompt_len + self.open_rows() - self._shift
        needed = max(int(predicting[-1]), final - 1, start)  # start: a pass runs something
        end = next(bound for bound in bounds if bound > needed)
        if self._sub_block is not None and self._block_cache and self._n_run == end:
            first = int(self.open_rows()[0] + self.prompt_len) // self._sub_block * self._sub_block
            if first < self.prompt_len or not self._masked[first - self.prompt_len]:
                own = slice(first, first + self._sub_block)
                return Tail(self.ids[own], first, (0,) * self._sub_block, 0, predicting, end - own.stop)
        self._n_run = end
        rows = np.arange(start, end)
        blocks = rows // self._mask_block if self._mask_block else np.searchsorted(bounds, rows, side="right")
        return Tail(self.ids[start:end], start, tuple(blocks.tolist()), final - start, predicting)

    def _turn(self) -> None:
        bounds = self._bounds(self._last_row())
        n_rows = np.diff([0, *bounds])
        masked = np.ones(bounds[-1], dtype=np.bool_)
        known = np.concatenate((np.zeros(self.prompt_len, dtype=np.bool_), self._masked))[: len(masked)]
        masked[: len(known)] = known
        n_masked = [int(part.sum()) for part in np.split(masked, bounds[:-1])]
        self.phases = advance(self.phases, n_rows.tolist(), n_masked, self._options)
        missing = bounds[len(self.phases) - 1] - len(self.ids)
        if missing > 0:
            self._add_rows(missing)
        self.block = range(len(self._masked))  # every block that is open

    def _last_row(self) -> int:
        """Answer rows that are wanted: up to the end-of-answer token."""
        return self._max_new_tokens if self._end is None else min(self._end + 1, self._max_new_tokens)

    def _bounds(self, n_answer: int) -> list[int]:
        """The end of each block, the prompt's first, until that many answer rows are in one."""
        n_blocks = -(-(self.prompt_len + n_answer - self._before) // self._block_len)
        before = [self._before] if self._before else []
        return [*accumulate([*before, *[self._block_len] * n_blocks])]


def pipelined(
    backbone: Backbone,
    spec: ModelSpec,
    requests: Sequence[DecodeRequest],
    rule: CommitRule,
    options: D2FOptions,
    *,
    backend: str,
    sub_block: int | None = None,
    block_cache: bool = False,
) -> Iterator[DecodeStep]:
    """Decode by the state machine.

    Args:
        backbone: runs canvas rows.
        backend: a Split-S backend.
        sub_block, block_cache: see `PipelinedCanvas`.
    """
    placed = [request.placed() for request in requests]
    canvases = [
        PipelinedCanvas(r.prompt_ids, r.max_new_tokens, spec, options, sub_block, block_cache) for r in requests
    ]
    kv = GrowingKV(backbone, placed, [canvas.most_rows for canvas in canvases], backend)

    def forward(active: Sequence[int], _: Sequence[Canvas]) -> list[Predictions]:
        return kv.run(active, [canvases[i].tail() for i in active])

    def choose(index: int, rows: torch.Tensor, proposal: Proposal) -> torch.Tensor:
        return canvases[index].choose(rows, proposal, rule)

    return denoise(requests, forward, spec, rule, canvases, choose)
