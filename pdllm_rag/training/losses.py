"""Losses over the predictions of a batch.

Axes: B rows, L positions, E hidden size, P predictions of a row, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def predictions(hidden: torch.Tensor, predicting: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
    """float32 logits [B x P, V] of hidden states [B x L, E] at positions int64 [B, P]."""
    n_rows, n_predictions = predicting.shape
    by_row = hidden.view(n_rows, -1, hidden.shape[-1])
    chosen = by_row.gather(1, predicting[..., None].expand(-1, -1, hidden.shape[-1]))
    logits: torch.Tensor = head(chosen.reshape(n_rows * n_predictions, -1))
    return logits.float()


def hard_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean of the cross entropy: logits float32 [N, V], targets int64 [N], weights float32 [N]."""
    return _weighted_mean(F.cross_entropy(logits, targets, reduction="none"), weights)


def soft_loss(student: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean of the student's cross entropy under the teacher's probabilities; logits float32 [N, V] of both.

    It differs from the forward KL divergence by the teacher's entropy alone. Source: D2F (arXiv 2508.09192).
    """
    return _weighted_mean(-(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1), weights)


def _weighted_mean(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (losses * weights).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)
