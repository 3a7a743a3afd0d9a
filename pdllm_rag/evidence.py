"""The likelihoods of one question over its candidates, each computed once, however many scores ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pdllm_store import ChunkKV

from pdllm_rag.clock import Clock
from pdllm_rag.drafts import make_drafts
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.scoring import CandidateScorer, ScoringOptions

SCORED_AT_ONCE = 32  # candidates whose KV is gathered together, at most
SCORED_BYTES = 4 << 30  # and of so many bytes


def scored_at_once(kvs: Sequence[ChunkKV]) -> int:
    """How many of these candidates are scored together."""
    largest = max((kv.k.nbytes + kv.v.nbytes for kv in kvs), default=1)
    return max(1, min(SCORED_AT_ONCE, SCORED_BYTES // max(1, largest)))


T = TypeVar("T")


class Evidence:
    """What is known of one question's candidates, the first stage's best first.

    Args:
        kvs: KV of each candidate, [Y, T, G, D].
        clock: gets the time in phases "score" and "draft".
        draft_len: most draft slots that will be asked for; 0 if no draft is.
        at_once: readings that one pass of the scorer covers.
    """

    def __init__(
        self,
        model: LoadedModel,
        question: Prompt,
        kvs: Sequence[ChunkKV],
        clock: Clock,
        *,
        draft_len: int,
        at_once: int,
    ) -> None:
        self._model = model
        self._question = question
        self._kvs = kvs
        self._clock = clock
        self._step = scored_at_once(kvs)
        self._known: dict[Hashable, object] = {}
        self._ms: dict[Hashable, float] = {}
        with clock.phase("score"):
            self._scorers = [
                CandidateScorer(model, question, kvs[start : start + self._step], draft_len=draft_len, at_once=at_once)
                for start in range(0, len(kvs), self._step)
            ]

    def under(self, options: ScoringOptions) -> Parts:
        """The parts that these options name."""
        family = self._model.spec.family
        weight = family.draft_weight if options.draft_weight is None else options.draft_weight
        return Parts(self, options, weight)

    def once(self, key: Hashable, phase: str, compute: Callable[[], T]) -> T:
        """What `compute` gave when this key was first asked for."""
        if key not in self._known:
            started = time.perf_counter()
            with self._clock.phase(phase):
                self._known[key] = compute()
            self._ms[key] = (time.perf_counter() - started) * 1000
        return self._known[key]  # type: ignore[return-value]  # a key stands for one computation

    def ms(self, keys: Sequence[Hashable]) -> float:
        """Milliseconds that computing these took."""
        return sum(self._ms[key] for key in set(keys))

    def drafts(self, options: ScoringOptions) -> list[list[int]]:
        """One per candidate."""
        return make_drafts(
            self._model,
            self._question,
            self._kvs,
            context=options.draft_context,
            slots=options.draft_len,
            rounds=options.draft_rounds,
        )

    def of_question(self, options: ScoringOptions) -> list[float]:
        """s_I per candidate."""
        found = (scorer.s_i(options.estimator, window=options.window) for scorer in self._scorers)
        return [value for part in found for value in part.tolist()]

    def of_drafts(self, drafts: Sequence[Sequence[int]]) -> list[float] | None:
        """s_P per candidate, the lowest one for those without a draft; None if nobody has one."""
        if not any(drafts):
            return None
        found: list[float | None] = []
        for start, scorer in zip(range(0, len(drafts), self._step), self._scorers, strict=True):
            own = drafts[start : start + self._step]
            values = scorer.s_p(own).tolist() if any(own) else [None] * len(own)
            found += [value if draft else None for value, draft in zip(values, own, strict=True)]
        lowest = min(value for value in found if value is not None)
        return [lowest if value is None else value for value in found]

    def of_both(self, drafts: Sequence[Sequence[int]], options: ScoringOptions) -> list[float]:
        """The union's mean per candidate."""
        found: list[float] = []
        for start, scorer in zip(range(0, len(drafts), self._step), self._scorers, strict=True):
            own = drafts[start : start + self._step]
            found += scorer.union(own, options.estimator, window=options.window).tolist()
        return found


@dataclass
class Parts:
    """See `combinations.Parts`.

    Attributes:
        asked: keys of what was asked for.
    """

    evidence: Evidence
    options: ScoringOptions
    draft_weight: float
    asked: list[Hashable] = field(default_factory=list)

    @property
    def question_weight(self) -> float:
        """See `combinations.Parts`."""
        return self.options.question_weight

    @property
    def clear_lead(self) -> float:
        """See `combinations.Parts`."""
        return self.options.clear_lead

    def s_i(self) -> list[float]:
        """See `combinations.Parts`."""
        key = ("s_i", self.options.estimator, self.options.window)
        return self._once(key, "score", lambda: self.evidence.of_question(self.options))

    def s_p(self) -> list[float] | None:
        """See `combinations.Parts`."""
        drafts = self.drafts()
        return self._once(("s_p", *self._draft_key), "score", lambda: self.evidence.of_drafts(drafts))

    def union(self) -> list[float]:
        """See `combinations.Parts`."""
        drafts = self.drafts()
        key = ("union", self.options.estimator, self.options.window, *self._draft_key)
        return self._once(key, "score", lambda: self.evidence.of_both(drafts, self.options))

    def drafts(self) -> list[list[int]]:
        """One per candidate."""
        return self._once(("draft", *self._draft_key), "draft", lambda: self.evidence.drafts(self.options))

    def ms(self) -> float:
        """Milliseconds of all that was asked for, as if nobody had asked for it before."""
        return self.evidence.ms(self.asked)

    @property
    def _draft_key(self) -> tuple[Hashable, ...]:
        options = self.options
        return options.draft_context, options.draft_len, options.draft_rounds

    def _once(self, key: Hashable, phase: str, compute: Callable[[], T]) -> T:
        self.asked.append(key)
        return self.evidence.once(key, phase, compute)
