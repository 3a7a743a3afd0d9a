"""The model's one worker: a thread that answers the questions that wait, several at a time.

- what has come in while a batch was answered makes the next one, up to `max_batch`;
- at most `max_waiting` wait; who comes then is told when to come again;
- a question that is given up leaves the line at once, or its batch before the next denoising step.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from pdllm_rag.errors import GenerationCancelled
from pdllm_rag.events import StreamEvent
from pdllm_rag.server.failures import ApiError
from pdllm_rag.teams import passing_team
from pdllm_rag.together import Asked, stream_together

SMOOTHING = 0.2  # of the newest batch in the mean time of a question


class Ticket:
    """A question in line. Its events come out of `next`; made and read in the event loop, filled by the worker."""

    def __init__(self, asked: Asked, drop: Callable[[Ticket], None]) -> None:
        self._given_up = threading.Event()
        self.asked = replace(asked, options=replace(asked.options, cancel=self._given_up))
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[StreamEvent | Exception] = asyncio.Queue()

    async def next(self) -> StreamEvent:
        """The next event; the last one is `Final`. Raises what the question raised."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def tell(self, event: StreamEvent | Exception) -> None:
        """Hand on an event; from any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def give_up(self) -> None:
        """Nobody wants the answer any more; without effect once it is there."""
        self._given_up.set()
        self._drop(self)


class Worker:
    """Answers questions of one engine.

    Args:
        on_batch: told the number of questions of each batch.
    """

    def __init__(self, *, max_batch: int, max_waiting: int, on_batch: Callable[[int], None]) -> None:
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._on_batch = on_batch
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._is_closed = False
        self._seconds_each = 1.0
        self._thread = threading.Thread(target=self._run, name="pdllm-worker")

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def submit(self, asked: Asked) -> Ticket:
        """Put a question in line; its `cancel` is the ticket's from now on.

        Raises:
            ApiError: 429, the line is full; 503, the worker is closed.
        """
        ticket = Ticket(asked, self._drop)
        with self._changed:
            if self._is_closed:
                raise ApiError(503, "the server is stopping", "stopping", retry_after=5)
            if len(self._waiting) >= self._max_waiting:
                seconds = max(1, math.ceil(len(self._waiting) * self._seconds_each))
                message = f"{len(self._waiting)} questions are waiting, the limit is {self._max_waiting}; ask again"
                raise ApiError(429, f"{message} in {seconds} s", "busy", retry_after=seconds)
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    @property
    def n_waiting(self) -> int:
        """Questions in line."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Questions being answered."""
        return len(self._running)

    @property
    def is_alive(self) -> bool:
        """Whether questions are taken."""
        return self._thread.is_alive() and not self._is_closed

    def close(self) -> None:
        """Give up whatever waits or runs, and end the thread."""
        with self._changed:
            self._is_closed = True
            tickets = [*self._waiting, *self._running]
            self._changed.notify()
        for ticket in tickets:
            ticket.tell(GenerationCancelled("the server is stopping"))
            ticket.give_up()
        if self._thread.is_alive():
            self._thread.join()

    def _drop(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def _run(self) -> None:
        while batch := self._take():
            started = time.perf_counter()
            self._on_batch(len(batch))
            try:
                with passing_team():
                    for index, event in stream_together([ticket.asked for ticket in batch]):
                        batch[index].tell(event)
            except Exception as error:  # handed on; the worker outlives whatever a batch does
                for ticket in batch:
                    ticket.tell(error)
            seconds = (time.perf_counter() - started) / len(batch)
            self._seconds_each += SMOOTHING * (seconds - self._seconds_each)

    def _take(self) -> list[Ticket]:
        """The next batch; empty when closed."""
        with self._changed:
            self._running = []
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._is_closed:
                n_taken = min(self._max_batch, len(self._waiting))
                self._running = [self._waiting.popleft() for _ in range(n_taken)]
            return self._running
