"""Partial softmaxes and their exact merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class AttentionState(NamedTuple):
    """Attention over one part of the keys.

    out: [L, H, D], normalised within the part.
    lse: [L, H] float32 (float64 for float64 inputs), log of the part's softmax denominator; -inf for an empty part.
    """

    out: torch.Tensor
    lse: torch.Tensor


def merge(states: Sequence[AttentionState]) -> AttentionState:
    """Attention over the union of disjoint parts.

    out = sum_i exp(lse_i - lse) out_i with lse = logsumexp_i lse_i, in the dtype of the lse, rounded once at the end.

    Raises:
        ValueError: no state was given.
    """
    if not states:
        raise ValueError("merge() got no attention states; expected at least one")
    if len(states) == 1:
        return states[0]
    lse = torch.stack([state.lse for state in states])
    total = torch.logsumexp(lse, dim=0)
    weights = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    out = sum(weight[..., None] * state.out.to(weight.dtype) for weight, state in zip(weights, states, strict=True))
    assert isinstance(out, torch.Tensor)
    return AttentionState(out.to(states[0].out.dtype), total)
