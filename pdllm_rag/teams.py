"""OpenMP's teams of threads, ended with the call that they were made for.

Each thread that computes in torch gets a team, which libgomp keeps for as long as that thread lives. Once a process has
more threads in teams than the machine has cores, idle ones included, none of them spins any more, and each of a forward
pass's hundreds of parallel regions waits for threads to wake: on two cores an idle team of another thread makes a
question take 1.75 times as long (docs/performance.md). Frameworks call from one thread after another.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

_SOFT = 1  # omp_pause_soft
_EXIT_SECONDS = 0.05  # a thread's own end, on a busy machine

_ended_at = -_EXIT_SECONDS


def end_team() -> None:
    """End the calling thread's team, if it has one; its next parallel region makes another (0.1 ms on two cores)."""
    if torch.get_num_threads() > 1:  # a forked child that computes alone would wait for its parent's team
        global _ended_at
        _pause()(_SOFT)
        _ended_at = time.monotonic()


@contextmanager
def passing_team() -> Iterator[None]:
    """Around a call, or as its decorator: the calling thread has no team afterwards."""
    try:
        yield
    finally:
        end_team()


def _let_threads_exit() -> None:
    """MKL holds a lock while a thread ends, and a child that is forked meanwhile waits for it in its first product."""
    time.sleep(max(0.0, _ended_at + _EXIT_SECONDS - time.monotonic()))


os.register_at_fork(before=_let_threads_exit)


@cache
def _pause() -> Callable[[int], object]:
    """OpenMP's `omp_pause_resource_all` if it is libgomp's, else nothing: other runtimes share threads among teams."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "omp_pause_resource_all") and not hasattr(library, "__kmpc_fork_call"):
            pause: Callable[[int], object] = library.omp_pause_resource_all
            return pause
    return lambda _: None
