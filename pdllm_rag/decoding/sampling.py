"""Pure functions that every decoder shares: what to propose, in which order, and which proposals to commit."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from pdllm_rag.numerics import log_partition

# Which masked rows go first (their published names: low_confidence, topk_margin, entropy, random).
Order = Literal["low_confidence", "margin", "entropy", "random"]

# Above it confidences are computed in float64, as in LLaDA's and Fast-dLLM's code: float32 rounds whatever lies within
# 6e-8 of 1 to 1, and where few rows are committed a step, the surest first, their order would be that of the rows.
SURE = 0.999


class Proposal(NamedTuple):
    """One proposal per masked row.

    tokens: int64 [M]
    confidence: float64 [M] (float32 from a captured step), probability of the token under the softmax of the plain
        logits, without noise, temperature or top-p.
    rank: float [M], rows of a higher one go first; the confidence, if low confidence goes last.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor
    rank: torch.Tensor


def propose(
    logits: torch.Tensor,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    order: Order = "low_confidence",
) -> Proposal:
    """A token, its confidence and its rank for each row of float32 logits [M, V].

    Args:
        temperature: 0 takes the argmax (lowest id on ties); above 0 samples from softmax(logits / temperature).
        top_p: sample only among the likeliest tokens that together have this probability.
        generator: source of randomness, required above temperature 0 and for order "random".
        order: see `rank`.

    Raises:
        NumericsError: NaN or +inf logits, or a row of only -inf.
        ValueError: a negative temperature, a top_p outside (0, 1], or no generator where one is needed.
    """
    if not temperature >= 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature is {temperature} and top_p {top_p}; expected 0 or more, and above 0 up to 1")
    if generator is None and (temperature > 0 or order == "random"):
        raise ValueError(f"temperature is {temperature}, the order {order}, and no generator was given; pass a seed")
    lse = log_partition(logits)
    if temperature == 0:
        best, tokens = logits.max(dim=-1)
    else:
        lowered = logits - logits.max(dim=-1, keepdim=True).values  # so that a tiny temperature cannot overflow
        probabilities = torch.softmax((lowered / temperature).nan_to_num(nan=0.0), dim=-1)
        tokens = torch.multinomial(nucleus(probabilities, top_p), 1, generator=generator)[:, 0]
        best = logits.gather(1, tokens[:, None])[:, 0]
    confidence = torch.exp(best - lse).double()
    sure = (confidence > SURE).nonzero()[:, 0]
    confidence[sure] = torch.exp(best[sure].double() - torch.logsumexp(logits[sure].double(), dim=-1))
    return Proposal(tokens, confidence, rank(logits, confidence, order, generator))


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probabilities [M, V] without the tail beyond the likeliest tokens that have `top_p` together; at least one stays.

    Source: nucleus sampling (arXiv 1904.09751).
    """
    if top_p == 1:
        return probabilities
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probabilities).scatter_(1, tokens, ordered.masked_fill(before >= top_p, 0.0))


def rank(
    logits: torch.Tensor, confidence: torch.Tensor, order: Order, generator: torch.Generator | None
) -> torch.Tensor:
    """What rows [M] are ordered by, in float64: the row of the highest value is committed first.

    low_confidence: the proposal's confidence (LLaDA, arXiv 2502.09992; MaskGIT). margin: how far the likeliest token
    lies above the second. entropy: the less, the sooner (both: Dream, arXiv 2508.15487). random: by the generator.
    """
    if order == "low_confidence":
        return confidence
    if order == "random":
        return torch.rand(len(confidence), dtype=torch.float64, generator=generator)
    if order not in ("margin", "entropy"):
        raise ValueError(f"order is {order!r}; expected one of {', '.join(get_args(Order))}")
    probabilities = torch.softmax(logits.double(), dim=-1)
    if order == "margin":
        first, second = probabilities.topk(2, dim=-1).values.unbind(dim=-1)
        return first - second
    return torch.xlogy(probabilities, probabilities).sum(dim=-1)


def above_threshold(confidence: torch.Tensor, threshold: float, rank: torch.Tensor) -> torch.Tensor:
    """bool [M]: the row of the highest rank always (first on ties), and every other row above `threshold`.

    Source: Fast-dLLM (arXiv 2505.22618), confidence-aware parallel decoding.
    """
    chosen = confidence > threshold
    chosen[rank.argmax()] = True
    return chosen


def within_factor(confidence: torch.Tensor, factor: float, rank: torch.Tensor) -> torch.Tensor:
    """bool [M]: rows by falling rank, up to the first whose confidence c has (n + 1)(1 - c) >= factor; one always.

    n counts from 1. If n marginals are each above 1 - e and (n + 1) e <= 1, the likeliest tokens of each are the
    likeliest together. The inequality is the paper's strict one; its code also takes the row on the boundary.

    Source: Fast-dLLM (arXiv 2505.22618), factor-based parallel decoding.
    """
    order = torch.sort(rank, descending=True, stable=True).indices
    passes = torch.arange(2, len(order) + 2) * (1 - confidence[order].double()) < factor
    passes[0] = True
    chosen = torch.zeros(len(order), dtype=torch.bool)
    chosen[order[passes.cumprod(dim=0).bool()]] = True
    return chosen


def most_confident(rank: torch.Tensor, count: int) -> torch.Tensor:
    """bool [M]: the `count` rows of the highest rank (or confidence), earlier rows first on ties."""
    chosen = torch.zeros(len(rank), dtype=torch.bool)
    chosen[torch.sort(rank, descending=True, stable=True).indices[:count]] = True
    return chosen


def quota(n_masked: int, steps_left: int) -> int:
    """Rows to commit now so that `n_masked` rows are spread evenly over `steps_left` steps (at least 1).

    Step by step that gives every step its equal share, and one more row to the first ones.
    """
    return -(-n_masked // max(1, steps_left))
