"""Several ways to move the same bytes, measured in turns: one of them is the limit that the others are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pdllm_rag.bench.machine import Spread, take_turns
from pdllm_rag.bench.page_cache import resident_share


class Side(NamedTuple):
    """One of those that take turns."""

    what: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None  # ahead of every run, not timed
    file: Path | None = None  # whose share in the page cache is noted before every run


def section(measures: str, sides: Mapping[str, Side], n_bytes: int, repeat: int, *, limit: str) -> dict[str, Any]:
    """Measure sides that each move `n_bytes`, as JSON.

    Args:
        measures: what all sides do, in words.
        limit: the name of the side whose speed the others are held against, round by round.
    """
    resident: dict[str, list[float]] = {name: [] for name, side in sides.items() if side.file}

    def prepare(name: str, side: Side) -> None:
        side.prepare()
        if side.file:
            resident[name].append(resident_share(side.file))

    ms = take_turns(
        {name: side.run for name, side in sides.items()},
        repeat,
        device=torch.device("cpu"),
        prepare={name: partial(prepare, name, side) for name, side in sides.items()},
    )
    return {
        "measures": measures,
        "n_bytes": n_bytes,
        "limit": limit,
        "sides": {
            name: {
                "what": side.what,
                "ms": Spread.of(ms[name]).as_dict(),
                "gb_per_s": Spread.of([n_bytes / 1e6 / value for value in ms[name]]).as_dict(),
                "of_limit": Spread.of([a / b for a, b in zip(ms[limit], ms[name], strict=True)]).as_dict(),
                "resident": Spread.of(resident[name][1:]).as_dict() if name in resident else None,
            }
            for name, side in sides.items()
        },
    }
