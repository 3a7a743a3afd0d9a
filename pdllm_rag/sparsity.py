"""Token sparsity: of each selected chunk only the rows that the question attends to most are read.

One ranking serves all heads and layers. A row's score is the attention that the question's rows give it, summed over
rows, heads and layers of one forward pass, and then the largest of its neighbourhood, so that a word is kept with the
words around it. The BOS row, which takes what attention has no use for, is always kept, and every row keeps its
position. Only column sums are formed, a chunk at a time.

What the chunk's own rows would attend to in the question is not counted: a store keeps no queries.
Source: Prefilling-dLLM (arXiv 2606.10537), token-level pruning of selected chunks; sets per head and layer are left
out, since they lose exact copies in public measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pdllm_store import ChunkKV

from pdllm_rag.attends import SplitSAttend
from pdllm_rag.attention import AttentionState, causal_block
from pdllm_rag.context import Context, Placed, gather
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.placement import Placement

NEIGHBOURHOOD = 7  # rows, odd


class _ColumnSums(SplitSAttend):
    """`SplitSAttend` of one sequence that also sums the attention each chunk row gets.

    Attributes:
        sums: per chunk float32 [T].
    """

    def __init__(self, model: LoadedModel, context: Context, lens: Sequence[int]) -> None:
        super().__init__(model.backbone.rope, context, block=causal_block(model.spec.family))
        self.sums = [torch.zeros(length, device=model.backbone.device) for length in lens]

    def attended(self, layer: int, q: torch.Tensor, state: AttentionState) -> None:
        keys = self.context.k[layer]
        n_rows, _, head_dim = q.shape
        grouped = q.view(n_rows, keys.shape[1], -1, head_dim).float()
        totals = state.lse.view(n_rows, keys.shape[1], -1, 1)
        row = 0
        for sums in self.sums:
            own = keys[row : row + len(sums)].float()
            scores = torch.einsum("lgrd,tgd->lgrt", grouped, own) / math.sqrt(head_dim)
            sums += torch.exp(scores - totals).sum(dim=(0, 1, 2))
            row += len(sums)


@torch.inference_mode()
def attention_received(
    model: LoadedModel, prompt_ids: Sequence[int], chunks: Sequence[ChunkKV], placement: Placement
) -> list[torch.Tensor]:
    """Per chunk float32 [T] on the CPU: attention of the question's rows, summed over rows, heads and layers.

    Args:
        prompt_ids: the templated question.
        chunks: stored KV [Y, T, G, D], in the order of `placement`.
    """
    if not chunks:
        return []
    context = gather([Placed(tuple(chunks), placement)], [len(prompt_ids)], model.backbone)
    attend = _ColumnSums(model, context, [chunk.k.shape[1] for chunk in chunks])
    model.backbone.hidden(torch.tensor(list(prompt_ids), device=model.backbone.device), attend)
    return [sums.cpu() for sums in attend.sums]


def kept_rows(received: torch.Tensor, budget: int) -> torch.Tensor:
    """int64 [min(budget, T)] ascending: the BOS row and the rows whose neighbourhood receives most, first ones on ties.

    Args:
        received: float32 [T], see `attention_received`.

    Raises:
        ValueError: a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"budget is {budget} rows of a chunk; expected 1 or more, the BOS row included")
    if budget >= len(received):
        return torch.arange(len(received))
    smooth = torch.nn.functional.max_pool1d(
        received[None, None], kernel_size=NEIGHBOURHOOD, stride=1, padding=NEIGHBOURHOOD // 2
    )[0, 0]
    smooth[0] = torch.inf
    # A neighbourhood's rows are equal after pooling; among them the one that receives more goes first.
    order = sorted(range(len(smooth)), key=lambda row: (-float(smooth[row]), -float(received[row]), row))
    return torch.tensor(sorted(order[:budget]))


def sparse(chunk: ChunkKV, rows: torch.Tensor) -> ChunkKV:
    """The chunk with some of its rows; they stand where they stood."""
    if len(rows) == chunk.k.shape[1]:
        return chunk
    rows = rows.to(chunk.k.device)
    return ChunkKV(chunk.k[:, rows], chunk.v[:, rows])
