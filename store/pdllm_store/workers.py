"""A store's threads: several that load together, and one for what may wait."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pdllm_store.errors import StoreClosedError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_THREADS = 8


class Workers:
    """Threads that are made when they are first needed, anew after `renew`, and end with the store."""

    def __init__(self) -> None:
        self.n_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self.renew()

    def renew(self) -> None:
        """In a forked child: the parent's threads do not exist here, and may have held the lock."""
        self.stopping = threading.Event()  # what runs later may look whether it is set
        self._lock = threading.Lock()
        self._loaders: ThreadPoolExecutor | None = None
        self._later: ThreadPoolExecutor | None = None

    def map(self, body: Callable[[T], None], parts: Sequence[T]) -> None:
        """Run `body` on each part, one of them on the calling thread; raises what one of them raised."""
        waiting: list[Future[None]] = []
        try:
            if len(parts) > 1:
                with self._lock:
                    self._check_open()
                    if self._loaders is None:
                        self._loaders = ThreadPoolExecutor(self.n_threads, "pdllm-store-load")
                    waiting = [self._loaders.submit(body, part) for part in parts[1:]]
            body(parts[0])
        finally:
            for future in waiting:
                future.exception()  # every part has ended before anything of this call does
        for future in waiting:
            future.result()

    def later(self, body: Callable[[], None]) -> None:
        """Run `body` after what was given before, beside everything else; what it raises is logged."""
        with self._lock:
            self._check_open()
            if self._later is None:
                self._later = ThreadPoolExecutor(1, "pdllm-store-later")
            self._later.submit(body).add_done_callback(_log_failure)

    def close(self) -> None:
        """Wait for what runs, drop what waits, and end the threads."""
        self.stopping.set()
        with self._lock:
            pools = [pool for pool in (self._loaders, self._later) if pool is not None]
            self._loaders = self._later = None
        for pool in pools:
            pool.shutdown(cancel_futures=True)

    def _check_open(self) -> None:
        if self.stopping.is_set():
            raise StoreClosedError("the store was closed; open it again")


def _log_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.warning("left undone: %s", error)
