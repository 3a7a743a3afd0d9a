"""Pure functions from answers to figures: how right an answer is, and how sure a mean over questions is.

Answers are compared as SQuAD does: in lower case, without punctuation and articles, white space folded.
Source: Rajpurkar et al., SQuAD (arXiv 1606.05250), exact match and token F1.
"""

from __future__ import annotations

import math
import random
import statistics
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

ARTICLES = frozenset(("a", "an", "the"))
RESAMPLES = 2000
Z = 1.959964  # of the normal distribution, two-sided 95 %


class Grade(NamedTuple):
    """One answer against the accepted ones; the best of them counts.

    exact: equal after normalisation.
    contained: an accepted answer's words stand in the answer, one after another.
    f1: of the bags of words.
    """

    exact: bool
    contained: bool
    f1: float

    @property
    def correct(self) -> bool:
        """Exact or contained: what accuracy counts."""
        return self.exact or self.contained


class Estimate(NamedTuple):
    """A mean over questions and its 95 % interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """JSON form."""
        return self._asdict()


def normalised(text: str) -> list[str]:
    """Words of a text in lower case; punctuation and signs such as € are taken out, articles are left out."""
    kept = "".join(sign for sign in text.lower() if unicodedata.category(sign)[0] not in "PS")
    return [word for word in kept.split() if word not in ARTICLES]


def exact_match(prediction: str, accepted: str) -> bool:
    """Whether both are the same words."""
    return normalised(prediction) == normalised(accepted)


def token_f1(prediction: str, accepted: str) -> float:
    """Harmonic mean of precision and recall of the words; without words on a side, whether both have none."""
    said, wanted = normalised(prediction), normalised(accepted)
    if not said or not wanted:
        return float(said == wanted)
    shared = sum((Counter(said) & Counter(wanted)).values())
    return 2 * shared / (len(said) + len(wanted))


def contained(prediction: str, accepted: str) -> bool:
    """Whether the accepted answer's words stand in the prediction in one run; words, not substrings."""
    said, wanted = normalised(prediction), normalised(accepted)
    return bool(wanted) and any(said[at : at + len(wanted)] == wanted for at in range(len(said) - len(wanted) + 1))


def grade(prediction: str, accepted: Sequence[str]) -> Grade:
    """Grade an answer by the accepted one that suits it best; nothing is right where nothing is accepted."""
    return Grade(
        exact=any(exact_match(prediction, answer) for answer in accepted),
        contained=any(contained(prediction, answer) for answer in accepted),
        f1=max((token_f1(prediction, answer) for answer in accepted), default=0.0),
    )


def first_rank(retrieved: Sequence[str], relevant: Collection[str]) -> int | None:
    """1-based rank of the first relevant document, or None if there is none."""
    return next((rank for rank, doc_id in enumerate(retrieved, start=1) if doc_id in relevant), None)


def proportion(flags: Sequence[bool]) -> Estimate | None:
    """Share of True with its Wilson interval; None of nothing.

    Source: Wilson (1927), the score interval: it stays within [0, 1] and does not vanish at 0 and 1.
    """
    n = len(flags)
    if not n:
        return None
    share = sum(flags) / n
    centre = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    reach = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return Estimate(share, min(share, max(0.0, centre - reach)), max(share, min(1.0, centre + reach)))


def mean(values: Sequence[float]) -> Estimate | None:
    """Mean with its percentile bootstrap interval, the same for the same values; None of nothing."""
    if not values:
        return None
    generator = random.Random(0)
    means = [statistics.fmean(generator.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return Estimate(statistics.fmean(values), percentile(means, 2.5), percentile(means, 97.5))


def location(values: Sequence[float]) -> dict[str, float]:
    """Median and 90th percentile."""
    return {"median": float(statistics.median(values)), "p90": percentile(values, 90)}


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, neighbours interpolated.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("percentile of no values; expected at least one")
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)
