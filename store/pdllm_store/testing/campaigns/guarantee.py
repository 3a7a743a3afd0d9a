"""What a campaign says when a store did not keep a promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class BrokenGuaranteeError(AssertionError):
    """A store broke a promise; the message says which, and what was got and expected."""

    def __init__(self, message: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.figures = figures  # of the whole campaign, if it went on to its end


def require(kept: bool, message: str) -> None:
    """Raises BrokenGuaranteeError."""
    if not kept:
        raise BrokenGuaranteeError(message)
