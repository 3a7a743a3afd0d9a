"""The attentions that the backbone is run with. Each owns its positions and caches.

- `DenseAttend`: every row of a sequence sees every row of it (or what a mask allows);
- `CaptureAttend`: the same, and keeps keys and values: the prefill; `WholeCanvasAttend` keeps them for later steps;
- `SplitSAttend`: canvas rows see static chunk KV and their own canvas (of a block-causal model: no later block of it):
  scoring and decoding; `PackedSplitSAttend` is the same for all sequences at once, on a GPU.

Axes: N packed rows, L rows of one sequence, H query heads, G key/value heads, D head dim, Y layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pdllm_rag.attention import AttentionState, block_masks, resolve, split_s_attention
from pdllm_rag.attention.triton import SplitAttention, why_not
from pdllm_rag.attention.turn import Turn
from pdllm_rag.context import Context
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.models.rope import Rope, rotate


class DenseAttend:
    """Full attention within each packed sequence.

    Args:
        lens: rows of each sequence; they sum to N.
        positions: int64 [N].
        masks: per sequence a bool [L, L] (True: row may see column), or None for all.
    """

    def __init__(
        self,
        rope: Rope,
        lens: Sequence[int],
        positions: torch.Tensor,
        masks: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._cos, self._sin = rope.tables(positions)
        head_dim = 2 * len(rope.inv_freq)
        has_kernels = positions.device.type == "cuda" and not why_not(positions.device, torch.float32, head_dim)
        self._turn = Turn(self._cos, self._sin) if has_kernels else None
        self._lens = tuple(lens)
        self._masks = masks

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        del layer  # no layer differs
        return self.attend(*self.rotated(q, k), v)

    def rotated(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k at their positions, rounded once to their own dtype."""
        if self._turn is not None:
            return self._turn(q, k)
        return rotate(q, self._cos, self._sin).to(q.dtype), rotate(k, self._cos, self._sin).to(k.dtype)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Context [N, H, D] of rotated q and k."""
        if self._masks is None and len(set(self._lens)) == 1:
            return _full(q, k, v, len(self._lens))
        parts, start = [], 0
        for index, length in enumerate(self._lens):
            rows = slice(start, start + length)
            if self._masks is None:
                parts.append(_full(q[rows], k[rows], v[rows], 1))
            else:
                parts.append(_masked(q[rows], k[rows], v[rows], self._masks[index]))
            start += length
        return torch.cat(parts)


class CaptureAttend:
    """`DenseAttend` that keeps each layer's rotated keys and values, and one layer's mean un-rotated key."""

    def __init__(
        self,
        rope: Rope,
        lens: Sequence[int],
        positions: torch.Tensor,
        masks: Sequence[torch.Tensor] | None = None,
        *,
        sketch_layer: int,
    ) -> None:
        self._dense = DenseAttend(rope, lens, positions, masks)
        self._lens = tuple(lens)
        self._sketch_layer = sketch_layer
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.sketches: list[torch.Tensor] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer == self._sketch_layer:
            for part in torch.split(k.float(), list(self._lens)):
                self.sketches.append((part[1:] if len(part) > 1 else part).mean(dim=0).flatten())
        q, k = self._dense.rotated(q, k)
        self.keys.append(k)
        self.values.append(v.contiguous())  # of packed heads, to let the others go
        return self._dense.attend(q, k, v)


class WholeCanvasAttend(DenseAttend):
    """`DenseAttend` of whole canvases without chunks, which leaves their keys and values in a context's buffers."""

    def __init__(self, rope: Rope, context: Context) -> None:
        positions, n_rows = _canvas_rows(context, rope)
        super().__init__(rope, n_rows, positions)
        self._context = context
        self._slots = torch.cat([s.slots() for s in context.sequences]).long().to(context.k.device)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = self.rotated(q, k)
        self._context.k[layer, self._slots] = k
        self._context.v[layer, self._slots] = v
        return self.attend(q, k, v)


