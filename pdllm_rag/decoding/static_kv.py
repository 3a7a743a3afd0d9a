"""Static-KV decoding: each step recomputes question and answer rows over chunk KV that never changes.

A block-causal model decodes the same way under its mask: a canvas row sees all chunks and, of the canvas, its own block
and the ones before it. Without logit shift (SDAR) all masks of a block are denoised from its first step. With it
(Fast-dLLM v2) a block's first token is predicted by the last row of the finished block before, which does not see the
new block: it is committed alone, in one step, and the rest is denoised with it known. Where the prompt's tail stands in
the first block, that first token is known from the start. An answer block of several mask blocks opens them together:
then a first token may be predicted from a block that still holds masks, which neither family was trained for.

Source: Prefilling-dLLM (arXiv 2606.10537), decoding over cached chunks; question rows are recomputed every step.
Source of the order within a block: Fast-dLLM v2 (arXiv 2509.26328), a finished block's last row gives the next token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pdllm_rag.attends import split_s_attend
from pdllm_rag.attention import causal_block, resolve
from pdllm_rag.context import Placed, gather, rows_needed
from pdllm_rag.decoding.base import Canvas, DecodeRequest, DecodeStep
from pdllm_rag.decoding.denoise import CommitRule, denoise
from pdllm_rag.decoding.graphed import GraphedStep, Shape, can_capture, checked_out
from pdllm_rag.decoding.predictions import DeviceRows, Predictions, predictions_of
from pdllm_rag.decoding.sampling import Order
from pdllm_rag.models.backbone import Attend
from pdllm_rag.models.fused import FusedBackbone
from pdllm_rag.models.loader import LoadedModel


@dataclass(frozen=True)
class StaticKVOptions:
    """order: which masked rows of a block go first (`sampling.rank`); the threshold is of confidence in any order."""

    order: Order = "low_confidence"


class StaticKVDecoder:
    """Decodes over stored chunk KV, or over the prompt alone when a request has no chunks."""

    name = "static_kv"
    needs_kv = True

    def __init__(
        self,
        model: LoadedModel,
        rule: CommitRule | None = None,
        options: StaticKVOptions = StaticKVOptions(),
        *,
        backend: str = "auto",
    ) -> None:
        self._model = model
        self._rule = rule or CommitRule()
        self._order = options.order
        backbone = model.backbone
        self._backend = resolve(backend, backbone.device, backbone.dtype, backbone.head_dim)
        self._block = causal_block(model.spec.family)

    @property
    def is_graphed(self) -> bool:
        """Whether a step is replayed as a CUDA graph."""
        return can_capture(self._model, self._backend)

    @property
    def backend(self) -> str:
        """The Split-S backend in use."""
        return f"{self._backend}, graphed" if self.is_graphed else self._backend

    def steps(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeStep]:
        """See `Decoder.steps`."""
        rooms = [Canvas.room(len(r.prompt_ids), r.max_new_tokens, self._model.spec.family) for r in requests]
        placed = [request.placed() for request in requests]
        if self.is_graphed and requests:
            return self._graphed(requests, placed, rooms)
        return self._eager(requests, placed, rooms)

    def _eager(
        self, requests: Sequence[DecodeRequest], contexts: Sequence[Placed], rooms: Sequence[int]
    ) -> Iterator[DecodeStep]:
        backbone, spec = self._model.backbone, self._model.spec
        context = gather(contexts, rooms, backbone)
        attend: Attend | None = None
        layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None

        def forward(active: Sequence[int], canvases: Sequence[Canvas]) -> list[Predictions]:
            nonlocal attend, layout
            wanted = tuple(active), tuple(len(canvas.ids) for canvas in canvases)
            if attend is None or wanted != layout:
                narrowed = context.narrowed(*wanted)
                attend = split_s_attend(backbone, narrowed, block=self._block, backend=self._backend)
                layout = wanted
            hidden = backbone.hidden(torch.cat([c.ids for c in canvases]).to(backbone.device), attend)
            return answer_logits(self._model, hidden, canvases, [range(len(canvas.ids)) for canvas in canvases])

        return denoise(requests, forward, spec, self._rule, order=self._order)

    def _graphed(
        self, requests: Sequence[DecodeRequest], contexts: Sequence[Placed], rooms: Sequence[int]
    ) -> Iterator[DecodeStep]:
        backbone, spec = self._model.backbone, self._model.spec
        assert isinstance(backbone, FusedBackbone)
        n_context = rows_needed(contexts, rooms) - sum(rooms)
        shape = Shape.fitting(len(requests), max(rooms), n_context, spec.family.block_len)
        with checked_out(backbone, spec.logit_shift, shape, GraphedStep) as step:
            context = gather(contexts, rooms, backbone, into=step.buffers)
            layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None

            def forward(active: Sequence[int], canvases: Sequence[Canvas]) -> list[DeviceRows]:
                nonlocal layout
                wanted = tuple(active), tuple(len(canvas.ids) for canvas in canvases)
                if wanted != layout:
                    step.arrange(active, context.narrowed(*wanted).sequences)
                    layout = wanted
                return step.run(active, canvases, [range(len(canvas.ids)) for canvas in canvases])

            yield from denoise(requests, forward, spec, self._rule, order=self._order)


def answer_logits(
    model: LoadedModel, hidden: torch.Tensor, canvases: Sequence[Canvas], windows: Sequence[range]
) -> list[Predictions]:
    """What packed hidden rows say of each canvas's open rows.

    Args:
        windows: canvas rows of each sequence that `hidden` holds; those below 0 are of a context before the canvas.
    """
    rows, counts, start = [], [], 0
    for canvas, window in zip(canvases, windows, strict=True):
        open_rows = canvas.open_rows()
        rows.append(start - window.start + canvas.prompt_len + open_rows - int(model.spec.logit_shift))
        counts.append(len(open_rows))
        start += len(window)
    return predictions_of(model.backbone, hidden[torch.cat(rows).to(hidden.device)], counts)
