"""Which position of a training row sees which: one rule, read by a dense mask and by FlexAttention's block mask.

- a chunk's position sees its chunk, of a block-causal model nothing of a later order; chunks that are encoded together
  bear one number;
- a block's position sees its own block, of it nothing of a later order, and its sample's chunks: all, or one;
- where question and chunks all see each other, they are one block;
- a position that is not used sees itself, so that no softmax is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

EVERY_CHUNK = -1

# What `mask_rule` gives and FlexAttention calls mask_mod: (row of the batch, head, seeing position, seen position).
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Marks(NamedTuple):
    """What every position of a row is; int32 [B, L] each.

    sample: number of its sample, from 1; 0 where nothing is.
    chunk: number of its chunk in the row, from 1; 0 outside.
    block: number of its question block in the row, from 1; 0 outside.
    sees: the chunk that a block's position sees, or `EVERY_CHUNK`.
    order: within its block or chunk; a position sees those of its own and of lower order. A block sees chunks whole.
    """

    sample: torch.Tensor
    chunk: torch.Tensor
    block: torch.Tensor
    sees: torch.Tensor
    order: torch.Tensor

    def without_order(self) -> Marks:
        """The same, each block seen whole from all its positions."""
        return self._replace(order=torch.zeros_like(self.order))


def mask_rule(marks: Marks, *, first: int = 0) -> Rule:
    """The rule for seeing positions that are counted from `first`, and seen ones counted from 0."""
    sample, chunk, block, sees, order = marks

    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        del h  # no head differs
        q = q + first
        in_block = block[b, q] > 0
        earlier = order[b, kv] <= order[b, q]
        same_block = in_block & (block[b, q] == block[b, kv]) & earlier
        is_context = (chunk[b, kv] > 0) & (block[b, kv] == 0)
        is_context = is_context & (sample[b, q] == sample[b, kv])
        reads = in_block & is_context & ((sees[b, q] == EVERY_CHUNK) | (sees[b, q] == chunk[b, kv]))
        same_chunk = ~in_block & is_context & (chunk[b, q] == chunk[b, kv]) & earlier
        return same_block | reads | same_chunk | (q == kv)

    return rule


def dense_mask(marks: Marks, *, first: int = 0) -> torch.Tensor:
    """bool [B, 1, L - first, L], True where a position is seen."""
    n_rows, length = marks.chunk.shape
    device = marks.chunk.device
    b = torch.arange(n_rows, device=device)[:, None, None, None]
    q = torch.arange(length - first, device=device)[None, None, :, None]
    kv = torch.arange(length, device=device)[None, None, None, :]
    return mask_rule(marks, first=first)(b, torch.zeros_like(b), q, kv)


def block_mask(marks: Marks, *, first: int = 0) -> BlockMask:
    """The same for FlexAttention on a GPU."""
    n_rows, length = marks.chunk.shape
    return create_block_mask(
        mask_rule(marks, first=first), n_rows, None, length - first, length, device=marks.chunk.device, _compile=True
    )
