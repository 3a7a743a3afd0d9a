"""From a question to the chunks that the model will read: first stage, draft, predictive scores, top-K.

- the first stage (BM25 unless another is chosen) proposes a few candidates without reading any KV;
- the scorer orders them by s_I; unless the best one leads clearly, a draft of the answer is made (by default in one
  step a block, over the first stage's best chunks) and s_P is added; an empty draft, or one that says that nothing was
  found, is not scored;
- ties keep document order. With no more candidates than places, and no score window, nothing is scored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from pdllm_store import ChunkId, ChunkKV, ChunkRef

from pdllm_rag.clock import Clock
from pdllm_rag.combinations import WeightedSum
from pdllm_rag.errors import FirstStageError
from pdllm_rag.evidence import Evidence
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.pool import KVPool
from pdllm_rag.scoring import ScoringOptions
from pdllm_rag.stages import Choice, FirstStages

MIN_FOR_MARGIN = 4  # a median of fewer candidates says little about what an unrelated chunk scores


class Selection(NamedTuple):
    """Selected chunks, best first.

    scores: mean log-likelihoods s less what `rank_weight` takes off, descending; None for what was not scored.
    margin: best s_I minus the candidates' median s_I; None when nothing or too little was scored, or s_I was not
        estimated as the families' `support` expects it.
    n_candidates: chunks that were scored, or considered.
    recomputed: chunks whose stored KV had to be computed again.
    """

    refs: tuple[ChunkRef, ...]
    scores: tuple[float | None, ...]
    margin: float | None
    n_candidates: int
    recomputed: frozenset[ChunkId]

    @classmethod
    def unscored(cls, refs: Sequence[ChunkRef]) -> Selection:
        """All of these, in their order."""
        return cls(tuple(refs), (None,) * len(refs), None, len(refs), frozenset())


@dataclass(frozen=True)
class Retriever:
    """Predictive retrieval over one store and model.

    Raises:
        ValueError: the scoring's estimator means nothing for this model.
    """

    model: LoadedModel
    stages: FirstStages
    pool: KVPool
    scoring: ScoringOptions

    def __post_init__(self) -> None:
        self.scoring.estimator.check(self.model.spec)

    def question(self, text: str) -> Prompt:
        """The canvas rows that scoring sees: the question alone in its template."""
        template = self.model.spec.family.template
        return self.model.tokenizer.render(template, [{"role": "user", "content": text}])

    def select(
        self,
        text: str,
        k: int,
        n_candidates: int,
        clock: Clock,
        *,
        score_window: float | None,
        doc_ids: Collection[str] | None = None,
        first_stage: Choice = "bm25",
        rank_weight: float = 0.0,
    ) -> Selection:
        """The k best chunks of the store for a question, of the first stage's `n_candidates`.

        Args:
            score_window: what will be left out for its score; without one, nothing is scored if all candidates fit.
            first_stage, rank_weight: see `AskOptions`.

        Raises:
            ChunkNotFoundError: a candidate was deleted meanwhile.
            FirstStageError: the user's own first stage gave too many chunks, one twice, or one that the store lacks.
            NumericsError: the model's logits are not finite.
        """
        with clock.phase("first_stage"):
            n_wanted = max(k, n_candidates)
            found = self.stages.chosen(first_stage).search(text, n_wanted, doc_ids=doc_ids)
        refs = [candidate.ref for candidate in found]
        n_distinct = len({ref.chunk_id for ref in refs})
        if not len(refs) == n_distinct <= n_wanted:
            raise FirstStageError(
                f"the first stage gave {len(refs)} chunks, {n_distinct} of them distinct; expected at most {n_wanted} "
                "distinct ones, best first"
            )
        if not needs_scores(len(refs), k, score_window):
            return Selection.unscored(refs)
        with clock.phase("score"):
            acquired = self.pool.acquire([ref.chunk_id for ref in refs])
        kvs = [acquired.kv[ref.chunk_id] for ref in refs]
        selection = self.rank(text, refs, kvs, k, clock, rank_weight=rank_weight)
        return selection._replace(recomputed=acquired.recomputed)

    def rank(
        self,
        text: str,
        refs: Sequence[ChunkRef],
        kvs: Sequence[ChunkKV],
        k: int,
        clock: Clock,
        *,
        rank_weight: float = 0.0,
    ) -> Selection:
        """The k best of these chunks; the first ones are taken for the first stage's best."""
        parts = self.evidence(text, kvs, clock).under(self.scoring)
        total = self.scoring.combination.scores(parts)
        if total is None:
            return Selection.unscored(refs[:k])
        total = with_ranks(total, rank_weight)
        order = sorted(range(len(refs)), key=lambda i: (-total[i], refs[i]))[:k]
        margin = None
        if self.scoring.has_plain_s_i and self._uses_s_i and len(refs) >= MIN_FOR_MARGIN:
            s_i = parts.s_i()
            margin = max(s_i) - median(s_i)
        return Selection(tuple(refs[i] for i in order), tuple(total[i] for i in order), margin, len(refs), frozenset())

    def evidence(self, text: str, kvs: Sequence[ChunkKV], clock: Clock) -> Evidence:
        """The likelihoods of a question over candidates, still to be computed."""
        question = self.question(text)
        return Evidence(
            self.model,
            question,
            kvs,
            clock,
            draft_len=self.scoring.draft_len if self._uses_draft else 0,
            at_once=len(self.scoring.estimator.readings(question.content or range(1))),
        )

    @property
    def _uses_s_i(self) -> bool:
        return isinstance(self.scoring.combination, WeightedSum) and self.scoring.question_weight != 0

    @property
    def _uses_draft(self) -> bool:
        weight = self.scoring.draft_weight
        weight = self.model.spec.family.draft_weight if weight is None else weight
        return weight != 0 or not isinstance(self.scoring.combination, WeightedSum)


def with_ranks(scores: Sequence[float], rank_weight: float) -> list[float]:
    """Scores of candidates, the first stage's best first, each with a prior of its rank: ln(rank ** -rank_weight)."""
    return [score - rank_weight * math.log(rank) for rank, score in enumerate(scores, start=1)]


def is_near(score: float | None, best: float | None, score_window: float | None) -> bool:
    """Whether a score lies within the window below the best one; without scores, or a window, everything does."""
    return score is None or best is None or score_window is None or score >= best - score_window


def needs_scores(n_candidates: int, k: int, score_window: float | None) -> bool:
    """Whether there is anything to choose: more candidates than places, or a score window that may leave some out."""
    windowed = score_window is not None and score_window != float("inf")
    return n_candidates > (1 if windowed else k)
