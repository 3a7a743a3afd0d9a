"""The layer loop of the DyLLM decoder, and its rows on any device: as many as are salient, one sequence at a time.

Per layer and canvas row four things outlive a pass: key, value, attention context (before the output projection) and
feed-forward output. In a layer, with S the rows that were salient in the layer before:

1. keys and values of S are computed and replace the kept ones; dV is what the values changed by;
2. the context of a row of S is its exact attention; of any other row it is the kept one + P dV, where P are the
   softmax weights of the row's present query over all present keys, at S;
3. S becomes the rows whose context turned by more than tau allows; only they get a new feed-forward output.

Source: DyLLM (arXiv 2603.08026). P dV leaves out that the weights of the other keys changed too: what that amounts to
stays in the kept context until the row is salient.

Axes: N rows of all sequences in the pass, S salient ones, H query heads, G key/value heads, D head dim, Y layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pdllm_rag.attention import ChunkTable, block_masks, split_s_attention
from pdllm_rag.context import Context
from pdllm_rag.decoding.base import Canvas
from pdllm_rag.decoding.dyllm_plan import DyLLMOptions, Part, PassRecord, Plan
from pdllm_rag.models.backbone import Backbone, on_device_of
from pdllm_rag.models.rope import rotate


class Rows(Protocol):
    """The rows of one pass and what is kept of them."""

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """[S, ...], the salient rows of x [N, ...]."""
        ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Context of every row, [N, H, D], from q [N, H, D] and k, v [S, G, D], all un-rotated; finds the next S."""
        ...

    def fed(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        """Feed-forward output of every row, [N, hidden], from that of the salient ones [S, hidden]."""
        ...


class Caches:
    """Contexts [Y, M, H * D] and feed-forward outputs [Y, M, hidden] of M canvas rows; their keys lie elsewhere.

    Attributes:
        reference: contexts of the pass that last computed a row anew, if the options compare with them.
    """

    def __init__(self, backbone: Backbone, options: DyLLMOptions, n_rows: int) -> None:
        def zeros(width: int) -> torch.Tensor:
            return torch.zeros(backbone.n_layers, n_rows, width, dtype=backbone.dtype, device=backbone.device)

        width = backbone.n_heads * backbone.head_dim
        self.contexts, self.outputs = zeros(width), zeros(backbone.model.config.hidden_size)
        self.reference = zeros(width) if options.similarity == "refresh" else None

    def compared(self, layer: int) -> torch.Tensor:
        """[M, H * D] that new contexts are compared with."""
        return (self.contexts if self.reference is None else self.reference)[layer]

    @property
    def n_bytes(self) -> int:
        """Bytes of them all."""
        return sum(x.nbytes for x in (self.contexts, self.outputs, self.reference) if x is not None)


@torch.inference_mode()
def hidden_states(backbone: Backbone, ids: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Final normed hidden states [N, hidden] of the rows of a pass, with token ids int64 [N]."""
    with on_device_of(ids):
        x, delta = backbone.model.model.embed_tokens(ids), None
        for index, layer in enumerate(backbone.model.model.layers):
            x, normed = backbone.add_norm(x, delta, layer.input_layernorm)
            q = backbone.queries(layer, normed)
            context = rows.attend(index, q, *backbone.keys_values(layer, rows.taken(normed)))
            attended = layer.self_attn.o_proj(context.flatten(1))
            x, normed = backbone.add_norm(x, attended, layer.post_attention_layernorm)
            delta = rows.fed(index, backbone.feed_forward(index, rows.taken(normed)))
        return backbone.add_norm(x, delta, backbone.model.model.norm)[1]


class _Run(NamedTuple):
    """One sequence's rows of a pass: from `start` to `stop` of N; `mask` bool [rows, canvas rows] or None."""

    start: int
    stop: int
    table: ChunkTable
    part: Part
    mask: torch.Tensor | None


class EagerState:
    """What is kept between the passes of one decode.

    Args:
        context: buffers with room for every canvas.
        tau: the threshold in force.
        block: positions of one block of a block-causal model, None for a bidirectional one.
        backend: a Split-S backend.
    """

    def __init__(
        self, backbone: Backbone, context: Context, plan: Plan, tau: float, *, block: int | None, backend: str
    ) -> None:
        self.backbone, self.context, self.plan, self.tau = backbone, context, plan, tau
        self.block, self.backend = block, backend
        rooms = [layout.n_rows for layout in context.sequences]
        self.bases = [sum(rooms[:index]) for index in range(len(rooms))]
        self.caches = Caches(backbone, plan.options, sum(rooms))

    def run(self, active: Sequence[int], canvases: Sequence[Canvas]) -> tuple[torch.Tensor, list[Part], PassRecord]:
        """One pass: hidden states [N, hidden] of its rows, the part of each canvas, and what was computed."""
        kind, parts = self.plan.next(active, canvases)
        rows = EagerRows(self, active, canvases, parts)
        ids = torch.cat([canvas.ids[part.first :] for canvas, part in zip(canvases, parts, strict=True)])
        hidden = hidden_states(self.backbone, ids.to(self.backbone.device), rows)
        counts = (rows.n_recomputed / self.backbone.n_layers, rows.n_left_out / self.backbone.n_layers)
        return hidden, parts, PassRecord(kind, sum(len(canvas.ids) for canvas in canvases), len(ids), *counts)


class EagerRows:
    """`Rows` by torch's own operations.

    Attributes:
        n_recomputed, n_left_out: rows of all layers that were computed anew, and that were salient without room.
    """

    def __init__(
        self, state: EagerState, active: Sequence[int], canvases: Sequence[Canvas], parts: Sequence[Part]
    ) -> None:
        self._state = state
        device = state.backbone.device
        self._runs: list[_Run] = []
        places, slots, positions, stop = [], [], [], 0
        layouts = state.context.narrowed(active, [len(canvas.ids) for canvas in canvases]).sequences
        canvases_at = torch.cat([layout.positions() for layout in layouts]).to(device)
        masks = block_masks(canvases_at, [layout.n_rows for layout in layouts], state.block)
        for number, (index, layout, part) in enumerate(zip(active, layouts, parts, strict=True)):
            start, stop = stop, stop + part.n_rows
            mask = None if masks is None else masks[number][part.first :]
            self._runs.append(_Run(start, stop, layout.table, part, mask))
            places.append(state.bases[index] + torch.arange(part.first, layout.n_rows))
            slots.append(layout.slots()[part.first :])
            positions.append(layout.positions()[part.first :])
        self._places, self._slots = torch.cat(places).to(device), torch.cat(slots).to(device)
        self._cos, self._sin = state.backbone.rope.tables(torch.cat(positions).to(device))
        self._forced = torch.cat([part.forced for part in parts]).to(device)
        self._is_chosen = torch.cat([part.start for part in parts]).to(device)
        self._chosen = self._is_chosen.nonzero()[:, 0]
        self.n_recomputed = self.n_left_out = 0

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """See `Rows.taken`."""
        return x[self._chosen]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `Rows.attend`."""
        caches, context, chosen = self._state.caches, self._state.context, self._chosen
        keys, values, slots = context.k[layer], context.v[layer], self._slots[chosen]
        q = rotate(q, self._cos, self._sin).to(q.dtype)
        keys[slots] = rotate(k, self._cos[chosen], self._sin[chosen]).to(k.dtype)
        change = v.float() - values[slots].float()
        values[slots] = v
        kept = caches.contexts[layer][self._places].view(q.shape)
        new = torch.cat([self._context(run, q, keys, values, kept, change) for run in self._runs])
        similarity = cosine(new.flatten(1), caches.compared(layer)[self._places])
        caches.contexts[layer][self._places] = new.flatten(1)
        self._choose(similarity)
        if caches.reference is not None:
            caches.reference[layer][self._places[self._chosen]] = new[self._chosen].flatten(1)
        return new

    def fed(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        """See `Rows.fed`."""
        outputs = self._state.caches.outputs[layer]
        outputs[self._places[self._chosen]] = out
        return outputs[self._places]

    def _context(
        self,
        run: _Run,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: torch.Tensor,
        change: torch.Tensor,
    ) -> torch.Tensor:
        """Of one sequence's rows, [rows, H, D]."""
        state, own = self._state, slice(run.start, run.stop)
        first, last = torch.searchsorted(self._chosen, torch.tensor([run.start, run.stop], device=q.device)).tolist()
        if first == last:
            return kept[own]
        # One call gives the exact rows and every row's softmax denominator; for torch's kernels two are no cheaper.
        exact = split_s_attention(
            q[own], keys, values, run.table, rope=state.backbone.rope, mask=run.mask, backend=state.backend
        )
        if last - first == run.stop - run.start:
            return exact.out
        chosen = self._chosen[first:last]
        n_heads, n_kv_heads, head_dim = q.shape[1], keys.shape[1], q.shape[2]
        queries = q[own].float().view(-1, n_kv_heads, n_heads // n_kv_heads, head_dim)
        scores = torch.einsum("lgrd,sgd->lgrs", queries, keys[self._slots[chosen]].float()) / math.sqrt(head_dim)
        weights = torch.exp(scores - exact.lse.view(*queries.shape[:3], 1))
        if run.mask is not None:
            weights = weights * run.mask[:, run.part.first + chosen - run.start][:, None, None]
        moved = torch.einsum("lgrs,sgd->lgrd", weights, change[first:last]).reshape(exact.out.shape) + kept[own].float()
        return torch.where(self._is_chosen[own, None, None], exact.out, moved.to(q.dtype))

    def _choose(self, similarity: torch.Tensor) -> None:
        """The salient rows by float32 [N]: below tau or forced, of each sequence the least similar if room is short."""
        ranked = similarity.masked_fill(self._forced, -torch.inf)
        salient = ranked < self._state.tau
        picked = salient
        if self._state.plan.options.capacity is not None:
            rank = [torch.argsort(torch.argsort(ranked[run.start : run.stop], stable=True)) for run in self._runs]
            picked = salient & torch.cat([own < run.part.room for own, run in zip(rank, self._runs, strict=True)])
        self._is_chosen, self._chosen = picked, picked.nonzero()[:, 0]
        self.n_recomputed += len(self._chosen)
        self.n_left_out += int(salient.sum()) - len(self._chosen)


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [N] between rows [N, W], norms of at least 1e-8; -2, below any cosine, where a row is no number."""
    a, b = a.float(), b.float()
    norms = a.norm(dim=1).clamp_min(1e-8) * b.norm(dim=1).clamp_min(1e-8)
    similarity: torch.Tensor = (a * b).sum(dim=1) / norms
    return similarity.nan_to_num(nan=-2.0)
