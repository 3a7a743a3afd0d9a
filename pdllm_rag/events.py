"""What a caller hands in as a question, and what a stream of its answer tells."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdllm_rag.answer import Answer
from pdllm_rag.decoding import DecodeStep

Messages = Sequence[Mapping[str, str]]


class TextDelta(NamedTuple):
    """Text that is final. Joined deltas are the answer."""

    text: str


class CanvasUpdate(NamedTuple):
    """One denoising step, for a live view; later text may stand before earlier text.

    Attributes:
        step: `rows` of the answer that were filled, their `tokens` and `confidence`, and `nfe`, passes until now.
    """

    step: DecodeStep


class Final(NamedTuple):
    """The last event: the whole answer."""

    answer: Answer


# What a stream yields.
StreamEvent = TextDelta | CanvasUpdate | Final


class EitherEvent(threading.Event):
    """Set when it was set itself, when its seconds are over, or when another one is set, which it leaves alone."""

    def __init__(self, other: threading.Event | None, *, seconds: float = math.inf) -> None:
        super().__init__()
        self._other = other
        self._end = time.monotonic() + seconds

    def is_set(self) -> bool:
        """Whether any of these is so."""
        return super().is_set() or time.monotonic() > self._end or (self._other is not None and self._other.is_set())
