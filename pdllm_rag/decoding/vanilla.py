"""Vanilla decoding: each step encodes chunks, question and answer anew, every row seeing every row.

Under a block-causal mask a row sees the blocks that do not stand after its own. Chunk rows then never see the canvas,
and the answers are those of static-KV decoding over jointly encoded chunks.

The reference in quality for dense prompts and the baseline in cost for everything else.
Source: LLaDA (arXiv 2502.09992), low-confidence remasking without remasking of committed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pdllm_rag.attends import DenseAttend
from pdllm_rag.attention import block_masks, causal_block
from pdllm_rag.decoding.base import Canvas, DecodeRequest, DecodeStep
from pdllm_rag.decoding.denoise import CommitRule, canvas_of, denoise
from pdllm_rag.decoding.predictions import Predictions
from pdllm_rag.decoding.sampling import Order
from pdllm_rag.decoding.static_kv import answer_logits
from pdllm_rag.models.loader import LoadedModel


@dataclass(frozen=True)
class VanillaOptions:
    """How the answer's rows are filled.

    Attributes:
        order: which masked rows of a block go first (`sampling.rank`); the threshold is of confidence in any order.
        canvas: "blocks" shows the masks of one block at a time, "whole" those of the whole answer, as published.
    """

    order: Order = "low_confidence"
    canvas: Literal["blocks", "whole"] = "blocks"


class VanillaDecoder:
    """Decodes over a dense prompt; needs no stored KV."""

    name = "vanilla"
    needs_kv = False
    backend = "dense"

    def __init__(
        self,
        model: LoadedModel,
        rule: CommitRule | None = None,
        options: VanillaOptions = VanillaOptions(),
        *,
        backend: str = "auto",
    ) -> None:
        if backend not in ("auto", self.backend):
            raise ValueError(f"backend is {backend!r} with decoder 'vanilla'; expected auto or {self.backend}")
        self._model = model
        self._rule = rule or CommitRule()
        self._options = options

    def steps(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeStep]:
        """See `Decoder.steps`."""
        backbone = self._model.backbone
        prefixes = [torch.tensor([t for ids in r.chunk_ids for t in ids], dtype=torch.int64) for r in requests]
        places = [_positions(r) for r in requests]
        block = causal_block(self._model.spec.family)

        def forward(active: Sequence[int], canvases: Sequence[Canvas]) -> list[Predictions]:
            ids, runs, windows = [], [], []
            for index, canvas in zip(active, canvases, strict=True):
                start = requests[index].placement.canvas_start
                ids += [prefixes[index], canvas.ids]
                runs += [places[index], torch.arange(start, start + len(canvas.ids))]
                windows.append(range(-len(prefixes[index]), len(canvas.ids)))
            lens = [len(window) for window in windows]
            positions = torch.cat(runs).to(backbone.device)
            attend = DenseAttend(backbone.rope, lens, positions, block_masks(positions, lens, block))
            hidden = backbone.hidden(torch.cat(ids).to(backbone.device), attend)
            return answer_logits(self._model, hidden, canvases, windows)

        spec, whole = self._model.spec, self._options.canvas == "whole"
        canvases = [canvas_of(request, spec, whole=whole) for request in requests]
        return denoise(requests, forward, spec, self._rule, canvases, order=self._options.order)


def _positions(request: DecodeRequest) -> torch.Tensor:
    """int64 positions of the context tokens; chunks stand where the placement puts them."""
    if len(request.chunk_ids) != len(request.placement.offsets):
        raise ValueError(
            f"request has {len(request.chunk_ids)} chunks for {len(request.placement.offsets)} places; expected as many"
        )
    runs = [
        torch.arange(offset, offset + len(ids))
        for ids, offset in zip(request.chunk_ids, request.placement.offsets, strict=True)
    ]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)
