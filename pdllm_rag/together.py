"""Several questions in one batch: each is found and read by itself, then those of one decoder are denoised together.

Each comes out as it would alone. One that fails or is cancelled leaves the batch; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdllm_rag.asking import Asking, Prepared, cancelled
from pdllm_rag.clock import Clock
from pdllm_rag.config import AskOptions
from pdllm_rag.events import Messages, StreamEvent
from pdllm_rag.reading import Found
from pdllm_rag.teams import passing_team

Tagged = tuple[int, StreamEvent | Exception]


@dataclass(frozen=True)
class Asked:
    """A question and its options, not begun. `find` is for `Asking.prepare`."""

    asking: Asking
    question: str | Messages
    options: AskOptions
    find: Callable[[str, Clock], Found]

    def events(self) -> Iterator[StreamEvent]:
        """Answer it alone; what `stream_together` hands on as an error is raised."""
        with passing_team():
            for _, event in stream_together([self]):
                if isinstance(event, Exception):
                    raise event
                yield event


def stream_together(questions: Sequence[Asked]) -> Iterator[Tagged]:
    """Answer questions of one engine.

    Yields the index of a question and an event of it; the last one of each is its `Final`, or what it raised.
    """
    batches: dict[object, dict[int, Prepared]] = {}
    for index, one in enumerate(questions):
        try:
            prepared = one.asking.prepare(one.question, one.options, one.find)
        except Exception as error:  # handed on: it is this question's alone
            yield index, error
            continue
        if prepared.request is None:
            yield from _tagged(index, one.asking.conclude(prepared))
        else:
            batches.setdefault(prepared.options.decoder_key, {})[index] = prepared
    for batch in batches.values():
        try:
            yield from _denoise(questions[0].asking, batch)
        except Exception as error:  # handed on to all that it keeps from an answer
            yield from ((index, error) for index in batch)


def _denoise(asking: Asking, running: dict[int, Prepared]) -> Iterator[Tagged]:
    """Run a batch to its end; a question is dropped from `running` with its last event."""
    indices = list(running)
    requests = [one.request for one in running.values() if one.request is not None]
    stream = running[indices[0]].decoder.steps(requests)
    while running:
        for request, index in zip(requests, indices, strict=True):
            if index in running and (cancel := running[index].options.cancel) is not None and cancel.is_set():
                request.cancel.set()
        started = time.perf_counter()
        step = next(stream)
        seconds = time.perf_counter() - started
        for one in running.values():
            one.clock.add("decode", seconds)
        index = indices[step.sequence]
        if index not in running:
            continue  # the decoder says that it has let go a question that is answered
        asked = running[index]
        if step.finished == "cancelled":
            del running[index]
            yield index, cancelled(len(asked.steps))
            continue
        yield from _tagged(index, asking.take(asked, step))
        if asked.withheld or asked.transcript.stopped:
            del running[index]
            yield from _tagged(index, asking.conclude(asked))


def _tagged(index: int, events: Iterator[StreamEvent]) -> Iterator[Tagged]:
    return ((index, event) for event in events)
