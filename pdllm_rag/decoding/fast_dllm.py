"""Fast-dLLM: blocks from left to right; within one, the KV of other canvas rows is that of the block's first step.

- the canvas holds the masks of the whole answer from the start; the first step of each block computes all its rows
  anew, the steps after it only some, over the KV that the first step left of the others;
- chunks are static, as for static-KV decoding, and the cached prompt is the question; with a dense context, chunks are
  part of the prompt;
- every sequence is at its own place in its own block, so a batch changes no answer;
- with logit shift a block's first row is predicted by the row before it, which is computed with the block. (The source
  leaves it out, and so has to commit the first row in the block's first step, however unsure it is.)

Source: Fast-dLLM (arXiv 2505.22618), block-wise approximate KV cache, prefix and dual, and parallel decoding. Unlike
its code this takes no further step for a block that its first step has completed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

import torch

from pdllm_rag.attends import WholeCanvasAttend, split_s_attend
from pdllm_rag.attention import causal_block, resolve
from pdllm_rag.context import Context, gather, rows_needed
from pdllm_rag.decoding.base import Canvas, DecodeRequest, DecodeStep
from pdllm_rag.decoding.denoise import CommitRule, canvas_of, denoise
from pdllm_rag.decoding.graphed import GraphedStep, Shape, can_capture, checked_out
from pdllm_rag.decoding.options import Asked, reads_no_kv
from pdllm_rag.decoding.predictions import Predictions
from pdllm_rag.decoding.static_kv import answer_logits
from pdllm_rag.models.backbone import Attend
from pdllm_rag.models.fused import FusedBackbone
from pdllm_rag.models.loader import LoadedModel

Cache = Literal["prefix", "dual"]
_Layout = tuple[tuple[int, ...], tuple[range, ...]]  # sequences and their windows


@dataclass(frozen=True)
class FastDLLMOptions:
    """What is kept between the steps of a block, and what is committed.

    Attributes:
        cache: KV of the rows before the block ("prefix": the masks after it are computed at each step), or of those
            after it too ("dual": a step computes the rows of the block alone).
        context: "stored" reads the chunks' stored KV; "dense" computes chunks anew at each block's first step, as the
            published decoder does with its whole prompt.
        factor: commit by this factor instead of the threshold (`sampling.within_factor`; 1 as published), or None.
    """

    cache: Cache = "dual"
    context: Literal["stored", "dense"] = "stored"
    factor: float | None = None

    def __post_init__(self) -> None:
        CommitRule(factor=self.factor)


class FastDLLMDecoder:
    """Decodes over stored chunk KV, or over a dense prompt.

    Raises:
        ValueError: a block-causal model; the KV of its finished blocks is exact, and `StaticKVDecoder` decodes it.
    """

    name = "fast_dllm"
    needs_kv = True

    def __init__(
        self,
        model: LoadedModel,
        rule: CommitRule | None = None,
        options: FastDLLMOptions = FastDLLMOptions(),
        *,
        backend: str = "auto",
    ) -> None:
        if reason := why_not(model):
            raise ValueError(reason)
        self._model = model
        self._rule = rule or CommitRule()
        if options.factor is not None:
            self._rule = replace(self._rule, factor=options.factor)
        self._cache = options.cache
        self.needs_kv = options.context == "stored"
        backbone = model.backbone
        self._backend = resolve(backend, backbone.device, backbone.dtype, backbone.head_dim)

    @property
    def is_graphed(self) -> bool:
        """Whether the steps within a block are replayed as a CUDA graph: those of the dual cache, all of one shape."""
        return self._cache == "dual" and can_capture(self._model, self._backend)

    @property
    def backend(self) -> str:
        """The Split-S backend in use."""
        return f"{self._backend}, graphed" if self.is_graphed else self._backend

    def steps(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeStep]:
        """See `Decoder.steps`."""
        if not self.needs_kv:
            requests = [request.as_prompt() for request in requests]
        placed = [request.placed() for request in requests]
        canvases = [canvas_of(request, self._model.spec, whole=True) for request in requests]
        rooms = [len(canvas.ids) for canvas in canvases]
        n_rows = rows_needed(placed, rooms)

        def run() -> Iterator[DecodeStep]:
            backbone, spec = self._model.backbone, self._model.spec
            with ExitStack() as stack:
                step: GraphedStep | None = None
                if self.is_graphed and requests:
                    assert isinstance(backbone, FusedBackbone)
                    answers = spec.family.block_len
                    window = answers + int(spec.logit_shift)
                    fitting = Shape.fitting(len(requests), window, n_rows - len(requests) * window, answers)
                    shape = fitting._replace(canvas_rows=window)  # rounded up it would be twice as much
                    step = stack.enter_context(checked_out(backbone, spec.logit_shift, shape, GraphedStep))
                context = gather(placed, rooms, backbone, into=step.buffers if step else None)
                passes = _Passes(self._model, context, self._cache, self._backend, step)
                yield from denoise(requests, passes.forward, spec, self._rule, canvases)

        return run()


def why_not(model: LoadedModel) -> str | None:
    """Why a model cannot be decoded in this way, or None."""
    if causal_block(model.spec.family) is None:
        return None
    return (
        f"{model.spec.name} is block-causal: KV of its finished blocks is exact and later masks are not seen, so that "
        "nothing is left to approximate; take decoder 'static_kv'"
    )


def clash(asked: Asked, options: FastDLLMOptions) -> str | None:
    """Why options cannot go with what else is asked, or None."""
    if options.context == "stored":
        return None
    if asked.placement != "sequential":
        return f"a dense context has no gaps, and placement is {asked.placement!r}; expected 'sequential'"
    return reads_no_kv(asked)


class _Passes:
    """Forward passes over buffers that hold what earlier ones left.

    Args:
        step: a captured step for the passes within a block, or None.
    """

    def __init__(
        self, model: LoadedModel, context: Context, cache: Cache, backend: str, step: GraphedStep | None
    ) -> None:
        self._model = model
        self._shift = int(model.spec.logit_shift)
        self._context = context
        self._cache = cache
        self._backend = backend
        self._step = step
        self._begun: dict[int, range] = {}  # the block whose first step each sequence has taken
        self._attend: Attend | None = None
        self._layouts: dict[str, _Layout] = {}  # of the latest pass of each way

    def forward(self, active: Sequence[int], canvases: Sequence[Canvas]) -> list[Predictions]:
        """One pass of each active sequence: of all its rows if it begins a block."""
        first = [self._begun.get(index) != canvas.block for index, canvas in zip(active, canvases, strict=True)]
        eager = [n for n in range(len(active)) if first[n] or self._step is None]
        replayed = [n for n in range(len(active)) if n not in eager]
        found: dict[int, Predictions] = {}
        for way, members in ((self._eager, eager), (self._replayed, replayed)):
            if members:
                own = [canvases[n] for n in members]
                windows = [range(len(canvases[n].ids)) if first[n] else self._window(canvases[n]) for n in members]
                found.update(zip(members, way(tuple(active[n] for n in members), own, tuple(windows)), strict=True))
        self._begun.update((index, canvas.block) for index, canvas in zip(active, canvases, strict=True))
        return [found[n] for n in range(len(active))]

    def _window(self, canvas: Canvas) -> range:
        """Canvas rows that a step within a block computes."""
        start, stop = canvas.prompt_len + canvas.block.start, canvas.prompt_len + canvas.block.stop
        return range(start - self._shift, stop if self._cache == "dual" else len(canvas.ids))

    def _eager(
        self, active: tuple[int, ...], canvases: Sequence[Canvas], windows: tuple[range, ...]
    ) -> Sequence[Predictions]:
        backbone = self._model.backbone
        if self._attend is None or self._layouts.get("eager") != (active, windows):
            context = self._context.windowed(active, windows)
            has_one_run = all(len(layout.table.lens) == 1 for layout in context.sequences)
            if has_one_run and self._backend == "triton":  # whose kernels are for few rows
                self._attend = WholeCanvasAttend(backbone.rope, context)
            else:
                self._attend = split_s_attend(backbone, context, backend=self._backend)
            self._layouts["eager"] = active, windows
        ids = torch.cat([canvas.ids[w.start : w.stop] for canvas, w in zip(canvases, windows, strict=True)])
        hidden = backbone.hidden(ids.to(backbone.device), self._attend)
        return answer_logits(self._model, hidden, canvases, windows)

    def _replayed(
        self, active: tuple[int, ...], canvases: Sequence[Canvas], windows: tuple[range, ...]
    ) -> Sequence[Predictions]:
        assert self._step is not None
        if self._layouts.get("replayed") != (active, windows):
            self._step.arrange(active, self._context.windowed(active, windows).sequences)
            self._layouts["replayed"] = active, windows
        return self._step.run(active, canvases, windows)
