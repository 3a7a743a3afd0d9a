"""What the operating system keeps of a file in memory, and making it forget (Linux)."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np


def drop(path: Path) -> None:
    """Write a file out and drop what the page cache holds of it; pages that a process has mapped stay."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident_share(path: Path) -> float:
    """Share of the pages of a file, not an empty one, that are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        n_bytes = len(mapped)
        flags = np.zeros(-(-n_bytes // mmap.PAGESIZE), np.uint8)
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), ctypes.c_void_p(flags.ctypes.data)
        if libc.mincore(*arguments):
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return float((flags & 1).mean())
