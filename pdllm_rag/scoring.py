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
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.numerics import log_partition
from pdllm_rag.placement import plan_offsets

ROWS_AT_ONCE = 4096  # of one pass


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
        at_once: masked groups that one pass of `s_i` covers; the results are the same.

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
    def s_i(self, groups: int) -> torch.Tensor:
        """float32 [N]: mean ln p of the question's tokens, hidden in `groups` groups (0: each alone)."""
        content = self._question.content
        n_groups = min(groups or len(content), len(content))
        total = torch.zeros(self._n)
        for first in range(0, n_groups, self._at_once):
            some = range(first, min(first + self._at_once, n_groups))
            hidden_rows = [torch.tensor(content[group::n_groups]) for group in some]
            total += sum(found.sum(dim=1) for found in self._log_p(self._question.ids, hidden_rows))
        return total / len(content)

    @torch.inference_mode()
    def s_p(self, draft: Sequence[int]) -> torch.Tensor:
        """float32 [N]: mean ln p of a draft's tokens, all hidden at once behind the whole question."""
        ids = (*self._question.ids, *draft)
        (found,) = self._log_p(ids, [torch.arange(len(self._question.ids), len(ids))])
        return found.mean(dim=1)

    def _log_p(self, ids: Sequence[int], hidden_rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """float32 [N, rows] for each set of rows: ln p of the true tokens there, all of the set masked at once."""
        backbone, spec = self._model.backbone, self._model.spec
        truth = torch.tensor(list(ids))
        masked = truth.repeat(len(hidden_rows), 1)
        for copy, rows in enumerate(hidden_rows):
            masked[copy, rows] = spec.mask_id
        n_sequences = len(hidden_rows) * self._n
        context = self._context.narrowed(range(n_sequences), [len(truth)] * n_sequences)
        attend = split_s_attend(backbone, context, block=self._block)
        hidden = backbone.hidden(masked.repeat_interleave(self._n, dim=0).flatten().to(backbone.device), attend)
        hidden = hidden.view(len(hidden_rows), self._n, len(truth), -1)
        found = []
        for own, rows in zip(hidden, hidden_rows, strict=True):
            predicting = (rows - int(spec.logit_shift)).to(own.device)
            logits = backbone.logits(own[:, predicting].flatten(0, 1))
            targets = truth[rows].repeat(self._n)[:, None].to(logits.device)
            log_p = logits.gather(1, targets)[:, 0] - log_partition(logits)
            found.append(log_p.view(self._n, len(rows)))
        return [one.cpu() for one in found]
