"""The Split-S kernel against torch's attentions and against the device's own limits, row by row, in turns.

- a row is one size of heads, query rows and context; all contenders of a row take turns within it;
- every contender's result is checked against float64 before it is timed; one that is wrong is not timed;
- main figure: microseconds of a layer, by replays of a CUDA graph of as many calls as there are sets of keys, each
  layer with sets of its own, so that no cache answers. Eager figure: the same calls from Python, one after another;
- floor: the larger of the bytes of keys and values over the measured copy bandwidth, and the operations over the
  measured rate of a large matrix product. A copy reads and writes; a kernel that reads only can come out below it;
- on the CPU every call is a plain one, and our kernel runs in Triton's interpreter (TRITON_INTERPRET=1): for tests.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pdllm_rag.bench.attention_tuning import TUNE_S, tune
from pdllm_rag.bench.ceilings import Ceilings, describe_device, measure_ceilings
from pdllm_rag.bench.contenders import FAMILIES, OURS, Contender, Make, cannot_run, contenders
from pdllm_rag.bench.device_clock import graphed, idle_ms, queued_ms
from pdllm_rag.bench.machine import Spread, describe
from pdllm_rag.bench.workload import ERROR_LIMITS, AttentionShape, Workload, relative_error

MAX_S = 1.5  # of a row's graph replays, and of its eager calls
EAGER_REPEAT = 7


@dataclass(frozen=True)
class AttentionGrid:
    """What is measured: every combination.

    Attributes:
        heads: (query heads, key/value heads).
        families: baselines.
        tunes: also try other tiles and splits.
    """

    heads: Sequence[tuple[int, int]] = ((28, 4), (32, 8), (32, 32))
    n_rows: Sequence[int] = (32, 128)
    contexts: Sequence[int] = (4096, 8192, 16384, 32768)
    chunk_lens: Sequence[int] = (256, 1024)
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    families: Sequence[str] = FAMILIES
    tunes: bool = False
    tune_s: float = TUNE_S

    def __post_init__(self) -> None:
        unknown = [name for name in self.families if name not in FAMILIES]
        if unknown:
            raise ValueError(f"baseline {unknown[0]!r} is unknown; expected some of {', '.join(FAMILIES)}")
        self.shapes()

    def shapes(self) -> list[AttentionShape]:
        """One for each row.

        Raises:
            ValueError: a context that is no whole number of chunks, or a size below 1.
        """
        return [
            AttentionShape(n_heads, n_kv, self.head_dim, n_rows, context, tuple(self.chunk_lens), self.dtype)
            for n_heads, n_kv in self.heads
            for n_rows in self.n_rows
            for context in self.contexts
        ]


@torch.no_grad()
def bench_attention(
    grid: AttentionGrid | None = None,
    *,
    device: torch.device,
    repeat: int = 30,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure every row of a grid.

    Args:
        repeat: rounds of graph replays; fewer where they would take too long.
        on_row: gets all figures so far, after each row.

    Raises:
        ValueError: our kernel cannot run on this device, or a bad size.
    """
    grid = grid or AttentionGrid()
    ceilings = measure_ceilings(device, grid.dtype)
    on_gpu = device.type == "cuda"
    rows: list[dict[str, Any]] = []
    figures = {
        "machine": {**describe()._asdict(), **describe_device(device, grid.dtype)},
        "repeat": repeat,
        "measures": f"one layer's attention, {'by CUDA graphs' if on_gpu else 'ours interpreted'}",
        "head_dim": grid.head_dim,
        "dtype": str(grid.dtype).removeprefix("torch."),
        "ceilings": ceilings._asdict(),
        "rows": rows,
    }
    for shape in grid.shapes():
        rows.append(measure_row(shape, ceilings, grid, device=device, repeat=repeat))
        if on_row:
            on_row(figures)
    return figures


