"""What is typed for lists of sizes on a benchmark's command line, as options' `type` (see `values`)."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def list_of(one: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """A list of values with commas between them."""

    def parse(text: str) -> list[Value]:
        return [one(part.strip()) for part in text.split(",")]

    return parse


def count(text: str) -> int:
    """A count of 1 or more: 8192, or 8k for 8 times 1024."""
    found = re.fullmatch(r"([0-9]{1,9})(k?)", text, re.IGNORECASE)
    value = int(found[1]) * (1024 if found[2] else 1) if found else 0
    if value < 1:
        raise ArgumentTypeError(f"got {text!r}, expected a whole number of 1 or more, such as 8192 or 8k")
    return value


def heads(text: str) -> tuple[int, int]:
    """Query heads and key/value heads: 28/4."""
    found = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
    n_heads, n_kv_heads = (int(found[1]), int(found[2])) if found else (0, 0)
    if n_heads < 1 or n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ArgumentTypeError(
            f"got {text!r}, expected query heads and key/value heads, the first a multiple of the second, such as 28/4"
        )
    return n_heads, n_kv_heads
