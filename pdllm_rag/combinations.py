"""How the parts of a score become one number a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Parts(Protocol):
    """The likelihoods of one question's candidates, computed when they are asked for; higher is better."""

    @property
    def question_weight(self) -> float:
        """Of s_I."""
        ...

    @property
    def draft_weight(self) -> float:
        """Of s_P: lambda."""
        ...

    @property
    def clear_lead(self) -> float:
        """Nats per token by which the best s_I must lead for s_P to be left out."""
        ...

    def s_i(self) -> list[float]:
        """Of the question, per candidate."""
        ...

    def s_p(self) -> list[float] | None:
        """Of the draft, per candidate; None where no draft says anything."""
        ...

    def union(self) -> list[float]:
        """Over question and draft tokens together, per candidate."""
        ...


class Combination(Protocol):
    """From parts to scores."""

    def scores(self, parts: Parts) -> list[float] | None:
        """One per candidate, higher is better; None where nothing tells them apart."""
        ...


@dataclass(frozen=True)
class WeightedSum:
    """question_weight * s_I + lambda * s_P; s_P is left out where s_I has a clear leader or no draft says anything."""

    def scores(self, parts: Parts) -> list[float] | None:
        """See `Combination.scores`."""
        has_question = parts.question_weight != 0
        s_i = parts.s_i() if has_question else []
        if parts.draft_weight == 0 or (has_question and not _is_close(s_i, parts.clear_lead)):
            return [parts.question_weight * value for value in s_i]
        s_p = parts.s_p()
        if not has_question:
            return None if s_p is None else [parts.draft_weight * value for value in s_p]
        if s_p is None:
            return [parts.question_weight * value for value in s_i]
        return [parts.question_weight * a + parts.draft_weight * b for a, b in zip(s_i, s_p, strict=True)]


@dataclass(frozen=True)
class UnionMean:
    """The mean over question and draft tokens together, as in the authors' code; a draft is always made."""

    def scores(self, parts: Parts) -> list[float] | None:
        """See `Combination.scores`."""
        return parts.union()


def _is_close(s_i: Sequence[float], clear_lead: float) -> bool:
    ordered = sorted(s_i, reverse=True)
    return len(ordered) > 1 and ordered[0] - ordered[1] < clear_lead
