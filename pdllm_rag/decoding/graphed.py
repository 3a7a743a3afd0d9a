"""A denoising step as a CUDA graph: captured once for a shape, replayed for every step and question of that shape.

- a shape is a number of sequences, of canvas rows each, and of buffer rows for their context; what differs between
  questions of one shape (tokens, places, which rows are whose) lies in tensors that the graph reads;
- a step copies token ids to the device and, per answer row, one token and its probability back; which of them become
  final is decided on the host, by the same rule as everywhere;
- rows that a canvas does not have, and sequences that are finished, are computed and nobody reads them.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from pdllm_rag.attends import PackedSplitSAttend
from pdllm_rag.attention import ChunkTable, causal_block
from pdllm_rag.attention.triton import Room, SplitAttention
from pdllm_rag.context import Context, SequenceLayout, buffers
from pdllm_rag.decoding.base import Canvas
from pdllm_rag.decoding.predictions import DeviceRows
from pdllm_rag.models.fused import FusedBackbone
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.placement import round_up

logger = logging.getLogger(__name__)

ROWS_APART = 32  # canvas rows are rounded up to a multiple: fewer shapes to capture
CONTEXT_APART = 1024  # and rows of context
_CAPTURING = Lock()  # one capture at a time in a process
MAX_IDLE = 4  # captured steps of one model that wait for a question of their shape
MAX_IDLE_BYTES = 4 << 30  # of their buffers together, but the one used last always waits


def can_capture(model: LoadedModel, backend: str) -> bool:
    """Whether steps can be captured: with Triton, for dense bidirectional models of plain weights."""
    is_plain = isinstance(model.backbone, FusedBackbone) and causal_block(model.spec.family) is None
    return backend == "triton" and is_plain


class Shape(NamedTuple):
    """What a captured step is made for.

    canvas_rows: of each sequence. context_rows: of all sequences, canvases not counted. answer_rows: the last rows of a
    canvas, whose tokens are predicted.
    """

    n_sequences: int
    canvas_rows: int
    context_rows: int
    answer_rows: int

    @classmethod
    def fitting(cls, n_sequences: int, canvas_rows: int, context_rows: int, answer_rows: int) -> Shape:
        """The smallest shape in use that holds these."""
        return cls(
            n_sequences, round_up(canvas_rows, ROWS_APART), round_up(max(1, context_rows), CONTEXT_APART), answer_rows
        )

    def serves(self, other: Shape) -> bool:
        """Whether a step of this shape does for another one: room for more context costs nothing, more canvas does."""
        return (
            (self.n_sequences, self.answer_rows) == (other.n_sequences, other.answer_rows)
            and self.context_rows >= other.context_rows
            and other.canvas_rows <= self.canvas_rows <= other.canvas_rows + ROWS_APART
        )

    def layouts(self) -> tuple[SequenceLayout, ...]:
        """Valid ones, as long as the shape allows, so that a choice of parts that is made by them fits the largest."""
        rows, n_context = self.canvas_rows, self.context_rows // self.n_sequences
        places = [(index * n_context, self.context_rows + index * rows) for index in range(self.n_sequences)]
        return tuple(
            SequenceLayout(ChunkTable.of([(first, n_context, 0), (canvas, rows, 0)]), canvas, rows, 0)
            for first, canvas in places
        )

    def predicted(self, index: int, canvas: Canvas, stop: int) -> torch.Tensor:
        """int64 [M], which of all predicted rows are a sequence's open ones; the last is canvas row `stop` - 1."""
        return index * self.answer_rows + self.answer_rows - stop + canvas.prompt_len + canvas.open_rows()

    def reserve(self, attention: SplitAttention, n_rows: int) -> None:
        """Make an attention's tables as large as the shape may need with so many query rows of each sequence."""
        n_buffer = self.context_rows + self.n_sequences * self.canvas_rows
        n_blocks = n_buffer // attention.tiles.block_n + 4 * self.n_sequences
        n_items = attention.n_splits * self.n_sequences
        attention.reserve(Room(self.n_sequences * n_rows, n_rows, n_items, n_blocks))


