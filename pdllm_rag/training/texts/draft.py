"""A sample of real text in the making: its passages, and what may still be asked of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pdllm_rag.training.texts.corpus import Evidence, Passage, Row
from pdllm_rag.training.texts.lexicon import Lexicon
from pdllm_rag.training.texts.quotes import run
from pdllm_rag.training.texts.words import content, folded, sentences, stands_in, words

_MIN_COMMON_CHARS = 40  # of a sentence that makes two passages overlap
_MAX_ANSWER_SHARED = 0.4  # share of an answer's words that may stand in passages that do not hold it


@dataclass
class Part:
    """One passage of the sample."""

    text: str
    rows: list[Row] = field(default_factory=list)
    free: list[Row] = field(default_factory=list)
    quotes: list[Row] = field(default_factory=list)  # answered by a sentence
    misses: list[str] = field(default_factory=list)

    @classmethod
    def of_passage(cls, passage: Passage, limit: int, rng: random.Random) -> Part:
        """A passage, or a run of its sentences of about so many characters, with the questions that it answers."""
        text = window(passage.text, [row.answer for row in passage.rows], limit, rng)
        if text == passage.text:
            return cls(text, list(passage.rows), list(passage.free), [], list(passage.misses))
        kept, everything = folded(text), folded(passage.text)
        rows = [row for row in passage.rows if _n_times(row.answer, kept) == _n_times(row.answer, everything) > 0]
        return cls(text, [row for row in rows if row.answer in text], [], [], list(passage.misses))

    @classmethod
    def of_evidence(cls, evidence: Sequence[Evidence], short: Callable[[str, str], str | None], joint: str) -> Part:
        """Sentences in a row, each with its question."""
        part = cls(joint.join(dict.fromkeys(one.sentence for one in evidence)))
        for one in evidence:
            part.quotes.append(Row(one.question, one.sentence))
            if answer := short(one.question, one.sentence):
                part.rows.append(Row(one.question, answer))
        return part

    def texts(self) -> Iterator[str]:
        """The passage and all questions and answers."""
        yield self.text
        for row in (*self.rows, *self.free, *self.quotes):
            yield from row
        yield from self.misses

    def change(self, to: Callable[[str], str]) -> None:
        """Change the passage, the questions and the answers alike."""
        self.text = to(self.text)
        for rows in (self.rows, self.free, self.quotes):
            rows[:] = [Row(to(row.question), to(row.answer)) for row in rows]
        self.misses = [to(question) for question in self.misses]

    def without(self, gone: Sequence[str]) -> Part | None:
        """The passage less some of its sentences, and less what they may answer; None if hardly any text is left."""
        kept = [sentence for sentence in sentences(self.text) if sentence not in gone]
        if len(kept) < 2:
            return None
        lost, text = folded("\n".join(gone)), " ".join(kept)
        return Part(
            text,
            [row for row in self.rows if row.answer in text and not stands_in(row.answer, lost)],
            [],
            [row for row in self.quotes if row.answer in text],
            self.misses,
        )


@dataclass
class Draft:
    """The parts in the order read."""

    parts: list[Part]

    def folded(self) -> str:
        """All passages for `stands_in`."""
        return folded("\n".join(part.text for part in self.parts))

    def rows(self) -> list[tuple[Row, int]]:
        """Questions whose answers stand in one passage only, with its index."""
        said = [folded(part.text) for part in self.parts]
        return [
            (row, at)
            for at, part in enumerate(self.parts)
            for row in part.rows
            if not any(stands_in(row.answer, other) for place, other in enumerate(said) if place != at)
        ]

    def overlaps(self, text: str) -> bool:
        """Whether a long sentence of a passage stands in the text."""
        return any(
            len(sentence) >= _MIN_COMMON_CHARS and sentence in text
            for part in self.parts
            for sentence in sentences(part.text)
        )


def window(text: str, answers: Sequence[str], limit: int, rng: random.Random) -> str:
    """A run of sentences of at most `limit` characters (or one sentence), around one of the answers if any."""
    if len(text) <= limit:
        return text
    parts = sentences(text)
    first = rng.randrange(len(parts))
    if answers:
        answer = rng.choice(answers)
        first = next((at for at, part in enumerate(parts) if answer in part), first)
    last, length = first, len(parts[first])
    while True:
        sides = [at for at in (first - 1, last + 1) if 0 <= at < len(parts) and length + len(parts[at]) + 1 <= limit]
        if not sides:
            return run(text, parts, first, last)
        side = rng.choice(sides)
        first, last, length = min(first, side), max(last, side), length + len(parts[side]) + 1


def is_unanswered(answer: str, folded_text: str) -> bool:
    """Whether a text holds neither an answer nor many of its words."""
    if stands_in(answer, folded_text):
        return False
    said = content(answer) or words(answer)
    return sum(f" {word} " in folded_text for word in said) <= _MAX_ANSWER_SHARED * len(said)


def nearness(question: str, folded_text: str, lexicon: Lexicon) -> float:
    """Summed rarity of the question's words that stand in a text."""
    return sum(lexicon.rarity(word) for word in dict.fromkeys(content(question)) if f" {word} " in folded_text)


def _n_times(answer: str, folded_text: str) -> int:
    return folded_text.count(f" {' '.join(words(answer))} ")
