"""What is proposed and committed, against definitions written out row by row."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdllm_rag.decoding import CommitRule, Sampling
from pdllm_rag.decoding.sampling import Order, above_threshold, most_confident, nucleus, propose, quota, within_factor

confidences = st.lists(st.sampled_from([0.1, 0.5, 2 / 3, 0.7, 0.75, 0.8, 0.9, 0.95, 1.0]), min_size=1, max_size=9)


def random_logits(rows: int = 6) -> torch.Tensor:
    logits = torch.randn(rows, 20, generator=torch.Generator().manual_seed(3)) * 3
    logits[:, 4] = -torch.inf  # as the mask id has it
    return logits


@pytest.mark.parametrize("order", get_args(Order))
def test_ranks_are_their_definitions(order: Order) -> None:
    logits = random_logits()
    proposal = propose(logits, order=order, generator=torch.Generator().manual_seed(7))
    for row, rank in zip(logits.double(), proposal.rank.tolist(), strict=True):
        weights = [math.exp(value) for value in row.tolist()]
        p = sorted((weight / sum(weights) for weight in weights), reverse=True)
        expected = {
            "low_confidence": p[0],
            "margin": p[0] - p[1],
            "entropy": sum(value * math.log(value) for value in p if value),
        }
        assert rank == pytest.approx(expected.get(order, rank))
    again = propose(logits, order=order, generator=torch.Generator().manual_seed(7))
    other = propose(logits, order=order, generator=torch.Generator().manual_seed(8))
    assert again.rank.tolist() == proposal.rank.tolist()
    assert (other.rank.tolist() == proposal.rank.tolist()) == (order != "random")
    assert proposal.tokens.tolist() == logits.argmax(dim=-1).tolist()


def test_rows_that_float32_finds_equally_sure_are_told_apart() -> None:
    logits = torch.zeros(3, 2)
    logits[:, 0] = torch.tensor([20.0, 30.0, 25.0])
    proposal = propose(logits)
    assert proposal.confidence.float().unique().numel() < 3
    assert torch.argsort(proposal.rank, descending=True).tolist() == [1, 2, 0]
    assert CommitRule(threshold=1.0).chosen(proposal.confidence, 0).tolist() == [False, True, False]


def test_confidence_is_that_of_the_plain_softmax_whatever_is_drawn() -> None:
    logits = random_logits()
    drawn = propose(logits, temperature=2.0, top_p=0.9, generator=torch.Generator().manual_seed(1))
    plain = torch.softmax(logits.double(), dim=-1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.confidence, plain, rtol=1e-6, atol=0)
    assert drawn.tokens.tolist() != logits.argmax(dim=-1).tolist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), st.floats(0.05, 1))
def test_a_nucleus_is_the_fewest_likeliest_tokens_that_reach_top_p(weights: list[float], top_p: float) -> None:
    p = torch.tensor([weights], dtype=torch.float64)
    p /= p.sum()
    total, expected = 0.0, set()
    for token in sorted(range(len(weights)), key=lambda i: (-float(p[0, i]), i)):
        if total >= top_p:
            break
        expected.add(token)
        total += float(p[0, token])
    kept = nucleus(p, top_p)
    assert set(kept[0].nonzero()[:, 0].tolist()) == expected
    assert torch.equal(kept[kept > 0], p[kept > 0])


def test_a_tiny_top_p_is_greedy() -> None:
    logits = random_logits()
    for seed in range(3):
        drawn = propose(logits, temperature=5.0, top_p=1e-9, generator=torch.Generator().manual_seed(seed))
        assert drawn.tokens.tolist() == logits.argmax(dim=-1).tolist()


@given(confidences, st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_a_factor_walks_down_the_ranks_until_one_is_not_sure_enough(values: list[float], factor: float) -> None:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    expected = {order[0]}
    for n, row in enumerate(order, start=1):
        if n > 1:
            if (n + 1) * (1 - values[row]) >= factor:
                break
            expected.add(row)
    confidence = torch.tensor(values, dtype=torch.float64)
    chosen = within_factor(confidence, factor, confidence)
    assert set(chosen.nonzero()[:, 0].tolist()) == expected


def test_a_factor_takes_no_row_on_the_boundary() -> None:
    """(2 + 1)(1 - c) = factor: the paper's strict inequality."""
    confidence = torch.tensor([0.9, 0.75], dtype=torch.float64)
    assert within_factor(confidence, 0.75, confidence).tolist() == [True, False]
    assert within_factor(confidence, 0.7501, confidence).tolist() == [True, True]


@given(confidences, st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_a_threshold_takes_what_is_above_it_and_one_always(values: list[float], threshold: float) -> None:
    chosen = above_threshold(torch.tensor(values), threshold, torch.tensor(values))
    first = values.index(max(values))
    assert chosen.tolist() == [value > threshold or row == first for row, value in enumerate(torch.tensor(values))]
    rank = -torch.arange(len(values))
    assert above_threshold(torch.tensor(values), 1.0, rank).tolist() == [True] + [False] * (len(values) - 1)


@pytest.mark.parametrize(("rows", "steps", "shares"), [(10, 4, [3, 3, 2, 2]), (32, 5, [7, 7, 6, 6, 6]), (2, 4, [1, 1])])
def test_a_number_of_steps_is_equal_shares_with_the_remainder_first(rows: int, steps: int, shares: list[int]) -> None:
    taken, rule = [], CommitRule(threshold=1.0, steps=steps)
    left = rows
    while left:
        proposal = propose(random_logits(left))
        chosen = rule.chosen(proposal.confidence, len(taken), proposal.rank)
        assert torch.equal(chosen, most_confident(proposal.confidence, quota(left, steps - len(taken))))
        taken.append(int(chosen.sum()))
        left -= taken[-1]
    assert taken == shares


def test_bad_sampling_is_refused() -> None:
    for bad in (0.0, 1.5, -1.0, float("nan")):
        with pytest.raises(ValueError, match="top_p"):
            Sampling(top_p=bad)
        with pytest.raises(ValueError, match="top_p"):
            propose(random_logits(), top_p=bad)
    with pytest.raises(ValueError, match="generator"):
        propose(random_logits(), order="random")
    with pytest.raises(ValueError, match="expected one of low_confidence"):
        propose(random_logits(), order="surest")  # type: ignore[arg-type]
