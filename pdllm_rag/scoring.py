"""Predictive scoring: how well a chunk lets the model predict the question and a draft of its answer.

    s = s_I + lambda * s_P
    s_I = mean over question tokens of ln p(token | chunk, the other question tokens)
    s_P = mean over draft tokens of ln p(token | chunk, question)

Both are log-likelihoods: higher is better. (The paper writes s_I as a negative log-likelihood; its public code, like
this, keeps the chunks with the highest likelihood.) A bidirectional model has no chain rule to sum along, so s_I is
estimated by masking: `groups` passes, each hiding every groups-th question token and reading its probability;
with as many groups as tokens this is leave-one-out. Under a block-causal mask "the other question tokens" are those
up to the end of the token's block.

Source: Prefilling-dLLM (arXiv 2606.10537), chunk selection by self-information and pseudo-likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pdllm_store import ChunkKV

from pdllm_rag.attends import split_s_attend
from pdllm_rag.attention import causal_block
from pdllm_rag.context import Placed, gather
from pdllm_rag.models.backbone import Attend
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.numerics import log_partition
from pdllm_rag.placement import plan_offsets


@dataclass(frozen=True)
class ScoringOptions:
    """How chunks are scored.

    Attributes:
        groups: masked groups of s_I; 0 masks each token alone (leave-one-out, the reference).
        draft_weight: lambda; None takes the family's. 0 leaves draft and s_P out.
        draft_len: most draft tokens.
        clear_lead: s_P is left out when the best s_I leads the second by at least this much (nats per token).
    """

    groups: int = 2
    draft_weight: float | None = None
    draft_len: int = 8
    clear_lead: float = 0.5

    def __post_init__(self) -> None:
        if self.groups < 0 or self.draft_len < 1:
            raise ValueError(f"groups is {self.groups} and draft_len {self.draft_len}; expected >= 0 and >= 1")


class CandidateScorer:
    """Likelihoods of one question over the stored KV of its candidates; a candidate is never encoded again.

    Args:
        candidates: KV of each candidate, [Y, T, G, D].
        draft_len: most draft tokens that `s_p` will be asked for.

    Raises:
        ValueError: no candidates, or a question without words.
        NumericsError: (`s_i`, `s_p`) the model's logits are not finite.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: LoadedModel,
        question: Prompt,
        candidates: Sequence[ChunkKV],
        *,
        draft_len: int = 0,
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
        self._context = gather(
            [
                Placed((kv,), plan_offsets([kv.k.shape[1]], "sequential", chunk_len=0, multiple=self._block or 1))
                for kv in candidates
            ],
            [len(question.ids) + draft_len] * self._n,
            model.backbone,
        )

    @torch.inference_mode()
    def s_i(self, groups: int) -> torch.Tensor:
        """float32 [N]: mean ln p of the question's tokens, hidden in `groups` groups (0: each alone)."""
        content = self._question.content
        n_groups = min(groups or len(content), len(content))
        attend = self._attend(len(self._question.ids))
        total = torch.zeros(self._n)
        for group in range(n_groups):
            total += self._log_p(self._question.ids, torch.tensor(content[group::n_groups]), attend).sum(dim=1)
        return total / len(content)

    @torch.inference_mode()
    def s_p(self, draft: Sequence[int]) -> torch.Tensor:
        """float32 [N]: mean ln p of a draft's tokens, all hidden at once behind the whole question."""
        ids = (*self._question.ids, *draft)
        rows = torch.arange(len(self._question.ids), len(ids))
        return self._log_p(ids, rows, self._attend(len(ids))).mean(dim=1)

    def _attend(self, n_rows: int) -> Attend:
        narrowed = self._context.narrowed(range(self._n), [n_rows] * self._n)
        return split_s_attend(self._model.backbone, narrowed, block=self._block)

    def _log_p(self, ids: Sequence[int], rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """float32 [N, rows]: ln p of the true tokens at `rows`, all of them masked at once, per candidate."""
        backbone, spec = self._model.backbone, self._model.spec
        truth = torch.tensor(list(ids))
        masked = truth.clone()
        masked[rows] = spec.mask_id
        hidden = backbone.hidden(masked.repeat(self._n).to(backbone.device), attend)
        predicting = rows - int(spec.logit_shift)
        hidden = hidden.view(self._n, len(truth), -1)[:, predicting.to(hidden.device)]
        logits = backbone.logits(hidden.reshape(self._n * len(rows), -1))
        targets = truth[rows].repeat(self._n)[:, None].to(logits.device)
        log_p = logits.gather(1, targets)[:, 0] - log_partition(logits)
        return log_p.view(self._n, len(rows)).cpu()
