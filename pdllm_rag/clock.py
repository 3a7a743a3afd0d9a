"""Where an answer's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("first_stage", "draft", "score", "load", "decode")


class Clock:
    """Adds up milliseconds per phase."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._ms = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block under a phase's name."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add time to a phase."""
        self._ms[name] += seconds * 1000

    def ms(self) -> dict[str, float]:
        """Milliseconds per phase, and `total` since the clock was made."""
        return {**self._ms, "total": (time.perf_counter() - self._started) * 1000}
