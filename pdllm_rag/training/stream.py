"""Batches by number: one depends on the seed and its number alone, so a resumed run sees what an unbroken one does."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from pdllm_rag.models.spec import ModelSpec
from pdllm_rag.models.tokenizer import Tokenizer
from pdllm_rag.training.items import Item, Itemiser, Shape
from pdllm_rag.training.noise import Noise
from pdllm_rag.training.rows import Batch, Row, lay_out
from pdllm_rag.training.texts import Mixture

MAX_DRAWS = 100  # of a sample for a row that holds none
MISSES = 4  # samples that find no room in a row before it counts as full


class Stream(Dataset[Batch]):
    """Batch n of a mixture, for every n.

    Args:
        seed: text that goes before a batch's number; another one is another stream.
    """

    def __init__(
        self,
        mixture: Mixture,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        noise: Noise,
        shape: Shape,
        *,
        n_rows: int,
        seed: str,
    ) -> None:
        self._mixture, self._spec, self._noise, self._shape = mixture, spec, noise, shape
        self._itemiser = Itemiser(spec, tokenizer, shape)
        self._n_rows, self._seed = n_rows, seed

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`.

        Raises:
            ValueError: the mixture gives no question that fits into a row.
        """
        return Batch.of([self._row(random.Random(f"{self._seed}/{number}/{row}")) for row in range(self._n_rows)])

    def _row(self, rng: random.Random) -> Row:
        items: list[Item] = []
        context, canvas, misses = self._shape.context_len, self._shape.canvas_len, 0
        while misses < (MISSES if items else MAX_DRAWS):
            item = self._itemiser.item(self._mixture.sample(rng), rng)
            if item.blocks and item.context_len <= context and item.canvas_len <= canvas:
                items.append(item)
                context, canvas = context - item.context_len, canvas - item.canvas_len
            else:
                misses += 1
        if not items:
            raise ValueError(
                f"{MAX_DRAWS} samples held no question and answer that fit into {self._shape.canvas_len} positions; "
                "raise canvas_len, or shorten the texts"
            )
        return lay_out(items, self._shape, self._spec, self._noise, rng)

    def batches(self, first: int, end: int, *, workers: int) -> Iterator[Batch]:
        """Batches `first` to `end` in order, made ahead by `workers` processes (0: in this one, when needed)."""
        numbers = range(first, end)
        loader = DataLoader(
            self,
            sampler=numbers,
            batch_size=None,
            num_workers=workers,
            pin_memory=torch.cuda.is_available() and workers > 0,
            prefetch_factor=8 if workers else None,
        )
        yield from loader