class GraphedStep:
    """One shape's step and its buffers, for one decode at a time.

    Attributes:
        buffers: k, v [Y, rows, G, D] that contexts are gathered into.

    Raises:
        ValueError: (`arrange`) a canvas or context does not fit the shape.
    """

    @torch.inference_mode()
    def __init__(self, backbone: FusedBackbone, logit_shift: bool, shape: Shape) -> None:
        started = time.perf_counter()
        self.shape = shape
        self._backbone: FusedBackbone = weakref.proxy(backbone)  # which holds this step: no circle keeps weights alive
        self.logit_shift = logit_shift
        self.made_by: object = GraphedStep
        device = backbone.device
        n_rows = shape.n_sequences * shape.canvas_rows
        n_predicted = shape.n_sequences * shape.answer_rows
        self.buffers = buffers(backbone, shape.context_rows + n_rows)
        pinned = device.type == "cuda"
        self._ids = torch.zeros(n_rows, dtype=torch.int64, device=device)
        self._ids_host = torch.zeros(n_rows, dtype=torch.int64, pin_memory=pinned)
        self._predicting = torch.zeros(n_predicted, dtype=torch.int64, device=device)
        self._found_host = torch.zeros(n_predicted, 3, dtype=torch.int32, pin_memory=pinned)
        self._attend = PackedSplitSAttend(backbone, Context(*self.buffers, shape.layouts()))
        shape.reserve(self._attend.attention, shape.canvas_rows)
        self._graph = captured(device, self._compute) if device.type == "cuda" else None
        logger.info("captured a denoising step of %s in %.2f s", shape, time.perf_counter() - started)

    @torch.inference_mode()
    def arrange(self, active: Sequence[int], layouts: Sequence[SequenceLayout]) -> None:
        """Say which sequences are computed, and where their keys lie in `buffers`.

        Args:
            active: their numbers, each below the shape's `n_sequences`.
        """
        rows, answers = self.shape.canvas_rows, self.shape.answer_rows
        if any(layout.n_rows > rows for layout in layouts):
            raise ValueError(f"canvases of {[one.n_rows for one in layouts]} rows in a step captured for {rows} each")
        slots = torch.full((self.shape.n_sequences * rows,), -1, dtype=torch.int32)
        positions = torch.zeros(len(slots), dtype=torch.int64)
        predicting = torch.zeros(self.shape.n_sequences * answers, dtype=torch.int64)
        for index, layout in zip(active, layouts, strict=True):
            own = slice(index * rows, index * rows + layout.n_rows)
            slots[own] = layout.slots()
            positions[own] = layout.positions()
            window = torch.arange(layout.n_rows - answers, layout.n_rows) - int(self.logit_shift)
            predicting[index * answers : (index + 1) * answers] = (index * rows + window).clamp(min=0)
        turn = self._attend.turn
        cos, sin = self._backbone.rope.tables(positions.to(self._backbone.device))
        turn.cos.copy_(cos)
        turn.sin.copy_(sin)
        turn.slots.copy_(slots)
        self._predicting.copy_(predicting)
        self._attend.attention.refill(
            [layout.table for layout in layouts], [i * rows for i in active], [layout.n_rows for layout in layouts]
        )

    @torch.inference_mode()
    def run(self, active: Sequence[int], canvases: Sequence[Canvas], windows: Sequence[range]) -> list[DeviceRows]:
        """One forward pass over the canvases of the active sequences.

        Args:
            windows: canvas rows of each that are computed, as they were arranged.
        """
        rows = self.shape.canvas_rows
        for index, canvas, window in zip(active, canvases, windows, strict=True):
            own = canvas.ids[window.start : window.stop]
            self._ids_host[index * rows : index * rows + len(own)] = own
        self._ids.copy_(self._ids_host, non_blocking=True)
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
        self._found_host.copy_(self._found, non_blocking=True)
        if self._graph is not None:
            torch.cuda.current_stream(self._backbone.device).synchronize()
        return [
            DeviceRows(self._backbone, self._raw, self._found_host, self.shape.predicted(index, canvas, window.stop))
            for index, canvas, window in zip(active, canvases, windows, strict=True)
        ]

    def _compute(self) -> None:
        hidden = self._backbone.hidden(self._ids, self._attend)
        self._raw = self._backbone.raw_logits(hidden[self._predicting])
        self._found = self._backbone.proposals(self._raw)

    @property
    def n_bytes(self) -> int:
        """Bytes of its buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


def captured(device: torch.device, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `compute` launches; it is called three times, the last time for the capture."""
    cuda: Any = torch.cuda
    graph = torch.cuda.CUDAGraph()
    with _CAPTURING, cuda.device(device):  # of which torch captures a stream and waits for all
        here, stream = cuda.current_stream(), cuda.Stream()
        stream.wait_stream(here)
        with cuda.stream(stream):  # compiles the kernels, and lets the libraries choose theirs
            for _ in range(2):
                compute()
        here.wait_stream(stream)
        # other threads may load chunks meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            compute()
    return graph


class Step(Protocol):
    """What is captured for a shape, and serves one decode at a time."""

    shape: Shape
    logit_shift: bool

    @property
    def made_by(self) -> object: ...
    @property
    def n_bytes(self) -> int: ...


StepT = TypeVar("StepT", bound=Step)


@contextmanager
def checked_out(
    backbone: FusedBackbone, logit_shift: bool, shape: Shape, make: Callable[[FusedBackbone, bool, Shape], StepT]
) -> Iterator[StepT]:
    """A captured step that serves this shape, for the caller alone; kept for the next one afterwards.

    Args:
        make: makes one; a step serves those who would make it alike (`Step.made_by`).
    """
    idle: list[Any] = backbone.captures
    with backbone.captures_lock:
        fitting = [
            one
            for one in reversed(idle)
            if (one.made_by, one.logit_shift) == (make, logit_shift) and one.shape.serves(shape)
        ]
        # The one with the fewest rows to compute for nothing, of those the one used last. Not by its place: the
        # collector may end a decode that was left halfway in this thread at any moment, and that changes the list.
        step: StepT | None = min(fitting, key=lambda one: one.shape.canvas_rows, default=None)
        if step is not None:
            idle[:] = [one for one in idle if one is not step]
    if step is None:
        step = make(backbone, logit_shift, shape)
    try:
        yield step
    finally:
        with backbone.captures_lock:
            idle.append(step)
            while len(idle) > 1 and (len(idle) > MAX_IDLE or sum(one.n_bytes for one in idle) > MAX_IDLE_BYTES):
                del idle[0]
