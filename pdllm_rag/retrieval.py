"""From a question to the chunks that the model will read: first stage, draft, predictive scores, top-K.

- the first stage (BM25) proposes a few candidates without reading any KV;
- the scorer orders them by s_I; unless the best one leads clearly, a draft of the answer is made in one step a block
  over the first stage's best chunks and s_P is added; an empty draft, or one that says that nothing was found, is not
  scored;
- ties keep document order. With no more candidates than places, and no score window, nothing is scored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from pdllm_store import ChunkId, ChunkKV, ChunkRef

from pdllm_rag.attention import causal_block
from pdllm_rag.clock import Clock
from pdllm_rag.decoding import CommitRule, DecodeRequest, StaticKVDecoder
from pdllm_rag.first_stage import BM25Index
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.placement import plan_offsets
from pdllm_rag.pool import KVPool
from pdllm_rag.scoring import CandidateScorer, ScoringOptions
from pdllm_rag.support import says_nothing

DRAFT_CHUNKS = 2
MIN_FOR_MARGIN = 4  # a median of fewer candidates says little about what an unrelated chunk scores
SCORED_AT_ONCE = 32  # candidates whose KV is gathered together


class Selection(NamedTuple):
    """Selected chunks, best first.

    scores: mean log-likelihoods s, descending; 0.0 throughout when nothing was scored.
    margin: best s_I minus the candidates' median s_I; None when nothing or too little was scored.
    n_candidates: chunks that were scored, or considered.
    recomputed: chunks whose stored KV had to be computed again.
    """

    refs: tuple[ChunkRef, ...]
    scores: tuple[float, ...]
    margin: float | None
    n_candidates: int
    recomputed: frozenset[ChunkId]

    @classmethod
    def unscored(cls, refs: Sequence[ChunkRef]) -> Selection:
        """All of these, in their order."""
        return cls(tuple(refs), (0.0,) * len(refs), None, len(refs), frozenset())


@dataclass(frozen=True)
class Retriever:
    """Predictive retrieval over one store and model."""

    model: LoadedModel
    index: BM25Index
    pool: KVPool
    scoring: ScoringOptions

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
    ) -> Selection:
        """The k best chunks of the store for a question, of the first stage's `n_candidates`.

        Args:
            score_window: what will be left out for its score; without one, nothing is scored if all candidates fit.

        Raises:
            ChunkNotFoundError: a candidate was deleted meanwhile.
            NumericsError: the model's logits are not finite.
        """
        with clock.phase("first_stage"):
            found = self.index.search(text, max(k, n_candidates), doc_ids=doc_ids)
        refs = [candidate.ref for candidate in found]
        if not needs_scores(len(refs), k, score_window):
            return Selection.unscored(refs)
        with clock.phase("score"):
            acquired = self.pool.acquire([ref.chunk_id for ref in refs])
        selection = self.rank(text, refs, [acquired.kv[ref.chunk_id] for ref in refs], k, clock)
        return selection._replace(recomputed=acquired.recomputed)

    def rank(self, text: str, refs: Sequence[ChunkRef], kvs: Sequence[ChunkKV], k: int, clock: Clock) -> Selection:
        """The k best of these chunks; the first ones are taken for the first stage's best."""
        question = self.question(text)
        weight = self._draft_weight
        with clock.phase("score"):
            scorers = [
                CandidateScorer(
                    self.model,
                    question,
                    kvs[start : start + SCORED_AT_ONCE],
                    draft_len=self.scoring.draft_len if weight else 0,
                    at_once=self.scoring.groups,
                )
                for start in range(0, len(kvs), SCORED_AT_ONCE)
            ]
            s_i = [value for scorer in scorers for value in scorer.s_i(self.scoring.groups).tolist()]
        total = s_i
        ordered = sorted(s_i, reverse=True)
        if weight and len(s_i) > 1 and ordered[0] - ordered[1] < self.scoring.clear_lead:
            with clock.phase("draft"):
                draft = self.draft(question, kvs[:DRAFT_CHUNKS])
            if draft:
                with clock.phase("score"):
                    s_p = [value for scorer in scorers for value in scorer.s_p(draft).tolist()]
                total = [a + weight * b for a, b in zip(s_i, s_p, strict=True)]
        order = sorted(range(len(refs)), key=lambda i: (-total[i], refs[i]))[:k]
        return Selection(
            tuple(refs[i] for i in order),
            tuple(total[i] for i in order),
            ordered[0] - median(s_i) if len(s_i) >= MIN_FOR_MARGIN else None,
            len(refs),
            frozenset(),
        )

    @property
    def _draft_weight(self) -> float:
        chosen = self.scoring.draft_weight
        return self.model.spec.family.draft_weight if chosen is None else chosen

    def draft(self, question: Prompt, kvs: Sequence[ChunkKV]) -> list[int]:
        """A draft over some chunks; empty if the model has nothing to say or says that it found nothing."""
        decoder = StaticKVDecoder(self.model, CommitRule(threshold=0.0))
        block = causal_block(self.model.spec.family) or 1
        placement = plan_offsets([kv.k.shape[1] for kv in kvs], "sequential", chunk_len=0, multiple=block)
        request = DecodeRequest(question.ids, placement, self.scoring.draft_len, chunk_kv=kvs)
        filled = {row: token for s in decoder.steps([request]) for row, token in zip(s.rows, s.tokens, strict=True)}
        draft = []
        for _, token in sorted(filled.items())[: self.scoring.draft_len]:
            if token in self.model.spec.eos_ids:
                break
            draft.append(token)
        nothing = says_nothing(self.model.tokenizer.decode(draft), self.model.spec.family.no_answer)
        return [] if nothing else draft


def needs_scores(n_candidates: int, k: int, score_window: float | None) -> bool:
    """Whether there is anything to choose: more candidates than places, or a score window that may leave some out."""
    windowed = score_window is not None and score_window != float("inf")
    return n_candidates > (1 if windowed else k)
