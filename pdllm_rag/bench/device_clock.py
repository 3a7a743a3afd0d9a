"""Time on the device: CUDA events around graph replays or eager calls, a plain stopwatch on the CPU.

- a graph's time is that of its kernels; the time that Python takes to launch them is not in it;
- eager time is from an idle device to the end of the calls, launches included, as it is commonly quoted;
- runs take turns, so that a slow moment hits all of them, and one round goes ahead that is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

_cuda: Any = torch.cuda  # parts of it have no types

Run = Callable[[], object]

LEAST_ROUNDS = 3  # however long they take
WARM_UPS = 2  # before a capture: libraries make handles and workspaces on their first calls


class Graphed:
    """Calls captured in a CUDA graph; a call replays them. It keeps alive what they use."""

    def __init__(self, run: Run) -> None:
        self._run = run
        side = _cuda.Stream()
        side.wait_stream(_cuda.current_stream())
        with _cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        _cuda.current_stream().wait_stream(side)
        self._graph = _cuda.CUDAGraph()
        with _cuda.graph(self._graph):
            run()

    def __call__(self) -> None:
        self._graph.replay()


def graphed(run: Run, device: torch.device) -> Run:
    """The run as a CUDA graph; on the CPU the run itself."""
    return Graphed(run) if device.type == "cuda" else run


def queued_ms(runs: Mapping[str, Run], repeat: int, *, device: torch.device, max_s: float) -> dict[str, list[float]]:
    """Milliseconds of each run in turns, one after another without waiting: for graph replays.

    Args:
        repeat: rounds; fewer, but at least `LEAST_ROUNDS`, where they would take more than `max_s` seconds.

    Raises:
        ValueError: repeat below 1.
    """
    if device.type != "cuda":
        return idle_ms(runs, repeat, device=device, max_s=max_s)
    n_rounds = _rounds(runs, repeat, device, max_s)
    events = {name: [(_event(), _event()) for _ in range(n_rounds)] for name in runs}
    for number in range(n_rounds):
        for name, run in runs.items():
            first, last = events[name][number]
            first.record()
            run()
            last.record()
    _cuda.synchronize(device)
    return {name: [first.elapsed_time(last) for first, last in pairs] for name, pairs in events.items()}


def idle_ms(runs: Mapping[str, Run], repeat: int, *, device: torch.device, max_s: float) -> dict[str, list[float]]:
    """Milliseconds of each run in turns, each from an idle device on; arguments as `queued_ms`."""
    n_rounds = _rounds(runs, repeat, device, max_s)
    ms: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(n_rounds):
        for name, run in runs.items():
            ms[name].append(once_ms(run, device))
    return ms


def once_ms(run: Run, device: torch.device) -> float:
    """Milliseconds of one call, from an idle device on."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1000
    first, last = _event(), _event()
    _cuda.synchronize(device)
    first.record()
    run()
    last.record()
    _cuda.synchronize(device)
    return float(first.elapsed_time(last))


def _rounds(runs: Mapping[str, Run], repeat: int, device: torch.device, max_s: float) -> int:
    """One round that is not counted, and how many of them fit."""
    if repeat < 1:
        raise ValueError(f"repeat is {repeat}; expected 1 or more")
    round_s = sum(once_ms(run, device) for run in runs.values()) / 1000
    fitting = int(max_s / round_s) if round_s else repeat
    return min(repeat, max(LEAST_ROUNDS, fitting))


def _event() -> Any:
    return _cuda.Event(enable_timing=True)
