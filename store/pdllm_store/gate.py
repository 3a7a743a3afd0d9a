"""A lock of two kinds: many may pass it together, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets transactions run side by side, and gives whoever needs none to run a moment without any."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._n_active = 0
        self._closed = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._n_active += 1
        try:
            yield
        finally:
            with self._condition:
                self._n_active -= 1
                self._condition.notify_all()

    def shut(self) -> None:
        """Wait until nothing runs and let nothing begin until `open`."""
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._closed = True
            self._condition.wait_for(lambda: self._n_active == 0)

    def open(self) -> None:
        with self._condition:
            self._closed = False
            self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self.shut()
        try:
            yield
        finally:
            self.open()
