"""What a caller hands in as a question, and what a stream of its answer tells."""

from __future__ import annotations

import threading
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
    """Set when it was set itself or when another one is, which it leaves alone."""

    def __init__(self, other: threading.Event | None) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        """Whether either is set."""
        return super().is_set() or (self._other is not None and self._other.is_set())
