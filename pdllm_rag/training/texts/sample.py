"""A training sample in words: passages, and the question blocks over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "qa",
    "cloze",
    "passkey",
    "number",
    "key-value",
    "fact",
    "quote",
    "free",
    "not-found",
    "near-miss",
    "continuation",
    "likelihood",
]


@dataclass(frozen=True)
class Exchange:
    """One question block; the blocks of a sample do not see each other."""

    kind: Kind
    question: str
    answer: str  # what the canvas holds before the end of the answer, never empty
    passage: int | None  # index of the passage that holds the answer; None where none does
    weight: float = 1.0


@dataclass(frozen=True)
class Sample:
    """Passages in the order read, gold and others mixed, and the exchanges over them."""

    passages: tuple[str, ...]
    exchanges: tuple[Exchange, ...]
