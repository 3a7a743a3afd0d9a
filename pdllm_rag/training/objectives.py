"""What is minimised: reading answers from chunks, or doing so without the rows behind a block (D2F)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from pdllm_rag.models.backbone import Backbone
from pdllm_rag.training.attends import Mask
from pdllm_rag.training.losses import hard_loss, soft_loss
from pdllm_rag.training.passes import Passes
from pdllm_rag.training.rows import Batch
from pdllm_rag.training.visibility import Marks, block_mask, dense_mask


class Found(NamedTuple):
    """Of one batch: what is minimised, and the share of predictions that name the target (D2F: the teacher's)."""

    loss: torch.Tensor
    accuracy: torch.Tensor


class Objective(Protocol):
    """The loss of a batch; gradients flow into what is trained."""

    def __call__(self, batch: Batch) -> Found:
        """See `Found`."""
        ...


class Reading:
    """Masked-diffusion loss over chunks and questions in one pass: chunks are trained to be read, blocks to read them.

    Source: LLaDA (arXiv 2502.09992), equation 3, over answers.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._passes = Passes(backbone)

    def logits(self, batch: Batch) -> torch.Tensor:
        """float32 [B x P, V] of a batch's predictions."""
        tables = self._passes.tables(batch.positions)
        return self._passes.logits(batch.ids, batch.predicting, tables, _mask(batch.marks))

    def __call__(self, batch: Batch) -> Found:
        """See `Objective`."""
        logits, targets, weights = self.logits(batch), batch.targets.flatten(), batch.weights.flatten()
        return Found(hard_loss(logits, targets, weights), _accuracy(logits, targets, weights))


class Forcing:
    """D2F's asymmetric distillation over chunks that were encoded without the adapter.

    The teacher is the model without the adapter, whose rows see the whole block; the student's see none of a later
    answer block. Both read the same masks and the same chunks.

    Args:
        teacher, student: over the same weights, the student's with the adapter.
        context_len: positions of a row that hold its chunks; predictions lie behind them.
        hard_labels: share of the loss that is the cross entropy of the masked tokens themselves; the rest is under
            the teacher's probabilities.

    Source: D2F (arXiv 2508.09192), section 3.2; that chunks are encoded without the adapter, and hard labels, are ours.
    """

    def __init__(self, teacher: Backbone, student: Backbone, context_len: int, *, hard_labels: float = 0.0) -> None:
        self._teacher, self._student, self._context_len = Passes(teacher), Passes(student), context_len
        self._hard_labels = hard_labels

    def __call__(self, batch: Batch) -> Found:
        """See `Objective`."""
        n = self._context_len
        ids, predicting = batch.ids[:, n:], batch.predicting - n
        tables = self._teacher.tables(batch.positions[:, n:])
        with torch.no_grad():
            marks = Marks(*(one[:, :n] for one in batch.marks))
            before = self._teacher.tables(batch.positions[:, :n])
            context = self._teacher.keys_values(batch.ids[:, :n], before, _mask(marks))
            whole = _mask(batch.marks.without_order(), first=n)
            taught = self._teacher.logits(ids, predicting, tables, whole, context)
        logits = self._student.logits(ids, predicting, tables, _mask(batch.marks, first=n), context)
        weights = batch.weights.flatten()
        loss = soft_loss(logits, taught, weights)
        if self._hard_labels > 0:
            loss = loss.lerp(hard_loss(logits, batch.targets.flatten(), weights), self._hard_labels)
        return Found(loss, _accuracy(logits, taught.argmax(-1), weights))


def _mask(marks: Marks, *, first: int = 0) -> Mask:
    return block_mask(marks, first=first) if marks.chunk.is_cuda else dense_mask(marks, first=first)


def _accuracy(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    counted = weights > 0
    right = (logits.detach().argmax(-1) == targets) & counted
    return right.sum() / counted.sum().clamp_min(1)
