"""Decode events to text: only what is final, whole characters, nothing that a stop string takes back.

Joined deltas equal the final text.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdllm_rag.decoding import DecodeStep
from pdllm_rag.models.tokenizer import Tokenizer


class Transcript:
    """Collects the events of one sequence.

    Args:
        stop: non-empty strings that end the answer; they are not part of it.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: Sequence[int], *, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self._max_new_tokens = max_new_tokens
        self._stop = tuple(stop)
        self._committed: dict[int, int] = {}
        self._sent = ""
        self.nfe = 0
        self.finish_reason: str | None = None
        self.stopped_by_string = False

    def add(self, step: DecodeStep) -> str:
        """Take in one event; returns the text that has become final with it."""
        self._committed.update(zip(step.rows, step.tokens, strict=True))
        self.nfe = step.nfe
        if self.finish_reason is None:
            self.finish_reason = step.finished
        text, stopped = self._settled(final=step.finished is not None)
        if stopped:
            self.finish_reason = "stop"
            self.stopped_by_string = True
        delta = text[len(self._sent) :]
        self._sent = text
        return delta

    @property
    def text(self) -> str:
        """Everything sent so far."""
        return self._sent

    @property
    def stopped(self) -> bool:
        """Whether nothing more can come."""
        return self.finish_reason is not None

    def token_ids(self) -> list[int]:
        """The committed answer tokens in reading order, up to the end-of-answer token, which is left out."""
        ids = []
        for position in range(self._max_new_tokens):
            token = self._committed.get(position)
            if token is None or token in self._eos:
                break
            ids.append(token)
        return ids

    def _settled(self, *, final: bool) -> tuple[str, bool]:
        """Text that can no longer change, and whether a stop string ended it."""
        text = self._tokenizer.decode(self.token_ids()).lstrip()
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            return text[: min(ends)].rstrip(), True
        if final:
            return text.rstrip(), False
        text = text.rstrip("\ufffd")  # bytes of a character that is not whole yet
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    text = text[:-length]
                    break
        text = text.rstrip()
        return (text if len(text) >= len(self._sent) else self._sent), False
