"""The state machine of pipelined block decoding, apart from any model.

    SEMI -> ACTIVE -> DONE -> CACHED          (a block may skip what it has no need of, and never goes back)

- SEMI: denoised; only proposals above the commit threshold become final, so that a pass may leave it as it is;
- ACTIVE: denoised; if no proposal is above the threshold, the most confident one becomes final;
- DONE: neither it nor a block before it holds a mask; the next pass runs its rows once more, for the keys and values of
  its final tokens (the cache delay);
- CACHED: those are kept, and its rows are never run again.

The blocks are the prompt and then the answer's. A block that is full while one before it is not stays SEMI or ACTIVE.
Source: D2F (arXiv 2508.09192), pipelined parallel decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Where a block stands."""

    SEMI = "semi"
    ACTIVE = "active"
    DONE = "done"
    CACHED = "cached"

    @property
    def is_open(self) -> bool:
        """Whether the block, or one before it, may hold masks."""
        return self in (Phase.SEMI, Phase.ACTIVE)


OPENING = (Phase.ACTIVE,)  # the first block before the first pass: the prompt, or what holds its tail


@dataclass(frozen=True)
class D2FOptions:
    """When blocks are opened and activated. What is committed is the rule's (`CommitRule`): its threshold is D2F's
    commit (skip) threshold, and a budget of steps counts from a block's activation.

    Attributes:
        block_len: rows of an answer block; None takes the family's. For a block-causal model a multiple of its block.
        add_threshold: a block is added when this share of the last one is final; at most one a step.
        activate_threshold: a block is activated when this share of the one before it is final.
        window: most blocks that are open at once, or None.
    """

    block_len: int | None = None
    add_threshold: float = 0.1
    activate_threshold: float = 0.95
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("add_threshold", "activate_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a share, 0 to 1")
        for name in ("block_len", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected 1 or more, or None")


def advance(
    phases: Sequence[Phase], n_rows: Sequence[int], n_masked: Sequence[int], options: D2FOptions
) -> tuple[Phase, ...]:
    """The phases for the next pass; called once before each.

    Args:
        phases: in the pass before this one, `OPENING` if there was none.
        n_rows: rows of each block that the answer may still come to have; phases beyond them are dropped.
        n_masked: masked rows of each of them now.
    """
    found: list[Phase] = []
    for phase, left in zip(phases, n_masked, strict=False):
        if not phase.is_open:
            found.append(Phase.CACHED)
        elif left or any(before.is_open for before in found):
            found.append(phase)
        else:
            found.append(Phase.DONE)
    final = [(rows - left) / rows for rows, left in zip(n_rows, n_masked, strict=True)]
    n_open = sum(phase.is_open for phase in found)
    has_room = len(found) < len(n_rows) and (options.window is None or n_open < options.window)
    if has_room and final[len(found) - 1] >= options.add_threshold:
        found.append(Phase.SEMI)
    for index, share in enumerate(final[: len(found) - 1], start=1):
        if found[index] is Phase.SEMI and share >= options.activate_threshold:
            found[index] = Phase.ACTIVE
    return tuple(found)
