"""Uploaded PDF and HTML files are read in a process of their own, within bounds of time and memory.

What a hostile file does there (a PDF that unfolds without end, a parser that crashes) costs that process and no other.
Plain text needs no parser and is read where it is.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import PurePosixPath

from pdllm_rag.errors import DocumentError, EmptyDocumentError, UnreadableDocumentError
from pdllm_rag.readers import MEDIA_TYPES, SourceText, parse

_READY = "ready"
_UNFOLDED = ("text/html", "application/pdf")


class FileReader:
    """Reads one file at a time; the process is started at the first one, and again after one that broke it.

    Args:
        seconds: most time for a file.
        n_bytes: most memory that the process may take beyond what it begins with.
        max_bytes, max_chars: see `readers.parse`.
    """

    def __init__(self, *, seconds: float, n_bytes: int, max_bytes: int, max_chars: int) -> None:
        self._seconds = seconds
        self._n_bytes = n_bytes
        self._limits = {"max_bytes": max_bytes, "max_chars": max_chars}
        self.turn = asyncio.Lock()  # for a caller in an event loop: one file at a time in memory
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def read(self, data: bytes, name: str) -> SourceText:
        """A file's text.

        Raises:
            DocumentError: as `readers.parse`, or it took too long or too much memory.
        """
        if MEDIA_TYPES.get(PurePosixPath(name).suffix.lower()) not in _UNFOLDED:
            return parse(data, name=name, **self._limits)
        with self._lock:
            pipe = self._started()
            try:
                pipe.send((name, data))
                if not pipe.poll(self._seconds):
                    raise UnreadableDocumentError(f"{name}: reading it took longer than {self._seconds:g} s")
                result = pipe.recv()
            except (EOFError, OSError):
                self._stop()
                reason = "reading it broke off, for lack of memory or because the file is broken"
                raise UnreadableDocumentError(f"{name}: {reason}; convert it to text") from None
            except UnreadableDocumentError:
                self._stop()
                raise
        if isinstance(result, DocumentError):
            raise result
        return SourceText(*result)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _started(self) -> Connection:
        if self._pipe is None or self._process is None or not self._process.is_alive():
            self._stop()
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._n_bytes, self._limits), daemon=True)
            self._process.start()
            theirs.close()
            self._pipe.recv()
        return self._pipe

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection, n_bytes: int, limits: dict[str, int]) -> None:
    """In the process: read files until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the server is told, and ends this process
    if sys.platform == "linux":  # elsewhere only time is bounded: the system does not keep to such a limit
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + n_bytes, taken + n_bytes))
    pipe.send(_READY)
    while True:
        try:
            name, data = pipe.recv()
        except EOFError:
            return
        try:
            result: object = tuple(parse(data, name=name, **limits))
        except (EmptyDocumentError, UnreadableDocumentError) as error:
            result = error
        except MemoryError:
            result = UnreadableDocumentError(f"{name}: reading it took too much memory")
        pipe.send(result)