class SplitSAttend:
    """Canvas rows over static chunk KV and over themselves; the canvas is one more split of the context.

    Args:
        context: buffers with room for every sequence's canvas; its canvas rows are overwritten at each call.
        block: positions of one block of a block-causal model, None for a bidirectional one.
        backend: a Split-S backend.
    """

    def __init__(self, rope: Rope, context: Context, *, block: int | None = None, backend: str = "auto") -> None:
        positions, n_rows = _canvas_rows(context, rope)
        self._cos, self._sin = rope.tables(positions)
        self._rope = rope
        self.context = context
        masks = context.masks or block_masks(positions, n_rows, block)
        self._masks: Sequence[torch.Tensor | None] = masks or [None] * len(n_rows)
        self._backend = backend

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = rotate(q, self._cos, self._sin).to(q.dtype)
        k = rotate(k, self._cos, self._sin).to(k.dtype)
        keys, values = self.context.k[layer], self.context.v[layer]
        parts, start = [], 0
        for sequence, mask in zip(self.context.sequences, self._masks, strict=True):
            rows = slice(start, start + sequence.n_rows)
            canvas = slice(sequence.canvas_row, sequence.canvas_row + sequence.n_rows)
            keys[canvas], values[canvas] = k[rows], v[rows]
            state = split_s_attention(
                q[rows], keys, values, sequence.table, rope=self._rope, mask=mask, backend=self._backend
            )
            self.attended(layer, q[rows], state)
            parts.append(state.out)
            start = rows.stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attended(self, layer: int, q: torch.Tensor, state: AttentionState) -> None:
        """Called with each sequence's rotated queries and result; a subclass may look on."""


class PackedSplitSAttend:
    """As `SplitSAttend`, with all sequences in the same launches (backend "triton")."""

    def __init__(self, backbone: Backbone, context: Context, *, block: int | None = None) -> None:
        rope, device = backbone.rope, backbone.device
        positions, n_rows = _canvas_rows(context, rope)
        self._context = context
        self.turn = Turn(*rope.tables(positions), slots=torch.cat([s.slots() for s in context.sequences]).to(device))
        self.attention = SplitAttention(
            [sequence.table for sequence in context.sequences],
            n_rows,
            n_heads=backbone.n_heads,
            n_kv_heads=backbone.n_kv_heads,
            head_dim=backbone.head_dim,
            dtype=backbone.dtype,
            device=device,
            rope=rope,
            masks=context.masks or block_masks(positions, n_rows, block),
        )

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self._context.k[layer], self._context.v[layer]
        turned, _ = self.turn(q, k, v, keys=keys, values=values)
        return self.attention(turned, keys, values).out


def split_s_attend(
    backbone: Backbone, context: Context, *, block: int | None = None, backend: str = "auto"
) -> SplitSAttend | PackedSplitSAttend:
    """Canvas rows over a context, by the Split-S backend that is asked for."""
    if resolve(backend, backbone.device, backbone.dtype, backbone.head_dim) == "triton":
        return PackedSplitSAttend(backbone, context, block=block)
    return SplitSAttend(backbone.rope, context, block=block, backend=backend)


def _canvas_rows(context: Context, rope: Rope) -> tuple[torch.Tensor, list[int]]:
    """Positions int64 [N] of all canvas rows, and the rows of each sequence."""
    positions = torch.cat([s.positions() for s in context.sequences]).to(rope.inv_freq.device)
    return positions, [s.n_rows for s in context.sequences]


def _full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n_sequences: int) -> torch.Tensor:
    """Unmasked attention of equally long sequences; the query heads of one key head are packed into its rows."""
    n_rows, n_heads, head_dim = q.shape
    length, n_kv = n_rows // n_sequences, k.shape[1]
    q = q.view(n_sequences, length, n_kv, n_heads // n_kv, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(n_sequences, n_kv, -1, head_dim)
    k = k.view(n_sequences, length, n_kv, head_dim).transpose(1, 2)
    v = v.view(n_sequences, length, n_kv, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v)
    out = out.reshape(n_sequences, n_heads, length, head_dim)  # its strides are the kernel's choice
    return out.transpose(1, 2).reshape(n_rows, n_heads, head_dim)


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)
