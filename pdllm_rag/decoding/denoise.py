"""The loop of the confidence decoders: forward, propose, commit, until every sequence is complete."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pdllm_rag.attention import causal_block
from pdllm_rag.decoding.base import Canvas, DecodeRequest, DecodeStep
from pdllm_rag.decoding.predictions import Predictions
from pdllm_rag.decoding.sampling import above_threshold, most_confident, quota
from pdllm_rag.models.spec import ModelSpec

logger = logging.getLogger(__name__)

# What the model says of the open rows of each active canvas; gets the indices of the active sequences.
Forward = Callable[[Sequence[int], Sequence[Canvas]], Sequence[Predictions]]


@dataclass(frozen=True)
class CommitRule:
    """Which proposals become final in a step.

    Attributes:
        threshold: every proposal above this confidence is committed, the most confident one always.
        steps: if given, at least an even share of a block's open rows is committed, so that a block takes at most
            `steps` steps (one more if its first token has to go ahead of the others).
    """

    threshold: float = 0.9
    steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; expected 0 to 1")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps} per block; expected 1 or more")


def denoise(
    requests: Sequence[DecodeRequest], forward: Forward, spec: ModelSpec, rule: CommitRule
) -> Iterator[DecodeStep]:
    """Run sequences to their end under one commit rule; a finished sequence leaves the batch."""
    align = causal_block(spec.family) or 1
    _check_places(requests, spec, align)
    canvases = [
        Canvas(
            request.prompt_ids,
            mask_id=spec.mask_id,
            eos_ids=spec.eos_ids,
            block_len=spec.family.block_len,
            max_new_tokens=request.max_new_tokens,
            align=align,
            lead=align if spec.logit_shift else 1,
        )
        for request in requests
    ]
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
            proposal = predicted.propose(request.sampling.temperature, generators[index])
            chosen = above_threshold(proposal.confidence, rule.threshold)
            if rule.steps is not None:
                share = quota(len(open_rows), rule.steps - steps_in_block[index])
                chosen |= most_confident(proposal.confidence, share)
            picked = chosen.nonzero()[:, 0]
            chosen_rows, chosen_tokens = open_rows[picked], proposal.tokens[picked]
            rows, tokens = canvas.commit(chosen_rows, chosen_tokens)
            n_rows = len(canvas.masked)
            finished = canvas.advance()
            steps_in_block[index] = 0 if len(canvas.masked) > n_rows else steps_in_block[index] + 1
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


def _check_places(requests: Sequence[DecodeRequest], spec: ModelSpec, align: int) -> None:
    """Refuse places off the model's blocks, and tell of positions that it was not trained on."""
    family, end = spec.family, 0
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
