"""The DyLLM decoder's passes as CUDA graphs: shapes are fixed by the capacity, so no layer waits for the host.

A graph is captured for a number of rows per sequence (a whole canvas, or the answer's) and of salient rows that a layer
has room for; it serves every pass that fits. What differs between passes and questions lies in tensors that it reads.

Axes: N rows of all sequences, S salient ones that there is room for, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pdllm_rag.attention.triton import SplitAttention
from pdllm_rag.attention.turn import Turn
from pdllm_rag.context import Context, SequenceLayout, buffers
from pdllm_rag.decoding.base import Canvas
from pdllm_rag.decoding.dyllm_plan import DyLLMOptions, Part, PassKind, PassRecord, Plan
from pdllm_rag.decoding.dyllm_rows import Caches, hidden_states
from pdllm_rag.decoding.graphed import Shape, captured
from pdllm_rag.decoding.predictions import DeviceRows
from pdllm_rag.models.fused import FusedBackbone

FORCED, ABSENT = -8.0, 8.0  # added to a cosine: of a row that always is salient, and of one that no canvas has


@dataclass(frozen=True)
class DyLLMSteps:
    """Makes what one decode at a time is computed with (see `graphed.checked_out`).

    Attributes:
        response_rows: most rows of one sequence in a response pass.
    """

    options: DyLLMOptions
    tau: float
    response_rows: int

    def __call__(self, backbone: FusedBackbone, logit_shift: bool, shape: Shape) -> DyLLMStep:
        return DyLLMStep(backbone, logit_shift, shape, self)


class DyLLMStep:
    """Buffers and caches for a shape, and the passes that were captured over them.

    Attributes:
        buffers: k, v [Y, rows, G, D] that contexts are gathered into.
    """

    @torch.inference_mode()
    def __init__(self, backbone: FusedBackbone, logit_shift: bool, shape: Shape, made_by: DyLLMSteps) -> None:
        self.backbone: FusedBackbone = weakref.proxy(backbone)  # which holds this step
        self.logit_shift, self.shape, self.made_by = logit_shift, shape, made_by
        n_rows = shape.n_sequences * shape.canvas_rows
        self.buffers = buffers(backbone, shape.context_rows + n_rows)
        self.buffers[1].zero_()  # a first pass takes the difference to what is there
        self.caches = Caches(backbone, made_by.options, n_rows + 1)  # the last is of rows that no canvas has
        self._passes: dict[tuple[int, int], _Pass] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes of its buffers and caches."""
        return sum(buffer.nbytes for buffer in self.buffers) + self.caches.n_bytes

    @torch.inference_mode()
    def run(
        self, plan: Plan, context: Context, active: Sequence[int], canvases: Sequence[Canvas]
    ) -> tuple[list[DeviceRows], PassRecord]:
        """One forward pass over the canvases of the active sequences."""
        kind, parts = plan.next(active, canvases)
        n_rows = self.made_by.response_rows
        if any(part.n_rows > n_rows for part in parts):
            n_rows = self.shape.canvas_rows
        room = self.made_by.options.room(n_rows)
        if any(part.room > room for part in parts):
            room = n_rows
        if (n_rows, room) not in self._passes:
            self._passes[n_rows, room] = _Pass(weakref.proxy(self), n_rows, room)
        layouts = context.narrowed(active, [len(canvas.ids) for canvas in canvases]).sequences
        return self._passes[n_rows, room].run(kind, active, layouts, parts, canvases)


class _Inputs(NamedTuple):
    """What the host says of a pass: views of one int32 buffer. bias: float32; the others as the kernels have them."""

    ids: torch.Tensor
    bias: torch.Tensor
    exact_of: torch.Tensor
    chosen: torch.Tensor
    take: torch.Tensor
    rooms: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, buffer: torch.Tensor, sizes: Sequence[int]) -> _Inputs:
        views = cls(*torch.split(buffer, list(sizes)))
        return views._replace(bias=views.bias.view(torch.float32))

    def clear(self) -> None:
        """No row is in the pass: run so, it changes nothing that is kept."""
        for view, value in zip(self, (0, ABSENT, -1, -1, 0, 0, 0), strict=True):
            view.fill_(value)


