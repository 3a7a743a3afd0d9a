"""How the likelihood of tokens is read from a model that sees them: which rows are hidden, and which are read, in what
passes.

A bidirectional model has no chain rule to sum along, so what is estimated is a pseudo-log-likelihood. The estimators
differ in what a token's prediction sees of its neighbours, and in passes:

| estimator | a token is predicted from | passes over Q tokens |
|---|---|---|
| `MaskedGroups(n)` | the tokens of the other groups; its own group, every n-th token, is hidden | n |
| `LeaveOneOut()` | all other tokens: the reference, Salazar et al. 2020, and the authors' for LLaDA | Q |
| `CausalShift()` | the tokens before it, none hidden: the authors' for Dream | 1 |

Under a block-causal mask "the others" are those up to the end of the token's block.

Source: Prefilling-dLLM (arXiv 2606.10537) and its public code.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from pdllm_rag.models.spec import ModelSpec

logger = logging.getLogger(__name__)

CAUSAL_FAMILIES = ("dream",)  # for which the authors report scores read this way


class Reading(NamedTuple):
    """One pass over a canvas.

    hidden: rows that hold the mask instead of their token.
    scored: rows whose token's likelihood is read.
    """

    hidden: tuple[int, ...]
    scored: tuple[int, ...]


class Estimator(Protocol):
    """From rows to the passes that score each of them once.

    is_causal: canvas rows see no later canvas row; they see all of the chunk either way.
    """

    is_causal: ClassVar[bool]

    def readings(self, rows: Sequence[int]) -> list[Reading]:
        """The passes over these rows, ascending; at least one row is given."""
        ...

    def check(self, spec: ModelSpec) -> None:
        """Raises ValueError if what it reads means nothing for this model."""
        ...


@dataclass(frozen=True)
class MaskedGroups:
    """`n` passes, each hiding and reading every n-th row; of fewer rows than groups, each is a group."""

    n: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"MaskedGroups has n={self.n!r}; expected a whole number of 1 or more")

    is_causal: ClassVar[bool] = False

    def readings(self, rows: Sequence[int]) -> list[Reading]:
        """See `Estimator.readings`."""
        n = min(self.n, len(rows))
        return [Reading(tuple(rows[group::n]), tuple(rows[group::n])) for group in range(n)]

    def check(self, spec: ModelSpec) -> None:
        """Means something for every masked-diffusion model."""


@dataclass(frozen=True)
class LeaveOneOut:
    """A pass for each row, which alone is hidden: the reference."""

    is_causal: ClassVar[bool] = False

    def readings(self, rows: Sequence[int]) -> list[Reading]:
        """See `Estimator.readings`."""
        return [Reading((row,), (row,)) for row in rows]

    def check(self, spec: ModelSpec) -> None:
        """Means something for every masked-diffusion model."""


@dataclass(frozen=True)
class CausalShift:
    """One pass with nothing hidden: each row's token is read from the row before, which does not see it.

    Only a model with logit shift can do this: without it, a row predicts its own token, and here it would see it. Of
    those, the models that were adapted from an autoregressive one and kept its shift (Dream) still have something of
    the causal prediction; others were never trained with a causal canvas, so a warning says that it is an experiment.
    """

    is_causal: ClassVar[bool] = True

    def readings(self, rows: Sequence[int]) -> list[Reading]:
        """See `Estimator.readings`."""
        return [Reading((), tuple(rows))]

    def check(self, spec: ModelSpec) -> None:
        """Raises ValueError for a model without logit shift; warns where nobody has reported results."""
        if not spec.logit_shift:
            raise ValueError(
                f"CausalShift reads a token from the row before, but {spec.name} (family {spec.family.name}) predicts "
                "it at its own row, where it would be visible; take MaskedGroups(2) or LeaveOneOut() for this model"
            )
        if spec.family.name not in CAUSAL_FAMILIES:
            logger.warning(
                "CausalShift is an experiment for family %s, which was not trained with a causal canvas; the authors "
                "report it for: %s",
                spec.family.name,
                ", ".join(CAUSAL_FAMILIES),
            )
