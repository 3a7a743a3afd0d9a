"""Which tokens of a block are masked, and what each prediction weighs.

The loss of masked diffusion weighs a token by one over the share of masks it was drawn with, so that every share counts
alike. Source: LLaDA (arXiv 2502.09992), equation 3; for `MonotoneNoise` D2F (arXiv 2508.09192), section 3.2.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pdllm_rag.training.items import LIKELIHOOD, Block


class Masked(NamedTuple):
    """A row of a block that holds a mask, and its weight in the loss."""

    row: int
    weight: float


class Noise(Protocol):
    """Draws the masks of a block."""

    @property
    def block_len(self) -> int | None:
        """Rows of an answer block where rows do not see later blocks, else None."""
        ...

    def masks(self, block: Block, rng: random.Random) -> list[Masked]:
        """Rows to mask, at least one, in order."""
        ...


@dataclass(frozen=True)
class DiffusionNoise:
    """One share of masks for a whole answer; of a likelihood block, every other word of the question.

    Attributes:
        full: share of answers that are masked wholly, as at the first denoising step.
        least: smallest share drawn otherwise.
        least_weighed: a share below it weighs as this one.
        fill: weight of an EOS behind the first one, of which there are many.
    """

    full: float = 0.4
    least: float = 0.05
    least_weighed: float = 0.25
    fill: float = 0.12
    block_len: None = None

    def masks(self, block: Block, rng: random.Random) -> list[Masked]:
        """See `Noise.masks`."""
        if block.kind == LIKELIHOOD:
            words = block.question[rng.randrange(2) :: 2] or block.question
            return [Masked(row, block.weight) for row in words]
        share = 1.0 if rng.random() < self.full else rng.uniform(self.least, 1.0)
        rows = drawn(range(block.prompt_len, len(block.ids)), share, rng)
        return _weighed(rows, block, block.weight / max(share, self.least_weighed), self.fill)


@dataclass(frozen=True)
class MonotoneNoise:
    """D2F's: a later answer block holds no smaller share of masks than an earlier one.

    Attributes:
        block_len: rows of an answer block.
        first: the first block's share lies between these two; later ones rise to at most the second.
        fill: weight of an EOS behind the first one; published is 1.
    """

    block_len: int = 16
    first: tuple[float, float] = (0.2, 0.7)
    fill: float = 1.0

    def shares(self, n_blocks: int, rng: random.Random) -> list[float]:
        """A share for every block of an answer: p_1 ~ U[first], p_(b+1) = p_b + U[0, 1] (most - p_1) / (n - 1)."""
        share = start = rng.uniform(*self.first)
        found = [share]
        for _ in range(n_blocks - 1):
            share += rng.random() * (self.first[1] - start) / (n_blocks - 1)
            found.append(share)
        return found

    def masks(self, block: Block, rng: random.Random) -> list[Masked]:
        """See `Noise.masks`."""
        starts = range(block.prompt_len, len(block.ids), self.block_len)
        found = []
        for start, share in zip(starts, self.shares(len(starts), rng), strict=True):
            rows = range(start, min(start + self.block_len, len(block.ids)))
            masked = [row for row in rows if rng.random() < share]
            found += _weighed(masked, block, block.weight / share, self.fill)
        if found:
            return found
        return _weighed([rng.randrange(block.prompt_len, len(block.ids))], block, block.weight, self.fill)


def _weighed(rows: Iterable[int], block: Block, weight: float, fill: float) -> list[Masked]:
    """The rows of an answer; an EOS behind the first one weighs `fill` of the others."""
    end = block.prompt_len + block.answer_len
    return [Masked(row, weight * (1.0 if row < end else fill)) for row in rows]


def drawn(rows: range, share: float, rng: random.Random) -> list[int]:
    """Each row with probability `share`; at least one."""
    return [row for row in rows if rng.random() < share] or [rng.choice(rows)]