class _Pass:
    """`dyllm_rows.Rows` of fixed shapes: of each sequence `n_rows` rows, and room for `room` salient ones."""

    def __init__(self, step: DyLLMStep, n_rows: int, room: int) -> None:
        self._step, self._n_rows, self._room = step, n_rows, room
        backbone, shape, device = step.backbone, step.shape, step.backbone.device
        n, s, n_predicted = (shape.n_sequences * count for count in (n_rows, room, shape.answer_rows))
        sizes = (n, n, n, s, s, shape.n_sequences, 2)
        pinned = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        self._buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._told, self._inputs = _Inputs.of(self._host, sizes), _Inputs.of(self._buffer, sizes)
        self._slots = torch.full((n,), -1, dtype=torch.int32, device=device)
        self._places = torch.zeros(n, dtype=torch.int64, device=device)
        self._predicting = torch.zeros(n_predicted, dtype=torch.int64, device=device)
        self._found_host = torch.zeros(n_predicted, 3, dtype=torch.int32, pin_memory=pinned)
        self._turn = Turn(*backbone.rope.tables(self._places), slots=torch.full_like(self._slots, -1))
        self._ranks = torch.zeros(n, dtype=torch.float32, device=device)
        self._change = torch.zeros(s, backbone.n_kv_heads, backbone.head_dim, dtype=backbone.dtype, device=device)
        self._all, self._exact = self._attention(n_rows), self._attention(room)
        self._layout: object = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def _attention(self, n_rows: int) -> SplitAttention:
        backbone, shape = self._step.backbone, self._step.shape
        attention = SplitAttention(
            [layout.table for layout in shape.layouts()],
            [n_rows] * shape.n_sequences,
            n_heads=backbone.n_heads,
            n_kv_heads=backbone.n_kv_heads,
            head_dim=backbone.head_dim,
            dtype=backbone.dtype,
            device=backbone.device,
        )
        shape.reserve(attention, n_rows)
        return attention

    def run(
        self,
        kind: PassKind,
        active: Sequence[int],
        layouts: Sequence[SequenceLayout],
        parts: Sequence[Part],
        canvases: Sequence[Canvas],
    ) -> tuple[list[DeviceRows], PassRecord]:
        """The pass: what it says of each canvas's open rows, and what was computed."""
        layout = tuple(active), tuple((one.n_rows, part.first) for one, part in zip(layouts, parts, strict=True))
        if layout != self._layout:
            self._arrange(active, layouts, parts)
            self._layout = layout
        device, n_layers = self._step.backbone.device, self._step.backbone.n_layers
        if self._graph is None and device.type == "cuda":
            self._inputs.clear()
            self._graph = captured(device, self._compute)
        self._tell(active, parts, canvases)
        self._buffer.copy_(self._host, non_blocking=True)
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
        self._found_host.copy_(self._found, non_blocking=True)
        n_chosen, n_left_out = self._inputs.counts.tolist()  # waits for all of it
        shape = self._step.shape
        found = [
            DeviceRows(
                self._step.backbone, self._raw, self._found_host, shape.predicted(index, canvas, len(canvas.ids))
            )
            for index, canvas in zip(active, canvases, strict=True)
        ]
        n_canvas, n_rows = sum(len(canvas.ids) for canvas in canvases), sum(part.n_rows for part in parts)
        return found, PassRecord(kind, n_canvas, n_rows, n_chosen / n_layers, n_left_out / n_layers)

    def _arrange(self, active: Sequence[int], layouts: Sequence[SequenceLayout], parts: Sequence[Part]) -> None:
        """Say where the rows of each active sequence lie."""
        step, rows, answers = self._step, self._n_rows, self._step.shape.answer_rows
        slots = torch.full((len(self._slots),), -1, dtype=torch.int32)
        places = torch.full((len(slots),), step.caches.contexts.shape[1] - 1, dtype=torch.int64)
        positions = torch.zeros(len(slots), dtype=torch.int64)
        predicting = torch.zeros(len(self._predicting), dtype=torch.int64)
        for index, layout, part in zip(active, layouts, parts, strict=True):
            own = slice(index * rows, index * rows + part.n_rows)
            slots[own] = layout.slots()[part.first :]
            places[own] = index * step.shape.canvas_rows + torch.arange(part.first, layout.n_rows)
            positions[own] = layout.positions()[part.first :]
            window = torch.arange(part.n_rows - answers, part.n_rows) - int(step.logit_shift)
            predicting[index * answers : (index + 1) * answers] = index * rows + window
        cos, sin = step.backbone.rope.tables(positions.to(self._places.device))
        for ours, new in (
            (self._slots, slots),
            (self._places, places),
            (self._predicting, predicting),
            (self._turn.cos, cos),
            (self._turn.sin, sin),
        ):
            ours.copy_(new)
        tables = [layout.table for layout in layouts]
        self._all.refill(tables, [i * rows for i in active], [part.n_rows for part in parts])
        self._exact.refill(tables, [i * self._room for i in active], [self._room] * len(active))

    def _tell(self, active: Sequence[int], parts: Sequence[Part], canvases: Sequence[Canvas]) -> None:
        """Fill the host's side of the inputs."""
        told, rows, room = self._told, self._n_rows, self._room
        told.clear()
        for index, part, canvas in zip(active, parts, canvases, strict=True):
            own, places = slice(index * rows, index * rows + part.n_rows), index * room
            chosen = (index * rows + part.start.nonzero()[:, 0]).int()
            told.ids[own] = canvas.ids[part.first :].int()
            told.bias[own] = part.forced * FORCED
            told.chosen[places : places + len(chosen)] = told.take[places : places + len(chosen)] = chosen
            told.exact_of[chosen] = torch.arange(places, places + len(chosen), dtype=torch.int32)
            told.rooms[index] = part.room

    def _compute(self) -> None:
        backbone = self._step.backbone
        hidden = hidden_states(backbone, self._inputs.ids, self)
        self._raw = backbone.raw_logits(hidden[self._predicting])
        self._found = backbone.proposals(self._raw)

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """See `dyllm_rows.Rows.taken`."""
        return x.index_select(0, self._inputs.take)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `dyllm_rows.Rows.attend`."""
        from triton import cdiv, next_power_of_2

        from pdllm_rag.decoding import dyllm_kernels

        inputs, caches, rows, room = self._inputs, self._step.caches, self._n_rows, self._room
        keys, values = (buffer[layer] for buffer in self._step.buffers)
        n_heads, n_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        n_sequences, ratio, width = len(inputs.rooms), n_heads // n_kv_heads, n_heads * head_dim
        q, _ = self._turn(q, q, keys=keys)  # with no slots, so that no key is written
        dyllm_kernels.renew_kernel[(len(k),)](
            k, v, keys, values, self._change, self._turn.cos, self._turn.sin, inputs.chosen, self._slots,
            keys.stride(0), N_KV_HEADS=n_kv_heads, HEAD_DIM=head_dim, KV_HEADS=next_power_of_2(n_kv_heads),
        )  # fmt: skip
        lse = self._all.lse(q, keys)
        exact = self._exact(self.taken(q), keys, values).out
        self._context = torch.empty_like(q)
        dyllm_kernels.shift_kernel[(cdiv(rows * ratio, 64), n_kv_heads, n_sequences)](
            q, lse, keys, self._change, caches.contexts[layer], self._context, inputs.chosen, self._slots,
            self._places, math.log2(math.e) / math.sqrt(head_dim), keys.stride(0), rows, room,
            N_HEADS=n_heads, RATIO=ratio, HEAD_DIM=head_dim, BLOCK_M=64, BLOCK_N=32,
        )  # fmt: skip
        dyllm_kernels.compare_kernel[(len(q),)](
            self._context, exact, caches.contexts[layer], caches.compared(layer), inputs.exact_of, self._places,
            inputs.bias, self._ranks, WIDTH=width, BLOCK=next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        dyllm_kernels.pick_kernel[(cdiv(rows, 64), n_sequences)](
            self._ranks, inputs.chosen, inputs.take, inputs.exact_of, inputs.rooms, inputs.counts,
            self._step.made_by.tau, rows, room, BLOCK=64,
        )  # fmt: skip
        return self._context

    def fed(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        """See `dyllm_rows.Rows.fed`."""
        from triton import next_power_of_2

        from pdllm_rag.decoding import dyllm_kernels

        caches, hidden, width = self._step.caches, out.shape[1], self._context[0].numel()
        reference = None if caches.reference is None else caches.reference[layer]
        dyllm_kernels.keep_kernel[(len(out),)](
            out, caches.outputs[layer], self._context, self._context if reference is None else reference,
            self._inputs.chosen, self._places, HIDDEN=hidden, WIDTH=width,
            BLOCK=next_power_of_2(max(hidden, width)), HAS_REFERENCE=reference is not None, num_warps=8,
        )  # fmt: skip
        return caches.outputs[layer].index_select(0, self._places)
