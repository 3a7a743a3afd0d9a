"""Pure functions that every decoder shares: what to propose, and which proposals to commit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pdllm_rag.numerics import log_partition


class Proposal(NamedTuple):
    """One proposal per masked row.

    tokens: int64 [M]
    confidence: float32 [M], probability of the token under the softmax of the plain logits.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor


def propose(logits: torch.Tensor, *, temperature: float = 0.0, generator: torch.Generator | None = None) -> Proposal:
    """A token and its confidence for each row of float32 logits [M, V].

    Args:
        temperature: 0 takes the argmax (lowest id on ties); above 0 samples from softmax(logits / temperature).
        generator: source of randomness, required above 0.

    Raises:
        NumericsError: NaN or +inf logits, or a row of only -inf.
        ValueError: negative temperature, or no generator above 0.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; expected 0 or more")
    lse = log_partition(logits)
    if temperature == 0:
        best, tokens = logits.max(dim=-1)
    else:
        if generator is None:
            raise ValueError(f"temperature is {temperature} but no generator was given; pass a seed")
        lowered = logits - logits.max(dim=-1, keepdim=True).values  # so that a tiny temperature cannot overflow
        probabilities = torch.softmax((lowered / temperature).nan_to_num(nan=0.0), dim=-1)
        tokens = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        best = logits.gather(1, tokens[:, None])[:, 0]
    return Proposal(tokens, torch.exp(best - lse))


def above_threshold(confidence: torch.Tensor, threshold: float) -> torch.Tensor:
    """bool [M]: the most confident row always (first on ties), and every other row above `threshold`.

    Source: Fast-dLLM (arXiv 2505.22618), confidence-aware parallel decoding.
    """
    chosen = confidence > threshold
    chosen[confidence.argmax()] = True
    return chosen


def most_confident(confidence: torch.Tensor, count: int) -> torch.Tensor:
    """bool [M]: the `count` most confident rows, earlier rows first on ties."""
    order = torch.sort(confidence, descending=True, stable=True).indices[:count]
    chosen = torch.zeros_like(confidence, dtype=torch.bool)
    chosen[order] = True
    return chosen


def quota(n_masked: int, steps_left: int) -> int:
    """Rows to commit now so that `n_masked` rows are spread evenly over `steps_left` steps (at least 1)."""
    return -(-n_masked // max(1, steps_left))
