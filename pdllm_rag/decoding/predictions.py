"""What the model says of a canvas's open rows in one step, wherever the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pdllm_rag.decoding.base import Sampling
from pdllm_rag.decoding.sampling import Order, Proposal, propose
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.numerics import checked


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


class DeviceRows:
    """By what was proposed on the device; logits come to the CPU only where more is asked for.

    Valid until the next pass, if a captured one writes into the same tensors.

    Args:
        raw: `Backbone.raw_logits` [N, V] of all rows that the pass predicts.
        found: `Backbone.proposals` of them, int32 [N, 3], on the CPU.
        rows: int64 [M], which of them are this canvas's open rows.
    """

    def __init__(self, backbone: Backbone, raw: torch.Tensor, found: torch.Tensor, rows: torch.Tensor) -> None:
        self._backbone, self._raw, self._rows = backbone, raw, rows
        self._found = found[rows]

    def propose(self, sampling: Sampling, generator: torch.Generator, order: Order) -> Proposal:
        """See `Predictions.propose`; whatever needs more than the likeliest token goes by the logits.

        Raises:
            NumericsError: the logits are not finite.
        """
        if sampling.temperature or order != "low_confidence":
            return self._logits(self._rows).propose(sampling, generator, order)
        checked(self._found[:, 2].contiguous().view(torch.float32))
        confidence = self._found[:, 1].contiguous().view(torch.float32)
        return Proposal(self._found[:, 0].long(), confidence, confidence)

    def mean_log_p(self, ids: Sequence[int]) -> float | None:
        """See `Predictions.mean_log_p`."""
        return self._logits(self._rows[: len(ids)]).mean_log_p(ids) if ids else None

    @torch.inference_mode()
    def _logits(self, rows: torch.Tensor) -> LogitRows:
        return LogitRows(self._backbone.allowed(self._raw[rows.to(self._raw.device)]).cpu())


@torch.inference_mode()
def predictions_of(backbone: Backbone, hidden: torch.Tensor, counts: Sequence[int]) -> list[Predictions]:
    """What hidden rows [M, hidden] say, `counts` rows of one canvas after the other; on a GPU the logits stay there."""
    raw = backbone.raw_logits(hidden)
    if raw.device.type == "cpu":
        return [LogitRows(own) for own in torch.split(backbone.allowed(raw), list(counts))]
    found = backbone.proposals(raw).cpu()
    return [DeviceRows(backbone, raw, found, own) for own in torch.split(torch.arange(len(raw)), list(counts))]
