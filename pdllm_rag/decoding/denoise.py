"""The loop of the confidence decoders: forward, propose, commit, until every sequence is complete."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pdllm_rag.attention import causal_block
from pdllm_rag.decoding.base import Canvas, DecodeRequest, DecodeStep
from pdllm_rag.decoding.predictions import Predictions
from pdllm_rag.decoding.sampling import Order, Proposal, above_threshold, most_confident, quota, within_factor
from pdllm_rag.models.spec import ModelSpec

logger = logging.getLogger(__name__)

# What the model says of the open rows of each active canvas; gets the indices of the active sequences.
Forward = Callable[[Sequence[int], Sequence[Canvas]], Sequence[Predictions]]
# bool [M] of the open rows int64 [M] of a sequence and what is proposed for them: those to commit.
Choose = Callable[[int, torch.Tensor, Proposal], torch.Tensor]


@dataclass(frozen=True)
class CommitRule:
    """Which proposals become final in a step.

    Attributes:
        threshold: every proposal above this confidence is committed, the first one in order always; at 1 that one
            alone.
        steps: if given, at least an even share of a block's open rows is committed, so that a block takes at most
            `steps` steps (one more if its first token has to go ahead of the others).
        factor: if given, it decides instead of the threshold (see `sampling.within_factor`).
    """

    threshold: float = 0.9
    steps: int | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; expected 0 to 1")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps} per block; expected 1 or more")
        if self.factor is not None and not 0 <= self.factor < float("inf"):
            raise ValueError(f"factor is {self.factor}; expected a number of 0 or more")

    def chosen(self, confidence: torch.Tensor, n_steps: int, rank: torch.Tensor | None = None) -> torch.Tensor:
        """bool [M], which of a block's open rows are committed, after `n_steps` steps in it.

        Args:
            confidence, rank: of the rows' proposals (see `sampling.Proposal`); None ranks them by confidence.
        """
        rank = confidence if rank is None else rank
        if self.factor is None:
            chosen = above_threshold(confidence, self.threshold, rank)
        else:
            chosen = within_factor(confidence, self.factor, rank)
        if self.steps is not None:
            chosen |= most_confident(rank, quota(len(rank), self.steps - n_steps))
        return chosen


def canvas_of(request: DecodeRequest, spec: ModelSpec, *, whole: bool = False) -> Canvas:
    """A request's canvas, in blocks of the model's family."""
    align = causal_block(spec.family) or 1
    return Canvas(
        request.prompt_ids,
        mask_id=spec.mask_id,
        eos_ids=spec.eos_ids,
        block_len=spec.family.block_len,
        max_new_tokens=request.max_new_tokens,
        align=align,
        lead=align if spec.logit_shift else 1,
        whole=whole,
    )


def denoise(
    requests: Sequence[DecodeRequest],
    forward: Forward,
    spec: ModelSpec,
    rule: CommitRule,
    canvases: Sequence[Canvas] | None = None,
    choose: Choose | None = None,
    *,
    order: Order = "low_confidence",
) -> Iterator[DecodeStep]:
    """Run sequences to their end under one commit rule; a finished sequence leaves the batch.

    Args:
        canvases: of the sequences, where they are not to open one block of the family after another.
        choose: the rows to commit, where not all open rows are of one block; the rule then is its business.
        order: which rows go first (see `sampling.rank`).
    """
    _check_places(requests, spec)
    canvases = canvases or [canvas_of(request, spec) for request in requests]
    generators = [torch.Generator().manual_seed(request.sampling.seed) for request in requests]
    nfe = [0] * len(requests)
    steps_in_block = [0] * len(requests)
    active = list(range(len(requests)))
    while active:
        for index in [i for i in active if requests[i].cancel.is_set()]:
            active.remove(index)
            yield DecodeStep(index, (), (), (), nfe[index], "cancelled")
        if not active:
            return
        predictions = forward(active, [canvases[i] for i in active])
        still_active = []
        for index, predicted in zip(active, predictions, strict=True):
            request, canvas = requests[index], canvases[index]
            probe = predicted.mean_log_p(request.probe_ids) if nfe[index] == 0 else None
            nfe[index] += 1
            open_rows = canvas.open_rows()
            proposal = predicted.propose(request.sampling, generators[index], order)
            if choose is None:
                chosen = rule.chosen(proposal.confidence, steps_in_block[index], proposal.rank)
            else:
                chosen = choose(index, open_rows, proposal)
            picked = chosen.nonzero()[:, 0]
            chosen_rows, chosen_tokens = open_rows[picked], proposal.tokens[picked]
            rows, tokens = canvas.commit(chosen_rows, chosen_tokens)
            block = canvas.block
            finished = canvas.advance()
            steps_in_block[index] = 0 if canvas.block != block else steps_in_block[index] + 1
            if finished is None:
                still_active.append(index)
            places = zip(chosen_rows.tolist(), chosen_tokens.tolist(), strict=True)
            confidence = dict(zip(places, proposal.confidence[picked].tolist(), strict=True))
            yield DecodeStep(
                index,
                tuple(rows.tolist()),
                tuple(tokens.tolist()),
                tuple(confidence.get(place, 1.0) for place in zip(rows.tolist(), tokens.tolist(), strict=True)),
                nfe[index],
                finished,
                probe,
            )
        active = still_active


def _check_places(requests: Sequence[DecodeRequest], spec: ModelSpec) -> None:
    """Refuse places off the model's blocks, and tell of positions that it was not trained on."""
    family, align, end = spec.family, causal_block(spec.family) or 1, 0
    for request in requests:
        offsets, start = request.placement
        if any(place % align for place in (*offsets, start)):
            raise ValueError(
                f"chunks stand at {offsets} and the canvas at {start}; expected multiples of {align}, the block of "
                f"{family.name}. Plan them with plan_offsets(..., multiple={align})"
            )
        end = max(end, start + Canvas.room(len(request.prompt_ids), request.max_new_tokens, family))
    if end > family.window:
        logger.warning("a canvas reaches %d positions; %s was made for %d", end, family.name, family.window)
