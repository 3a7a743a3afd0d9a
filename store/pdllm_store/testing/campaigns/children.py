"""Forked processes that may be killed or die on their own, and report over a pipe until then.

Whoever forks them must have no store open (LMDB does not survive a fork) and should have no second thread.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

Report = Callable[[object], None]  # sends one JSON value to the parent
_READ_BYTES = 1 << 16


class Ending(NamedTuple):
    """How a child ended."""

    said: list[Any]  # every value that it reported whole
    error: str | None  # traceback of the exception that ended it
    signal: int | None  # that ended it
    timed_out: bool  # it had to be killed


class Child:
    """One forked process that runs `body` and exits."""

    def __init__(self, body: Callable[[Report], object]) -> None:
        self._reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reading)
            _run(body, writing)
        os.close(writing)
        self._received = bytearray()

    def wait_for_word(self, timeout_s: float) -> None:
        """Return when it has said something, or has ended, or the time is up."""
        select.select([self._reading], [], [], timeout_s)

    def kill(self) -> Ending:
        """Send SIGKILL, whatever it is doing."""
        os.kill(self._pid, signal.SIGKILL)
        self._receive(None)
        return self._ending(timed_out=False)

    def end(self, timeout_s: float) -> Ending:
        """Wait for its end; kill it if that takes too long."""
        timed_out = not self._receive(time.monotonic() + timeout_s)
        if timed_out:
            os.kill(self._pid, signal.SIGKILL)
            self._receive(None)
        return self._ending(timed_out=timed_out)

    def _receive(self, deadline: float | None) -> bool:
        """Read the pipe to its end; False if the deadline came first."""
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not select.select([self._reading], [], [], left)[0]:
                return False
            data = os.read(self._reading, _READ_BYTES)
            if not data:
                return True
            self._received += data

    def _ending(self, *, timed_out: bool) -> Ending:
        os.close(self._reading)
        _, status = os.waitpid(self._pid, 0)
        lines = bytes(self._received).split(b"\n")[:-1]  # what follows the last newline was cut off by a kill
        words = [json.loads(line) for line in lines]
        said = [value for is_error, value in words if not is_error]
        errors = [value for is_error, value in words if is_error]
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        return Ending(said, errors[0] if errors else None, ended_by, timed_out)


def _run(body: Callable[[Report], object], writing: int) -> NoReturn:
    def send(*, is_error: bool, value: object) -> None:
        os.write(writing, json.dumps([is_error, value]).encode() + b"\n")

    status = 1
    try:
        gc.freeze()  # a collection would touch, and so copy, every page that is shared with the parent
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # deaths are expected, core files would fill the disk
        body(lambda value: send(is_error=False, value=value))
        status = 0
    except BaseException:  # nothing may return into the parent's stack; the parent gets the traceback
        send(is_error=True, value=traceback.format_exc())
    finally:
        os._exit(status)
