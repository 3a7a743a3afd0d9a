"""What was measured on and with: the machine, and a stopwatch that takes turns."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pdllm_rag.models.loader import LoadedModel


class Machine(NamedTuple):
    """Hardware and software of a run.

    device: the GPU's name, or "cpu".
    threads: that torch computes with.
    dtype: the model's compute dtype, "" where no model runs.
    avx512_bf16, amx: whether the CPU multiplies bfloat16 matrices in hardware, and by which unit.
    """

    cpu: str
    cores: int
    device: str
    threads: int
    dtype: str
    avx512_bf16: bool
    amx: bool
    torch: str
    transformers: str
    python: str


class Spread(NamedTuple):
    """Median and quartiles of repetitions."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)

    def as_dict(self) -> dict[str, float]:
        """JSON form."""
        return self._asdict()


def describe(model: LoadedModel | None = None) -> Machine:
    """The machine as a run of this model finds it, or one without a model."""
    device = model.backbone.device if model else torch.device("cpu")
    cpu, flags = _processor(Path("/proc/cpuinfo"))
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        threads=torch.get_num_threads(),
        dtype=str(model.backbone.dtype).removeprefix("torch.") if model else "",
        avx512_bf16="avx512_bf16" in flags,
        amx="amx_bf16" in flags,
        torch=torch.__version__,
        transformers=version("transformers"),
        python=platform.python_version(),
    )


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    repeat: int,
    *,
    device: torch.device,
    prepare: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each run, `repeat` times, in turns (A B A B), so that a slow moment hits all of them.

    One more round goes ahead and is not counted.

    Args:
        prepare: what goes ahead of a run and is not timed.

    Raises:
        ValueError: repeat below 1.
    """
    if repeat < 1:
        raise ValueError(f"repeat is {repeat}; expected 1 or more")
    ms: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            if prepare and name in prepare:
                prepare[name]()
            _finish(device)
            started = time.perf_counter()
            run()
            _finish(device)
            if turn:
                ms[name].append((time.perf_counter() - started) * 1000)
    return ms


def compare(what: str, dividend: Mapping[str, Any], divisor: Mapping[str, Any]) -> dict[str, Any]:
    """Two things measured in turns, as JSON: the spread of each, and of their ratio within a round.

    Args:
        what: what is compared, in words.
        dividend, divisor: a "name", the "ms" of every round, and whatever else tells them apart.
    """
    ratios = [a / b for a, b in zip(dividend["ms"], divisor["ms"], strict=True)]
    return {
        "compares": what,
        "dividend": {**dividend, "ms": Spread.of(dividend["ms"]).as_dict()},
        "divisor": {**divisor, "ms": Spread.of(divisor["ms"]).as_dict()},
        "ratio": Spread.of(ratios).as_dict(),
    }


def _finish(device: torch.device) -> None:
    """Wait for what a GPU still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor(info: Path) -> tuple[str, frozenset[str]]:
    """The CPU's name and flags by Linux's account, else what Python knows."""
    if not info.is_file():
        return platform.processor() or platform.machine(), frozenset()
    entries = dict.fromkeys(("model name", "flags"), "")
    for line in info.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in entries:
            entries[key.strip()] = value.strip()
    return entries["model name"] or platform.machine(), frozenset(entries["flags"].split())
