"""Where the selected chunks and the question stand: positions, not bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MODES = ("sequential", "gap", "reuse")


class Placement(NamedTuple):
    """Position offset of every chunk, and the first position of the canvas that follows."""

    offsets: tuple[int, ...]
    canvas_start: int


def plan_offsets(lens: Sequence[int], mode: str, *, chunk_len: int, multiple: int = 1) -> Placement:
    """Positions for chunks of `lens` tokens (BOS included) in document order.

    Args:
        mode: "sequential" (one after another), "gap" (slots of `chunk_len`, the published setting; a short chunk
            leaves a gap) or "reuse" (all at 0, the canvas after the longest).
        multiple: offsets and canvas start are rounded up to it: the block of a block-causal family, so that a chunk's
            own blocks are blocks of the positions where it stands. Nothing stands between the end of a chunk and the
            next multiple: those positions have no token and no key, and the chunk's last block is a short one.

    Raises:
        ValueError: an unknown mode, a length below 1, or a chunk longer than its slot in mode "gap".

    Source: Prefilling-dLLM (arXiv 2606.10537) and its public code (continuous / reused positions).
    """
    if mode not in MODES:
        raise ValueError(f"placement is {mode!r}; expected one of {', '.join(MODES)}")
    if any(length < 1 for length in lens):
        raise ValueError(f"chunk lengths are {list(lens)}; expected at least 1 each")
    if mode == "reuse":
        return Placement((0,) * len(lens), round_up(max(lens, default=0), multiple))
    if mode == "gap":
        slot = round_up(chunk_len, multiple)
        if any(length > slot for length in lens):
            raise ValueError(f"chunk of {max(lens)} tokens in slots of {slot}; expected chunk_len >= the longest chunk")
        return Placement(tuple(i * slot for i in range(len(lens))), len(lens) * slot)
    offsets, position = [], 0
    for length in lens:
        offsets.append(position)
        position = round_up(position + length, multiple)
    return Placement(tuple(offsets), position)


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below the value."""
    return -(-value // multiple) * multiple
