"""From a question to the chunks that the model will read: first stage, draft, predictive scores, top-K.

- the first stage (BM25) proposes a few candidates without reading any KV;
- the scorer orders them by s_I; unless the best one leads clearly, a draft of the answer is made in one denoising step
  over the first stage's best chunks and s_P is added; an empty draft, or one that says that nothing was found, is not
  scored;
- ties keep document order. With no more candidates than places, and no score window, nothing is scored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from pdllm_store import ChunkId, ChunkKV, ChunkRef, ChunkStore

from pdllm_rag.clock import Clock
from pdllm_rag.decoding import CommitRule, DecodeRequest, StaticKVDecoder
from pdllm_rag.first_stage import BM25Index
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.placement import plan_offsets
from pdllm_rag.pool import KVPool
from pdllm_rag.scoring import CandidateScorer, ScoringOptions

DRAFT_CHUNKS = 2
MIN_FOR_MARGIN = 4  # a median of fewer candidates says little about what an unrelated chunk scores


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


@dataclass(frozen=True)
class Retriever:
    """Predictive retrieval over one store and model."""

    model: LoadedModel
    store: ChunkStore
    index: BM25Index
    pool: KVPool
    scoring: ScoringOptions
    backend: str = "auto"

    def question(self, text: str) -> Prompt:
        """The canvas rows that scoring sees: the question alone in its template."""
        template = self.model.spec.family.template
        return self.model.tokenizer.render(template, [{"role": "user", "content": text}])

    def select(
        self, text: str, k: int, n_candidates: int, clock: Clock, *, doc_ids: Collection[str] | None = None
    ) -> Selection:
        """The k best chunks of the store for a question, of the first stage's `n_candidates`."""
        with clock.phase("first_stage"):
            found = self.index.search(text, max(k, n_candidates), doc_ids=doc_ids)
        return self.rank(text, [candidate.ref for candidate in found], k, clock)

    def rank(self, text: str, refs: Sequence[ChunkRef], k: int, clock: Clock) -> Selection:
        """The k best of these chunks."""
        if not self.needs_scores(len(refs), k):
            return Selection(tuple(refs), (0.0,) * len(refs), None, len(refs), frozenset())
        with clock.phase("score"):
            acquired = self.pool.acquire([ref.chunk_id for ref in refs])
        kvs = [acquired.kv[ref.chunk_id] for ref in refs]
        selection = self.rank_kv(text, refs, kvs, k, clock)
        return selection._replace(recomputed=acquired.recomputed)

    def rank_kv(self, text: str, refs: Sequence[ChunkRef], kvs: Sequence[ChunkKV], k: int, clock: Clock) -> Selection:
        """As `rank`, over KV at hand; the first chunks are taken for the first stage's best."""
        question = self.question(text)
        weight = self._draft_weight
        with clock.phase("score"):
            scorer = CandidateScorer(
                self.model,
                question,
                kvs,
                draft_len=self.scoring.draft_len if weight else 0,
                backend=self.backend,
            )
            s_i = scorer.s_i(self.scoring.groups).tolist()
        total = s_i
        leader, second = sorted(s_i, reverse=True)[:2]
        if weight and leader - second < self.scoring.clear_lead:
            with clock.phase("draft"):
                draft = self.draft(question, kvs[:DRAFT_CHUNKS])
            if draft:
                with clock.phase("score"):
                    total = [a + weight * b for a, b in zip(s_i, scorer.s_p(draft).tolist(), strict=True)]
        order = sorted(range(len(refs)), key=lambda i: (-total[i], refs[i]))[:k]
        return Selection(
            tuple(refs[i] for i in order),
            tuple(total[i] for i in order),
            max(s_i) - median(s_i) if len(s_i) >= MIN_FOR_MARGIN else None,
            len(refs),
            frozenset(),
        )

    def needs_scores(self, n_candidates: int, k: int) -> bool:
        """Whether there is anything to choose: more candidates than places, or a score window to apply."""
        return n_candidates > (k if self.model.spec.family.score_window is None else 1)

    @property
    def _draft_weight(self) -> float:
        chosen = self.scoring.draft_weight
        return self.model.spec.family.draft_weight if chosen is None else chosen

    def draft(self, question: Prompt, kvs: Sequence[ChunkKV]) -> list[int]:
        """A one-step draft over some chunks; empty if the model has nothing to say or says that it found nothing."""
        decoder = StaticKVDecoder(self.model, CommitRule(threshold=0.0), backend=self.backend)
        placement = plan_offsets([kv.k.shape[1] for kv in kvs], "sequential", chunk_len=0)
        request = DecodeRequest(
            question.ids, placement, self.scoring.draft_len, chunk_ids=[()] * len(kvs), chunk_kv=kvs
        )
        step = next(iter(decoder.steps([request])))
        draft = []
        for token in step.tokens[: self.scoring.draft_len]:
            if token in self.model.spec.eos_ids:
                break
            draft.append(token)
        no_answer = self.model.spec.family.no_answer
        if no_answer and self.model.tokenizer.decode(draft).strip() == no_answer[: len(no_answer)].strip():
            return []
        return draft
