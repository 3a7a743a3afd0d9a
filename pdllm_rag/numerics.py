"""One check for every place that reads probabilities out of logits."""

from __future__ import annotations

import torch

from pdllm_rag.errors import NumericsError


def log_partition(logits: torch.Tensor) -> torch.Tensor:
    """logsumexp of float32 logits [M, V] over V, [M].

    Raises:
        NumericsError: NaN or +inf logits, or a row of only -inf.
    """
    return checked(torch.logsumexp(logits, dim=-1))


def checked(lse: torch.Tensor) -> torch.Tensor:
    """A logsumexp of logits, [M], as it is.

    Raises:
        NumericsError: the logits were NaN or +inf, or all -inf.
    """
    if not torch.isfinite(lse).all():
        raise NumericsError(
            "the model produced logits that are not finite; expected numbers. Open the engine with "
            "dtype=torch.float32, or check the checkpoint"
        )
    return lse
