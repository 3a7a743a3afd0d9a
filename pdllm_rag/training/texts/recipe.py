"""How much of what a mixture holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import get_args

from pdllm_rag.training.texts.sample import Kind

SYNTHETIC: tuple[Kind, ...] = ("passkey", "number", "key-value", "fact")
REFUSED: tuple[Kind, ...] = ("near-miss", "not-found")
SHARES: Mapping[Kind, float] = MappingProxyType(
    {
        "qa": 0.46,
        "cloze": 0.15,
        "passkey": 0.02,
        "number": 0.02,
        "key-value": 0.04,
        "fact": 0.05,
        "quote": 0.04,
        "free": 0.02,
        "not-found": 0.03,
        "near-miss": 0.08,
        "continuation": 0.01,
        "likelihood": 0.08,
    }
)
LONG_SHARES: Mapping[Kind, float] = MappingProxyType(
    {
        "quote": 0.40,
        "continuation": 0.22,
        "free": 0.14,
        "qa": 0.06,
        "cloze": 0.02,
        "number": 0.04,
        "key-value": 0.04,
        "fact": 0.02,
        "near-miss": 0.04,
        "not-found": 0.02,
    }
)
# By the start of a source's name; the first that fits counts, 1 where none does.
SOURCE_WEIGHTS = (("squad-reqa-evidence", 1.5), ("squad", 2.5), ("nq-", 2.5), ("qamr", 1.5), ("ropes", 0.3))


@dataclass(frozen=True)
class Recipe:
    """Shares of the kinds among all exchanges (they need not sum to 1), and how samples are built.

    Raises:
        ValueError: an unknown kind, a share that is no number of at least 0, no share above 0, or a bad bound.
    """

    shares: Mapping[Kind, float] = field(default_factory=lambda: dict(SHARES))
    source_weights: tuple[tuple[str, float], ...] = SOURCE_WEIGHTS
    swapped: float = 0.3  # of real passages with questions: one answer is another of its kind, in passage and answer
    alike: float = 0.5  # of the other passages: lexically similar ones rather than random ones
    prose: float = 0.12  # of the other passages: from the prose
    evidence: float = 0.15  # of the other passages: put together from evidence sentences
    min_chars: int = 1600  # of a sample's passages; a sample's limit is drawn between the two
    max_chars: int = 4000
    max_passage_chars: int = 1400
    exchanges: tuple[int, int] = (5, 7)  # fewest and most in a sample
    not_found: str = "Not found in the documents."
    refused_weight: float = 0.35  # of an answer that says so: at 1, three in ten answerable questions were refused

    def __post_init__(self) -> None:
        unknown = sorted(set(self.shares) - set(get_args(Kind)))
        if unknown:
            raise ValueError(f"shares names {', '.join(unknown)}; expected kinds of {', '.join(get_args(Kind))}")
        if not all(math.isfinite(share) and share >= 0 for share in self.shares.values()):
            raise ValueError(f"shares is {dict(self.shares)}; each must be a number of at least 0")
        if not any(self.shares.values()):
            raise ValueError("shares holds no share above 0; give at least one kind a share")
        if not 0 < self.min_chars <= self.max_chars or self.max_passage_chars < 1:
            raise ValueError(
                f"min_chars, max_chars, max_passage_chars are {self.min_chars}, {self.max_chars}, "
                f"{self.max_passage_chars}; expected 0 < min_chars <= max_chars and max_passage_chars > 0"
            )
        if not 0 < self.exchanges[0] <= self.exchanges[1]:
            raise ValueError(f"exchanges is {self.exchanges}; expected the fewest (at least 1) and the most")

    @classmethod
    def long(cls) -> Recipe:
        """Mostly answers of a sentence and more: quotes, continuations, free ones, lists."""
        return replace(cls(), shares=dict(LONG_SHARES))

    @classmethod
    def both(cls) -> Recipe:
        """Halfway between short and long answers; no likelihood blocks."""
        kinds = sorted(SHARES.keys() - {"likelihood"})
        return replace(cls(), shares={kind: (SHARES[kind] + LONG_SHARES.get(kind, 0.0)) / 2 for kind in kinds})

    def source_weight(self, source: str) -> float:
        """How often a row of a source is drawn, against one of weight 1."""
        return next((weight for start, weight in self.source_weights if source.startswith(start)), 1.0)