def measure_row(
    shape: AttentionShape, ceilings: Ceilings, grid: AttentionGrid, *, device: torch.device, repeat: int
) -> dict[str, Any]:
    """All contenders over one shape, as JSON."""
    started = time.perf_counter()
    torch.compiler.reset()  # every shape is compiled for itself, and only so many are kept
    gc.collect()  # the last row's graphs and buffers
    workload = Workload(shape, device, n_sets=None if device.type == "cuda" else 1)
    n_sets = len(workload.q)
    ready, errors, skipped = _checked(contenders(workload, tuple(grid.families)), workload)
    if not any(one.family == OURS for one in ready.values()):
        raise ValueError(f"our kernel gave nothing to measure: {next(iter(skipped.values()))}")
    runs = {name: partial(_all_sets, one, n_sets) for name, one in ready.items()}
    graphs: dict[str, Callable[[], object]] = {}
    for name, run in runs.items():
        try:
            graphs[name] = graphed(run, device)
        except cannot_run() as error:
            skipped[name] = f"cannot be captured in a CUDA graph: {_line(error)}"
    ms = queued_ms(graphs, repeat, device=device, max_s=MAX_S)
    us = {name: [value * 1000 / n_sets for value in values] for name, values in ms.items()}
    eager = {}
    if device.type == "cuda":
        ms = idle_ms(runs, min(repeat, EAGER_REPEAT), device=device, max_s=MAX_S)
        eager = {name: Spread.of([value * 1000 / n_sets for value in values]) for name, values in ms.items()}
    floor_us = ceilings.floor_s(shape.kv_bytes, shape.flops) * 1e6
    sides = {
        name: {
            "family": ready[name].family,
            **ready[name].notes,
            "error": errors[name],
            "us": Spread.of(us[name]).as_dict(),
            "over_floor": Spread.of(us[name]).median / floor_us,
            "eager_us": eager[name].as_dict() if name in eager else None,
        }
        for name in us
    }
    row: dict[str, Any] = {
        "heads": f"{shape.n_heads}/{shape.n_kv_heads}",
        "n_rows": shape.n_rows,
        "context": shape.context,
        "sets": n_sets,
        "rounds": len(next(iter(us.values()))),
        "floor": {
            "us": floor_us,
            "bound": ceilings.bound(shape.kv_bytes, shape.flops),
            "kv_bytes": shape.kv_bytes,
            "flops": shape.flops,
        },
        "sides": sides,
        "fastest": _fastest(sides),
        "ratios": _ratios(us, sides),
        "skipped": skipped,
    }
    if grid.tunes:
        del graphs
        row["tuning"] = tune(workload, sides, max_s=grid.tune_s)
    row["seconds"] = time.perf_counter() - started  # compiling and checking included
    return row


def wrong_sides(figures: dict[str, Any]) -> list[str]:
    """Contenders of any row that gave a wrong result, with the row."""
    return [
        f"{name} ({row['heads']}, {row['n_rows']} rows, {row['context']}): {reason}"
        for row in figures["rows"]
        for name, reason in row["skipped"].items()
        if reason.startswith(_WRONG)
    ]


_WRONG = "wrong: "


def _checked(
    makers: dict[str, Make], workload: Workload
) -> tuple[dict[str, Contender], dict[str, float], dict[str, str]]:
    """Contenders whose first result is right, their errors, and the reasons of the others."""
    ready: dict[str, Contender] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    truths: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}
    limit = ERROR_LIMITS[workload.shape.dtype]
    for name, make in makers.items():
        try:
            contender = make()
            with contender.around():
                out = contender.unpack(contender.call(0))
        except cannot_run() as error:
            skipped[name] = _line(error)
            continue
        key = contender.table.starts, contender.table.offsets
        if key not in truths:
            truths[key] = workload.truth(contender.table)
        error_found = relative_error(out, truths[key])
        if error_found > limit:
            skipped[name] = f"{_WRONG}relative error {error_found:.2g}, expected at most {limit:g}"
            continue
        ready[name], errors[name] = contender, error_found
    return ready, errors, skipped


def _all_sets(contender: Contender, n_sets: int) -> None:
    with contender.around():
        for index in range(n_sets):
            contender.call(index)


def _fastest(sides: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The fastest name of each family."""
    best: dict[str, str] = {}
    for name, side in sorted(sides.items(), key=lambda entry: entry[1]["us"]["median"]):
        best.setdefault(side["family"], name)
    return best


def _ratios(us: dict[str, list[float]], sides: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per variant of ours and baseline the baseline's time over ours within a round: above 1 ours is faster."""
    return {
        mine: {
            name: Spread.of([a / b for a, b in zip(values, us[mine], strict=True)]).as_dict()
            for name, values in us.items()
            if sides[name]["family"] != OURS
        }
        for mine in us
        if sides[mine]["family"] == OURS
    }


def _line(error: Exception) -> str:
    """An error's type and the beginning of its message, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
