"""Tiles and numbers of parts for the Split-S kernel, tried out: what its own choice is held against.

Compiling happens ahead of the clock and is what takes the time, so a row's search ends when its seconds are over;
tiles are tried in the order of `TILES`, each with every number of parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pdllm_rag.attention.split_choice import Tiles
from pdllm_rag.bench.contenders import cannot_run, ours
from pdllm_rag.bench.device_clock import graphed, queued_ms
from pdllm_rag.bench.machine import Spread
from pdllm_rag.bench.workload import Workload

TUNE_S = 25.0
KEPT = 5  # combinations that are reported
ROUNDS = 5
WAVES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # programs for each multiprocessor
CPU_PROGRAMS = 8

TILES: tuple[Tiles, ...] = (
    Tiles(64, 64, 4, 3),
    Tiles(64, 128, 4, 3),
    Tiles(128, 64, 4, 3),
    Tiles(128, 64, 8, 3),
    Tiles(128, 128, 8, 2),
    Tiles(64, 64, 4, 4),
    Tiles(64, 128, 8, 3),
    Tiles(64, 128, 4, 2),
    Tiles(128, 128, 8, 3),
    Tiles(128, 64, 8, 4),
    Tiles(128, 32, 8, 4),
    Tiles(64, 32, 4, 5),
    Tiles(32, 64, 4, 3),
    Tiles(32, 128, 4, 3),
    Tiles(32, 64, 4, 4),
    Tiles(32, 128, 8, 3),
    Tiles(32, 64, 2, 4),
    Tiles(16, 64, 4, 3),
    Tiles(16, 128, 4, 3),
    Tiles(16, 64, 2, 4),
)


def tune(
    workload: Workload,
    sides: Mapping[str, Mapping[str, Any]],
    *,
    max_s: float = TUNE_S,
    tiles: Sequence[Tiles] = TILES,
) -> dict[str, Any]:
    """Microseconds of a layer for combinations of tiles and parts over the scattered context of the last chunk length.

    Args:
        sides: of the row, where our kernel's own choice stands.
        max_s: no further combination is begun after so many seconds.
    """
    shape, device = workload.shape, workload.device
    chunk_len = shape.chunk_lens[-1]
    table = workload.scattered(chunk_len)
    n_sets = len(workload.q)
    fitting = [one for one in tiles if _fits(one, shape.n_rows * shape.ratio)]
    combinations = [(one, n_splits) for one in fitting for n_splits in _splits(workload, one)]
    found: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    started = time.perf_counter()
    for one, n_splits in combinations:
        if time.perf_counter() - started > max_s:
            break
        name = "/".join(map(str, one))
        if name in failed:
            continue
        try:
            contender = ours(workload, table, tiles=one, n_splits=n_splits)
            contender.call(0)
            run = graphed(lambda: [contender.call(index) for index in range(n_sets)], device)  # noqa: B023
        except cannot_run() as error:
            failed[name] = " ".join(str(error).split())[:200]
            continue
        ms = queued_ms({"run": run}, ROUNDS, device=device, max_s=max_s)["run"]
        found.append({"tiles": one._asdict(), "n_splits": n_splits, "us": Spread.of(ms).median * 1000 / n_sets})
    found.sort(key=lambda entry: entry["us"])
    own = sides.get(f"ours, scattered {chunk_len}")
    return {
        "over": f"scattered {chunk_len}",
        "own_us": own["us"]["median"] if own else None,
        "best": found[:KEPT],
        "all": [[*entry["tiles"].values(), entry["n_splits"], round(entry["us"], 2)] for entry in found],
        "tried": len(found),
        "of": len(combinations),
        "failed": failed,
    }


def _fits(tiles: Tiles, packed_rows: int) -> bool:
    """Whether a tile is neither mostly empty nor far smaller than what there is to fill it with."""
    return tiles.block_m < 2 * max(16, packed_rows) and tiles.block_m >= min(32, packed_rows)


def _splits(workload: Workload, tiles: Tiles) -> Iterator[int]:
    """Numbers of parts that make `WAVES` programs a multiprocessor, each once."""
    shape = workload.shape
    n_blocks = -(-shape.context // tiles.block_n)
    per_part = shape.n_kv_heads * -(-shape.n_rows * shape.ratio // tiles.block_m)
    processors = CPU_PROGRAMS
    if workload.device.type == "cuda":
        processors = torch.cuda.get_device_properties(workload.device).multi_processor_count
    counts = [min(n_blocks, max(1, round(wave * processors / per_part))) for wave in WAVES]
    yield from dict.fromkeys(counts)
