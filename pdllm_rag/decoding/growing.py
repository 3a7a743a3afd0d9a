"""Canvas KV that grows: rows whose tokens are final are kept, and a pass runs only the rows that follow them.

Exact for block-causal attention: what a row's keys and values come from lies in its own block and before it. K/V are
written where the row stands in its sequence's buffer, so keeping them moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pdllm_rag.attends import split_s_attend
from pdllm_rag.attention import block_masks
from pdllm_rag.context import Context, Placed, SequenceLayout, gather
from pdllm_rag.decoding.predictions import Predictions, predictions_of
from pdllm_rag.models.backbone import Attend, Backbone


class Tail(NamedTuple):
    """What one pass runs of a canvas.

    ids: int64 [n], tokens of the rows from `start` on.
    start: canvas rows before them, whose keys and values are kept.
    blocks: [n], number of each row's block; a row sees no later one.
    n_final: so many of the first rows are kept from now on: whole blocks of final tokens.
    predicting: int64 [M], canvas rows whose output is asked for; `start` - 1 is the last kept row.
    n_after: rows that follow, of the same block, whose keys and values are read as the latest pass over them left them.
    """

    ids: torch.Tensor
    start: int
    blocks: tuple[int, ...]
    n_final: int
    predicting: torch.Tensor
    n_after: int = 0

    def within(self, whole: SequenceLayout) -> SequenceLayout:
        """It as a canvas of its own in its sequence's buffer rows, what is read around it as runs of its context."""
        stop = self.start + len(self.ids)
        return whole._replace(n_rows=stop + self.n_after).windowed(range(self.start, stop))


class GrowingKV:
    """Chunk KV and kept canvas KV of a batch of sequences.

    Args:
        backbone: runs canvas rows.
        placed: the chunks of each sequence.
        rooms: most canvas rows of each sequence.
        backend: a Split-S backend.
    """

    def __init__(self, backbone: Backbone, placed: Sequence[Placed], rooms: Sequence[int], backend: str) -> None:
        self._backbone = backbone
        self._backend = backend
        self._context = gather(placed, rooms, backbone)
        self._last: dict[int, torch.Tensor] = {}  # hidden row of each sequence's last kept row
        self._layout: list[tuple[int, int, tuple[int, ...], int]] = []
        self._attend: Attend | None = None

    def run(self, active: Sequence[int], tails: Sequence[Tail]) -> list[Predictions]:
        """Run the tails of these sequences: what their predicting rows say."""
        ids = torch.cat([tail.ids for tail in tails]).to(self._backbone.device)
        hidden = self._backbone.hidden(ids, self._attend_over(active, tails))
        asked = []
        for index, tail, own in zip(active, tails, torch.split(hidden, [len(t.ids) for t in tails]), strict=True):
            known = torch.cat((self._last.get(index, own[:1]), own))  # from row start - 1 on
            asked.append(known[(tail.predicting - tail.start + 1).to(known.device)])
            if tail.n_final:
                self._last[index] = own[tail.n_final - 1 : tail.n_final].clone()
        return predictions_of(self._backbone, torch.cat(asked), [len(rows) for rows in asked])

    def _attend_over(self, active: Sequence[int], tails: Sequence[Tail]) -> Attend:
        layout = [(index, tail.start, tail.blocks, tail.n_after) for index, tail in zip(active, tails, strict=True)]
        if self._attend is None or layout != self._layout:
            sequences = tuple(tail.within(self._context.sequences[i]) for i, tail in zip(active, tails, strict=True))
            masks = None  # where each tail lies in one block, every row sees every row
            if any(len(set(tail.blocks)) > 1 for tail in tails):
                numbers = torch.tensor([number for tail in tails for number in tail.blocks])
                masks = block_masks(numbers.to(self._backbone.device), [len(tail.ids) for tail in tails], 1)
            context = Context(self._context.k, self._context.v, sequences, masks)
            self._attend = split_s_attend(self._backbone, context, backend=self._backend)
            self._layout = layout
        return self._attend
