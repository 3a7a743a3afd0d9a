"""What the model says of a canvas's open rows in one step, wherever the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pdllm_rag.decoding.base import Sampling
from pdllm_rag.decoding.sampling import Order, Proposal, propose


class Predictions(Protocol):
    """Of the M open rows of one canvas."""

    def propose(self, sampling: Sampling, generator: torch.Generator, order: Order) -> Proposal:
        """As `sampling.propose`, on the CPU."""
        ...

    def mean_log_p(self, ids: Sequence[int]) -> float | None:
        """Mean ln p of these tokens at the first rows, each on its own; None for no tokens."""
        ...


class LogitRows:
    """By float32 logits [M, V] on the CPU."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def propose(self, sampling: Sampling, generator: torch.Generator, order: Order) -> Proposal:
        """See `Predictions.propose`."""
        return propose(
            self.logits, temperature=sampling.temperature, top_p=sampling.top_p, generator=generator, order=order
        )

    def mean_log_p(self, ids: Sequence[int]) -> float | None:
        """See `Predictions.mean_log_p`."""
        known = torch.tensor(list(ids)[: len(self.logits)], dtype=torch.int64)
        if not len(known):
            return None
        rows = torch.log_softmax(self.logits[: len(known)], dim=-1)
        return float(rows.gather(1, known[:, None]).mean())
