"""Attention of training rows: FlexAttention under a block mask on a GPU, torch's own under a dense mask elsewhere.

Axes: B rows, L positions that see, M positions that are seen, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pdllm_rag.models.rope import rotate

Mask = BlockMask | torch.Tensor
KeysValues = tuple[torch.Tensor, torch.Tensor]
Tables = tuple[torch.Tensor, torch.Tensor]


class RowsAttend:
    """Attention of B rows of L positions, packed to B x L, in one layer.

    Args:
        tables: cos and sin, float32 [B x L, 1, D].
        mask: of [B, L, M].
        before: rotated keys and values [B, G, M - L, D] that stand before the rows' own.

    Attributes:
        own: the rows' own rotated keys and values, [B, G, L, D], once it was called.
    """

    def __init__(self, tables: Tables, mask: Mask, n_rows: int, before: KeysValues | None = None) -> None:
        self._tables, self._mask, self._n_rows, self._before = tables, mask, n_rows, before
        self.own: KeysValues | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Context [B x L, H, D] of un-rotated q [B x L, H, D] and k, v [B x L, G, D]."""
        q, k = (self._by_rows(rotate(x, *self._tables).to(x.dtype)) for x in (q, k))
        v = self._by_rows(v)
        self.own = (k, v)
        if self._before is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self._before, (k, v), strict=True))
        out = _attention(q, k, v, self._mask)
        return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])

    def _by_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, L, D] of packed [B x L, heads, D]."""
        return x.view(self._n_rows, -1, *x.shape[1:]).transpose(1, 2)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
