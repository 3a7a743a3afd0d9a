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
    for index, offset in enumerate(table.offsets):
        queries = q.to(work)
        if offset:
            assert rope is not None
            queries = rope.shift(queries, -offset)
        keys = read_run(k, table, index).to(work).repeat_interleave(group, dim=1)
        values = read_run(v, table, index).to(work).repeat_interleave(group, dim=1)
        scores = torch.einsum("lhd,thd->lht", queries, keys) / math.sqrt(head_dim)
        if mask is not None and index == len(table.starts) - 1:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        states.append(AttentionState(torch.einsum("lht,thd->lhd", weights, values), lse))
    state = merge(states)
    return AttentionState(state.out.to(q.dtype), state.lse)


def read_run(x: torch.Tensor, table: ChunkTable, index: int) -> torch.Tensor:
    """[T, G, D]: the rows of the buffer x [S, G, D] that a run reads; a view where it reads all of them."""
    rows = table.rows_of(index)
    if isinstance(rows, range):
        return x[rows.start : rows.stop]
    return x[torch.tensor(rows, device=x.device)]
