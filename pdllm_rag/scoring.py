"""Predictive scoring: how well a chunk lets the model predict the question and a draft of its answer.

    s = a * s_I + lambda * s_P                        (`WeightedSum`; a = 1)
    s_I = mean over question tokens of ln p(token | chunk, the other question tokens)
    s_P = mean over draft tokens of ln p(token | chunk, question)

    s = mean over question and draft tokens of ln p(token | chunk, the other tokens)          (`UnionMean`)

All are log-likelihoods: higher is better. (The paper writes s_I as a negative log-likelihood; its public code, like
this, keeps the chunks with the highest likelihood, and computes the union's mean, in which a draft of d tokens weighs
d / (question tokens + d).) How a likelihood is estimated is the estimator's business (`estimators`).

Source: Prefilling-dLLM (arXiv 2606.10537), chunk selection by self-information and pseudo-likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from pdllm_store import ChunkKV

from pdllm_rag.attends import split_s_attend
from pdllm_rag.attention import causal_block
from pdllm_rag.combinations import Combination, UnionMean, WeightedSum
from pdllm_rag.context import Placed, gather
from pdllm_rag.estimators import Estimator, MaskedGroups, Reading
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.numerics import log_partition
from pdllm_rag.placement import plan_offsets

ROWS_AT_ONCE = 4096  # of one pass
DRAFT_CONTEXTS = ("first_stage", "none", "per_chunk")


@dataclass(frozen=True)
class ScoringOptions:
    """How chunks are scored. `AskOptions.score_window` and a family's `support` were chosen for the defaults.

    Attributes:
        estimator: of the likelihood of question tokens (with `UnionMean`, of draft tokens as well).
        combination: of question and draft into one score.
        question_weight: of s_I in the sum; 0 leaves it out, below 0 turns its sign (the paper's formula as it is
            written has -1), both for ablations.
        draft_weight: lambda; None takes the family's. 0 leaves draft and s_P out.
        draft_len: draft slots: most draft tokens.
        draft_rounds: denoising rounds of a draft; in each an even share of the slots becomes final, the most
            confident ones first. 1 fills all at once.
        draft_context: what a draft is made over: "first_stage" (its two best chunks), "none" (the question alone, as
            in the authors' code) or "per_chunk" (each candidate has its own, made over itself alone).
        window: only the last so many question tokens are scored; None scores all.
        clear_lead: s_P is left out when the best s_I leads the second by at least this much (nats per token).

    Raises:
        ValueError: a value out of range, or weights beside `UnionMean`, which has none.
    """

    estimator: Estimator = field(default_factory=MaskedGroups)
    combination: Combination = field(default_factory=WeightedSum)
    question_weight: float = 1.0
    draft_weight: float | None = None
    draft_len: int = 8
    draft_rounds: int = 1
    draft_context: str = "first_stage"
    window: int | None = None
    clear_lead: float = 0.5

    def __post_init__(self) -> None:
        for name in ("draft_len", "draft_rounds", *(["window"] if self.window is not None else [])):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number of 1 or more")
        if self.draft_rounds > self.draft_len:
            raise ValueError(
                f"draft_rounds is {self.draft_rounds} for {self.draft_len} draft slots; expected at most as many"
            )
        if self.draft_context not in DRAFT_CONTEXTS:
            raise ValueError(f"draft_context is {self.draft_context!r}; expected one of {', '.join(DRAFT_CONTEXTS)}")
        for name, value in (("question_weight", self.question_weight), ("draft_weight", self.draft_weight or 0.0)):
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value!r}; expected a finite number")
        if math.isnan(self.clear_lead):
            raise ValueError("clear_lead is nan; expected a number, inf to draft always")
        if self.question_weight == 0 and self.draft_weight == 0:
            raise ValueError("question_weight and draft_weight are both 0; expected one part of the score at least")
        if isinstance(self.combination, UnionMean) and (self.question_weight != 1 or self.draft_weight is not None):
            raise ValueError(
                f"question_weight is {self.question_weight} and draft_weight {self.draft_weight} with UnionMean, where "
                "every token weighs the same; leave them out, or take WeightedSum"
            )

    @property
    def has_plain_s_i(self) -> bool:
        """Whether s_I is the one that families' `support` was fitted to: two groups over the whole question."""
        return self.estimator == MaskedGroups(2) and self.window is None


class CandidateScorer:
    """Likelihoods of one question over the stored KV of its candidates; a candidate is never encoded again.

    A token that no canvas row predicts (under logit shift, that of the first row) is not scored.

    Args:
        candidates: KV of each candidate, [Y, T, G, D].
        draft_len: most draft tokens that `s_p` and `union` will be asked for.
        at_once: readings that one pass covers; the results are the same.

    Raises:
        ValueError: no candidates, or a question without words.
        NumericsError: (the others) the model's logits are not finite.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: LoadedModel,
        question: Prompt,
        candidates: Sequence[ChunkKV],
        *,
        draft_len: int = 0,
        at_once: int = 1,
    ) -> None:
        if not candidates or not question.content:
            raise ValueError(
                f"scoring got {len(candidates)} candidates and {len(question.content)} question tokens; "
                "expected at least one of each"
            )
        self._model = model
        self._question = question
        self._n = len(candidates)
        self._block = causal_block(model.spec.family)
        room = len(question.ids) + draft_len
        self._at_once = max(1, min(at_once, ROWS_AT_ONCE // (room * self._n)))
        placed = [
            Placed((kv,), plan_offsets([kv.k.shape[1]], "sequential", chunk_len=0, multiple=self._block or 1))
            for kv in candidates
        ]
        context = gather(placed, [room * self._at_once] * self._n, model.backbone)
        self._context = context.side_by_side(self._at_once)

    @torch.inference_mode()
    def s_i(self, estimator: Estimator, *, window: int | None = None) -> torch.Tensor:
        """float32 [N]: mean ln p of the question's tokens, or of its last `window` ones."""
        rows = self._question.content[-(window or 0) :]
        return self._mean_log_p(range(self._n), [self._question.ids] * self._n, rows, estimator)

    @torch.inference_mode()
    def s_p(self, drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        """float32 [N]: mean ln p of each candidate's draft, all of it hidden at once behind the whole question.

        A candidate without a draft (an empty one) gets the lowest value of the others.

        Raises:
            ValueError: not a draft for each candidate, or all are empty.
        """
        return self._over_drafts(drafts, (), MaskedGroups(1), is_empty_last=True)

    @torch.inference_mode()
    def union(
        self, drafts: Sequence[Sequence[int]], estimator: Estimator, *, window: int | None = None
    ) -> torch.Tensor:
        """float32 [N]: mean ln p over the question's tokens (its last `window` ones) and each candidate's draft.

        Raises:
            ValueError: not a draft for each candidate.
        """
        return self._over_drafts(drafts, self._question.content[-(window or 0) :], estimator, is_empty_last=False)

    def _over_drafts(
        self,
        drafts: Sequence[Sequence[int]],
        question_rows: Sequence[int],
        estimator: Estimator,
        *,
        is_empty_last: bool,
    ) -> torch.Tensor:
        """Candidates with equally long drafts are scored together."""
        if len(drafts) != self._n or (is_empty_last and not any(drafts)):
            raise ValueError(
                f"got {len(drafts)} drafts, {sum(not draft for draft in drafts)} of them empty, for {self._n} "
                "candidates; expected one for each"
            )
        total = torch.full((self._n,), torch.inf)
        n_prompt = len(self._question.ids)
        for length in sorted({len(draft) for draft in drafts} - ({0} if is_empty_last else set())):
            of = [index for index, draft in enumerate(drafts) if len(draft) == length]
            rows = [*question_rows, *range(n_prompt, n_prompt + length)]
            total[of] = self._mean_log_p(of, [(*self._question.ids, *drafts[i]) for i in of], rows, estimator)
        total[total == torch.inf] = total.min()
        return total

    def _mean_log_p(
        self, of: Sequence[int], ids: Sequence[Sequence[int]], rows: Sequence[int], estimator: Estimator
    ) -> torch.Tensor:
        """float32 [len(of)]: mean ln p of the tokens at `rows` of canvases `ids`, one for each of these candidates."""
        readable = [row for row in rows if row >= int(self._model.spec.logit_shift)]
        if not readable:
            raise ValueError(
                f"no canvas row predicts any of the {len(rows)} tokens to be scored; expected a template with a token "
                "before the question"
            )
        readings = estimator.readings(readable)
        block = 1 if estimator.is_causal else self._block
        total = torch.zeros(len(of))
        for first in range(0, len(readings), self._at_once):
            found = self._log_p(of, torch.tensor(ids), readings[first : first + self._at_once], block)
            total += sum(part.sum(dim=1) for part in found)
        return total / len(readable)

    def _log_p(
        self, of: Sequence[int], ids: torch.Tensor, readings: Sequence[Reading], block: int | None
    ) -> list[torch.Tensor]:
        """float32 [n, rows] for each reading: ln p of the true tokens at its scored rows; ids are int64 [n, L]."""
        backbone, spec = self._model.backbone, self._model.spec
        n_canvases, length = ids.shape
        masked = ids.repeat(len(readings), 1, 1)
        for copy, reading in zip(masked, readings, strict=True):
            copy[:, list(reading.hidden)] = spec.mask_id
        kept = [copy * self._n + index for copy in range(len(readings)) for index in of]
        context = self._context.narrowed(kept, [length] * len(kept))
        attend = split_s_attend(backbone, context, block=block)
        hidden = backbone.hidden(masked.flatten().to(backbone.device), attend)
        hidden = hidden.view(len(readings), n_canvases, length, -1)
        found = []
        for own, reading in zip(hidden, readings, strict=True):
            rows = torch.tensor(reading.scored)
            predicting = (rows - int(spec.logit_shift)).to(own.device)
            logits = backbone.logits(own[:, predicting].flatten(0, 1))
            targets = ids[:, rows].reshape(-1, 1).to(logits.device)
            log_p = logits.gather(1, targets)[:, 0] - log_partition(logits)
            found.append(log_p.view(n_canvases, len(rows)))
        return [one.cpu() for one in found]
