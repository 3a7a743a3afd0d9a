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

import torch

from pdllm_rag.attends import SplitSAttend
from pdllm_rag.attention import causal_block
from pdllm_rag.context import Placed, gather
from pdllm_rag.decoding.base import Canvas, DecodeRequest, DecodeStep
from pdllm_rag.decoding.denoise import CommitRule, denoise
from pdllm_rag.models.loader import LoadedModel


class StaticKVDecoder:
    """Decodes over stored chunk KV, or over the prompt alone when a request has no chunks."""

    name = "static_kv"
    needs_kv = True

    def __init__(self, model: LoadedModel, rule: CommitRule | None = None, *, backend: str = "auto") -> None:
        self._model = model
        self._rule = rule or CommitRule()
        self._backend = backend

    def steps(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeStep]:
        """See `Decoder.steps`."""
        backbone, spec = self._model.backbone, self._model.spec
        for request in requests:
            if len(request.chunk_kv) != len(request.placement.offsets):
                raise ValueError(
                    f"request has KV of {len(request.chunk_kv)} chunks for {len(request.placement.offsets)} places; "
                    "expected as many"
                )
        rooms = [Canvas.room(len(r.prompt_ids), r.max_new_tokens, spec.family) for r in requests]
        block = causal_block(spec.family)
        context = gather(
            [Placed(tuple(r.chunk_kv), r.placement) for r in requests],
            rooms,
            backbone,
        )
        attend: SplitSAttend | None = None
        layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None

        def forward(active: Sequence[int], canvases: Sequence[Canvas]) -> list[torch.Tensor]:
            nonlocal attend, layout
            wanted = tuple(active), tuple(len(canvas.ids) for canvas in canvases)
            if attend is None or wanted != layout:
                narrowed = context.narrowed(*wanted)
                attend = SplitSAttend(backbone.rope, narrowed, block=block, backend=self._backend)
                layout = wanted
            hidden = backbone.hidden(torch.cat([c.ids for c in canvases]).to(backbone.device), attend)
            return answer_logits(self._model, hidden, canvases)

        return denoise(requests, forward, spec, self._rule)


def answer_logits(
    model: LoadedModel, hidden: torch.Tensor, canvases: Sequence[Canvas], before: Sequence[int] = ()
) -> list[torch.Tensor]:
    """float32 logits [M, V] on the CPU at each canvas's open rows, from packed hidden rows.

    Args:
        before: hidden rows of each sequence that lie before its canvas (a dense prompt's context).
    """
    rows, counts, start = [], [], 0
    for index, canvas in enumerate(canvases):
        start += before[index] if before else 0
        open_rows = canvas.open_rows()
        rows.append(start + canvas.prompt_len + open_rows - int(model.spec.logit_shift))
        counts.append(len(open_rows))
        start += len(canvas.ids)
    logits = model.backbone.logits(hidden[torch.cat(rows).to(hidden.device)])
    return list(torch.split(logits.cpu(), counts))
