"""A lane on the CPU that copies as late as it may, so that what is used too early, or written again, shows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch


class LateLane:
    """A `Lane` that makes no copy before somebody waits for a mark behind it, or follows one.

    New memory is filled with NaN (integers: 85), and the host's is remembered.

    Attributes:
        made: what `host` has given.
        n_copies: that were put.
    """

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []
        self.n_copies = 0
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._n_done = 0
        self._lock = threading.RLock()

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = _filled(shape, dtype)
        self.made.append(tensor)
        return tensor

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return _filled(shape, dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        with self._lock:
            self._pending.append((target, source))
            self.n_copies += 1

    def mark(self) -> LateMark:
        with self._lock:
            return LateMark(self, self._n_done + len(self._pending))

    def copy_until(self, count: int) -> None:
        """Make the first `count` copies."""
        with self._lock:
            while self._n_done < count:
                target, source = self._pending.pop(0)
                target.copy_(source)
                self._n_done += 1

    @property
    def n_done(self) -> int:
        return self._n_done


class LateMark:
    """Behind the first `count` copies of a lane."""

    def __init__(self, lane: LateLane, count: int) -> None:
        self._lane = lane
        self._count = count

    def done(self) -> bool:
        return self._lane.n_done >= self._count

    def wait(self) -> None:
        self._lane.copy_until(self._count)

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        del tensors
        self.wait()


def _filled(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else 85, dtype=dtype)
