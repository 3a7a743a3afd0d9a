"""A few buffers of the host that data passes through on its way to a device, used in turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pdllm_rag.lanes import Lane, Mark

SLOT_BYTES = 64 << 20  # enough for all of a store's threads, and a copy of it takes about a millisecond
N_SLOTS = 3  # one is filled while others are copied from, or two threads fill one each


class StagingRing:
    """At most `n_slots` buffers of `slot_bytes`, made when they are first needed and kept.

    A buffer is handed out again only when every copy that was put before it came back is done.
    """

    def __init__(self, lane: Lane, *, slot_bytes: int = SLOT_BYTES, n_slots: int = N_SLOTS) -> None:
        if slot_bytes < 1 or n_slots < 1:
            raise ValueError(f"staging has {n_slots} slots of {slot_bytes} bytes; expected 1 or more of each")
        self.slot_bytes = slot_bytes
        self._lane = lane
        self._n_slots = n_slots
        self._n_made = 0
        self._free: deque[tuple[torch.Tensor, Mark]] = deque()  # the one that came back first comes first
        self._changed = threading.Condition()

    @contextmanager
    def slot(self) -> Iterator[torch.Tensor]:
        """A buffer, uint8 [slot_bytes], for one thread; copies from it have to be put before it is left.

        A thread may hold one at a time: with two, threads could wait for each other.
        """
        buffer, mark = self._take()
        try:
            if mark is not None:
                mark.wait()
            yield buffer
        finally:
            mark = self._lane.mark()
            with self._changed:
                self._free.append((buffer, mark))
                self._changed.notify()

    def _take(self) -> tuple[torch.Tensor, Mark | None]:
        with self._changed:
            while True:
                if self._free and (self._n_made == self._n_slots or self._free[0][1].done()):
                    return self._free.popleft()
                if self._n_made < self._n_slots:
                    buffer = self._lane.host((self.slot_bytes,), torch.uint8)
                    self._n_made += 1
                    return buffer, None
                self._changed.wait()
