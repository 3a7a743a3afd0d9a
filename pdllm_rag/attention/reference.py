"""The reference that defines Split-S: one explicit partial softmax per split, merged by log-sum-exp.

Source: Prefilling-dLLM (arXiv 2606.10537), "Split-S FlexAttention"; the merge is flash-decoding's.
Scores, softmax and merge run in float32, in float64 for float64 inputs (the oracle of every other backend).
"""

from __future__ import annotations

import math

import torch

from pdllm_rag.attention.merge import AttentionState, merge
from pdllm_rag.attention.table import ChunkTable
from pdllm_rag.models.rope import Rope


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: ChunkTable,
    *,
    rope: Rope | None,
    mask: torch.Tensor | None,
) -> AttentionState:
    """As `split_s_attention`, slow and plain."""
    n_rows, n_heads, head_dim = q.shape
    work = torch.promote_types(q.dtype, torch.float32)
    states = [
        AttentionState(
            torch.zeros(n_rows, n_heads, head_dim, dtype=work, device=q.device),
            torch.full((n_rows, n_heads), -torch.inf, dtype=work, device=q.device),
        )
    ]
    group = n_heads // k.shape[1]
    for index, (start, length, offset) in enumerate(table.runs(), start=1):
        queries = q.to(work)
        if offset:
            assert rope is not None
            queries = rope.shift(queries, -offset)
        keys = k[start : start + length].to(work).repeat_interleave(group, dim=1)
        values = v[start : start + length].to(work).repeat_interleave(group, dim=1)
        scores = torch.einsum("lhd,thd->lht", queries, keys) / math.sqrt(head_dim)
        if mask is not None and index == len(table.starts):
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse[..., None])
        states.append(AttentionState(torch.einsum("lht,thd->lhd", weights, values), lse))
    state = merge(states)
    return AttentionState(state.out.to(q.dtype), state.lse)
