"""How the kernel's work is cut: tiles, and into how many parts the keys are split, by shapes alone.

The choice minimises a small model of the time that was fitted to measurements on an H200 (docs/log.md), so no question
waits for a search, and the same shapes always run the same code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Shape of the kernel's work, chosen by shapes alone.

    block_m: packed query rows of a program; block_n: keys of a block.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


class _Way(NamedTuple):
    """Tiles, and what they cost on an H200, as fitted: microseconds of a program and of each of its blocks,
    with `at_once` programs on a multiprocessor."""

    tiles: Tiles
    at_once: int
    start_us: float
    block_us: float


_MERGE_US = 4.0
_WAYS = {
    torch.float32: (_Way(Tiles(16, 32, 4, 2), 2, 6, 2), _Way(Tiles(32, 32, 4, 2), 2, 6, 3)),
    torch.bfloat16: (
        _Way(Tiles(16, 64, 4, 3), 2, 5, 1.0),
        _Way(Tiles(32, 128, 4, 3), 1, 5, 1.5),
        _Way(Tiles(64, 64, 4, 3), 2, 5, 1.5),
        _Way(Tiles(128, 128, 8, 3), 1, 4, 2.5),
    ),
}


class Choice(NamedTuple):
    """Tiles, and into how many parts the sequence with most keys is split."""

    tiles: Tiles
    n_splits: int


def choose(
    device: torch.device, dtype: torch.dtype, head_dim: int, n_kv_heads: int, packed_rows: Sequence[int], n_keys: int
) -> Choice:
    """The cheapest way by the costs in `_WAYS`: whole rounds of programs on the device, and a merge of parts.

    Args:
        packed_rows: per sequence, query rows times the query heads of a key/value head.
        n_keys: of the longest sequence.
    """
    slots = _multiprocessors(device)
    best, chosen = math.inf, None
    for way in _WAYS[torch.float32 if dtype == torch.float32 else torch.bfloat16]:
        tiles = way.tiles if head_dim <= 128 else Tiles(min(64, way.tiles.block_m), 32, 4, 2)
        if tiles.block_m > 16 and tiles.block_m >= 2 * max(packed_rows, default=1):
            continue
        n_programs = n_kv_heads * sum(-(-rows // tiles.block_m) for rows in packed_rows)
        n_blocks = max(1, -(-n_keys // tiles.block_n))
        for n_splits in range(1, min(n_blocks, 64) + 1):
            rounds = -(-n_programs * n_splits // (slots * way.at_once))
            each = way.start_us + way.block_us * -(-n_blocks // n_splits)
            us = rounds * each + (_MERGE_US if n_splits > 1 else 0.0)
            if us < best - 1e-9:
                best, chosen = us, Choice(tiles, n_splits)
    assert chosen is not None
    return chosen


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
