"""What a question comes back with: text, the sources that the model read, and what it cost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdllm_rag.decoding import DecodeStep

QUOTE_CHARS = 240

# A sentence ends at its full stop, at an empty line, before a list item, heading or table row, or with the text.
_SENTENCE = re.compile(r"\S.*?(?:[.!?][\"')\]]*(?=\s)|(?=\n\s*(?:\n|[-*|#>+]|\d+[.)]\s))|$)", re.DOTALL)


class Citation(NamedTuple):
    """A passage that the model read. `char_start:char_end` are code points of the document; `quote` is that text.

    Attributes:
        ordinal: of its chunk in the document, from 0.
        score: of its chunk (`Retrieved.score`), None if it was not scored.
        page: that the quote stands on, or begins on, from 1; None where the source has no pages.
        page_end: that it ends on, if that is a later one.
    """

    doc_id: str
    ordinal: int
    char_start: int
    char_end: int
    score: float | None
    quote: str
    page: int | None = None
    page_end: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON form; pages that are not known are left out."""
        return {name: value for name, value in self._asdict().items() if value is not None or name == "score"}


class ChunkCounts(NamedTuple):
    """Chunks of one answer: read and served from the store, read and encoded for it, and considered."""

    hit: int
    recomputed: int
    candidates: int


@dataclass(frozen=True)
class AnswerStats:
    """Cost and circumstances of one answer.

    Attributes:
        nfe: forward passes of decoding.
        tokens: answer tokens up to the end-of-answer token, which is not counted.
        prompt_tokens: tokens of the templated question.
        context_tokens: tokens of the chunks read; `cached_tokens` of them were served from the store.
        ms: milliseconds by phase: first_stage, draft, score, load, decode, total.
        chunks: how many were read from the store, computed, and considered.
        policy, decoder, model: that answered, by name.
        finish_reason: "stop" (the answer ended) or "length" (`max_new_tokens` were not enough).
        supported: whether an answer was found and not withheld.
        support: probability that the documents hold the answer, or None if the family has no calibration.
        min_support: what it was held against; None if nothing is withheld.
        note: why the filter left nothing to read, if it did.
        backend: how attention over the chunks ran: a Split-S backend ("triton, graphed" as a CUDA graph), or "dense".
    """

    nfe: int
    tokens: int
    prompt_tokens: int
    context_tokens: int
    cached_tokens: int
    ms: Mapping[str, float]
    chunks: ChunkCounts
    policy: str
    decoder: str
    model: str
    finish_reason: str
    supported: bool
    support: float | None
    backend: str = ""
    min_support: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {**self.__dict__, "ms": dict(self.ms), "chunks": self.chunks._asdict()}


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        text: the answer, or a sentence that says that the documents hold none.
        citations: a passage of each chunk that was read, those that hold the answer first, then by score; empty when
            the documents do not hold the answer.
        steps: the denoising steps in order.
    """

    text: str
    citations: tuple[Citation, ...]
    stats: AnswerStats
    steps: tuple[DecodeStep, ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON form of `pdllm ask --json`."""
        citations = [citation.as_dict() for citation in self.citations]
        return {"answer": self.text, "citations": citations, "stats": self.stats.as_dict()}


def best_passage(text: str, answer: str, question: str) -> tuple[int, int]:
    """Code points [start, end) of the sentence of `text` that holds the answer, else shares most words with both.

    Only the choice of words to show depends on it: the model read the whole chunk.
    """
    sentences = [match.span() for match in _SENTENCE.finditer(text)]
    if not sentences:
        return 0, len(text)
    needle = answer.casefold().strip()
    asked, told = _words(question), _words(answer)

    def rank(span: tuple[int, int]) -> tuple[bool, int, int]:
        sentence = text[slice(*span)]
        words = _words(sentence)
        return holds(sentence, answer), 2 * len(words & told) + len(words & asked), -span[0]

    start, end = max(sentences, key=rank)
    if end - start > QUOTE_CHARS:
        at = text[start:end].casefold().find(needle) if needle else -1
        start += max(0, min(at - QUOTE_CHARS // 2, end - start - QUOTE_CHARS)) if at > 0 else 0
        end = start + QUOTE_CHARS
    return start, start + len(text[start:end].rstrip())


def holds(passage: str, answer: str) -> bool:
    """Whether an answer stands in a passage as whole words, whatever its case."""
    needle = answer.casefold().strip()
    return bool(needle) and re.search(rf"(?<!\w){re.escape(needle)}(?!\w)", passage.casefold()) is not None


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))
