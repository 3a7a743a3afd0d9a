"""Block-causal masks: a row sees its own block of positions and every block before it.

Blocks are aligned to position 0. Placements keep to multiples of the block, so a chunk's own blocks, counted from its
BOS, are also blocks of the positions where it stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdllm_rag.models.families import Family

_PREFIX = "block-causal-"


def causal_block(family: Family) -> int | None:
    """Positions of one block of a block-causal family; None for a bidirectional one.

    Raises:
        ValueError: an unknown `prefill_mask`, or answer blocks that are no multiple of the block.
    """
    if family.prefill_mask == "bidirectional":
        return None
    number = family.prefill_mask.removeprefix(_PREFIX)
    if number == family.prefill_mask or not number.isdecimal() or int(number) < 1:
        raise ValueError(
            f"family {family.name} has prefill_mask {family.prefill_mask!r}; expected 'bidirectional' or "
            f"'{_PREFIX}<n>' with n of 1 or more"
        )
    block = int(number)
    if family.block_len % block:
        raise ValueError(
            f"family {family.name} has block_len {family.block_len}; expected a multiple of {block}, the block of "
            f"its mask {family.prefill_mask!r}"
        )
    return block


def block_masks(positions: torch.Tensor, lens: Sequence[int], block: int | None) -> list[torch.Tensor] | None:
    """Per packed sequence a bool [L, L], True where a row sees a column: the column's block is not a later one.

    Args:
        positions: int64 [N], of all sequences.
        lens: rows of each sequence; they sum to N.
        block: positions of one block; None gives None, every row sees every row.
    """
    if block is None:
        return None
    return [own[:, None] >= own for own in torch.split(positions // block, list(lens))]
