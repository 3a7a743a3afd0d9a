"""Rounding to 4 bits that knows what the matrices are multiplied with.

Rounded to the nearest level, a matrix is as close as it can be to what it was; what it computes is not. Here a column's
error is made up for by the columns that are rounded after it, as far as the inputs of the two go together.

Source: GPTQ (arXiv 2210.17323), with its columns in order of their inputs' size and scales chosen beforehand.

Axes: R rows and C columns of a matrix, G = C / 32 groups of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from pdllm_rag.models import packed
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.training.attends import RowsAttend
from pdllm_rag.training.rows import Batch
from pdllm_rag.training.visibility import dense_mask

DAMPING = 0.01  # of the mean second moment, added to each
BLOCK = 64  # columns whose errors are handed on together
CUTS = tuple(1.05 - 0.025 * step for step in range(20))  # as `packed.SHARES`, finer
Report = Callable[[int], None]


def calibrated_q4(weight: torch.Tensor, moments: torch.Tensor) -> packed.Q4:
    """A matrix [R, C] in 4 bits, given the second moments X^T X of its inputs, float64 [C, C].

    Raises:
        ValueError: columns make no whole groups.
    """
    packed.check_q4([weight])
    damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(len(moments), dtype=moments.dtype)
    size = damped.diagonal().float()
    scale = packed.scales(weight.float(), CUTS, importance=size)
    order = size.argsort(descending=True)
    factor = torch.linalg.cholesky(damped[order][:, order])
    onto = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True).float()
    rest = weight.float()[:, order].clone()
    steps = scale.float().repeat_interleave(packed.GROUP, dim=1)[:, order]
    levels = torch.empty_like(rest)
    for start in range(0, rest.shape[1], BLOCK):
        end = min(start + BLOCK, rest.shape[1])
        errors = torch.empty(rest.shape[0], end - start)
        for column in range(start, end):
            levels[:, column] = (rest[:, column] / steps[:, column]).round().clamp(-8, 7)
            error = (rest[:, column] - levels[:, column] * steps[:, column]) / onto[column, column]
            rest[:, column + 1 : end] -= error[:, None] * onto[column, column + 1 : end]
            errors[:, column - start] = error
        rest[:, end:] -= errors @ onto[start:end, end:]
    return packed.Q4(levels[:, order.argsort()], scale)


@torch.no_grad()
def round_layers(backbone: Backbone, batches: Sequence[Batch], report: Report) -> dict[str, packed.Q4]:
    """Round the matrices of every layer, in place, then the embedding to the nearest; on a CPU.

    A layer is calibrated by what the rounded layers before it give for `batches`, over the embedding as it was.

    Args:
        report: is told each layer that is done.

    Returns:
        What was rounded, by the library's names.
    """
    model = backbone.model
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    rounded: dict[str, packed.Q4] = {}
    seen = [(backbone.rope.tables(batch.positions.flatten()), dense_mask(batch.marks)) for batch in batches]
    states = [backbone.embed(batch.ids.flatten()) for batch in batches]
    for index, layer in enumerate(model.model.layers):
        moments = Moments(layer)
        with moments:
            for batch, (tables, mask), x in zip(batches, seen, states, strict=True):
                moments.rows = batch.marks.sample.flatten() > 0
                backbone.block(layer, x, RowsAttend(tables, mask, len(batch.ids)))
        for module, of_inputs in moments.found:
            rounded[names[id(module)]] = found = calibrated_q4(module.weight, of_inputs)
            module.weight.copy_(found.values())
        states = [
            backbone.block(layer, x, RowsAttend(tables, mask, len(batch.ids)))
            for batch, (tables, mask), x in zip(batches, seen, states, strict=True)
        ]
        report(index)
    embedding = model.model.embed_tokens.weight
    rounded[names[id(model.model.embed_tokens)]] = found = packed.quantised(embedding.float())
    embedding.copy_(found.values())
    return rounded


class Moments:
    """Within it, second moments of what a layer's linear modules are given.

    Attributes:
        rows: bool [N], the rows of the next pass that count.
        found: modules, and X^T X of the rows so far, float64 [C, C].
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        linear = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
        sizes = [module.in_features for module in linear]
        self.found = [(module, torch.zeros(n, n, dtype=torch.float64)) for module, n in zip(linear, sizes, strict=True)]
        self.rows = torch.zeros(0, dtype=torch.bool)
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        self._hooks = [module.register_forward_pre_hook(self._adding(moments)) for module, moments in self.found]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _adding(self, moments: torch.Tensor) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])[self.rows].float()
            moments.add_((x.T @ x).double())

        return add


def average(weights: torch.nn.Module, others: Iterable[torch.nn.Module]) -> None:
    """Give a model the mean of its weights and those of others of its shape, in place.

    Models that one training run was begun from, and ended with, lie in one valley: their mean is often better than
    both. Source: model soups (arXiv 2203.05482).

    Raises:
        ValueError: another's parameters have other names or shapes.
    """
    own = dict(weights.named_parameters())
    n = 1
    with torch.no_grad():
        for other in others:
            theirs = dict(other.named_parameters())
            if {name: p.shape for name, p in own.items()} != {name: p.shape for name, p in theirs.items()}:
                raise ValueError(
                    "the checkpoints have weights of other names or shapes; only those of one shape have a mean"
                )
            for name, parameter in own.items():
                parameter.lerp_(theirs[name], 1 / (n + 1))
            n += 1
