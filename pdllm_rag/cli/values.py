"""What is typed for the value of an option: counts, numbers, sizes, durations.

Each is an option's `type`: it gives the value of a text, or raises argparse.ArgumentTypeError, which ends the
command with one line that says what was got and what was expected.
"""

from __future__ import annotations

import json
import math
import re
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)

_SIZE_UNITS = {"": 1} | {
    f"{letter}{suffix}".lower(): base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _accepted(
    kind: Callable[[str], Number], accepts: Callable[[Number], bool], expected: str
) -> Callable[[str], Number]:
    """The type of an option whose value is what `kind` makes of a text, if that is accepted."""

    def parse(text: str) -> Number:
        with suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        raise ArgumentTypeError(f"got {text!r}, expected {expected}")

    return parse


positive_int = _accepted(int, lambda value: value >= 1, "a whole number of 1 or more")
seed = _accepted(int, lambda value: 0 <= value < 2**63, "a whole number of 0 or more")
probability = _accepted(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
share = _accepted(float, lambda value: 0 < value <= 1, "a number above 0 and up to 1, such as 0.05")
not_negative = _accepted(float, lambda value: value >= 0, "a number of 0 or more, or inf")
weight = temperature = _accepted(float, lambda value: 0 <= value < math.inf, "a number of 0 or more")


def size(text: str) -> int:
    """Bytes: a whole number, or a number with KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024)."""
    found = re.fullmatch(r"([0-9]{1,19})|([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([KMGT]i?B)", text, re.IGNORECASE)
    n_bytes = int(Fraction(found[1] or found[2]) * _SIZE_UNITS[(found[3] or "").lower()]) if found else 0
    if not 0 < n_bytes < 2**63:
        raise ArgumentTypeError(f"got {text!r}, expected a size such as 500MB, 2GiB or 1073741824 (bytes)")
    return n_bytes


def size_or_none(text: str) -> int | None:
    """As `size`; "none" is None."""
    try:
        return None if text == "none" else size(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, or none") from None


def duration(text: str) -> int:
    """Seconds: a whole number with s, m (minutes), h or d."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if not found:
        raise ArgumentTypeError(f"got {text!r}, expected a duration such as 90s, 15m, 12h or 30d")
    return int(found[1]) * _SECONDS[found[2]]


class KeyValues(Action):
    """Collects KEY=VALUE, the option given several times, into a dictionary; a key has one value."""

    def __call__(self, _parser: ArgumentParser, namespace: Namespace, values: Any, *_: Any) -> None:
        key, equals, text = values.partition("=")
        if not key or not equals:
            raise ArgumentError(self, f"got {values!r}, expected KEY=VALUE")
        held = getattr(namespace, self.dest, {})
        if key in held:
            raise ArgumentError(self, f"got the key {key!r} twice, expected it once")
        setattr(namespace, self.dest, {**held, key: self.value(text)})

    def value(self, text: str) -> Any:
        """The value of its text."""
        return text


class TypedKeyValues(KeyValues):
    """The same; a value is a number, true, false or null as in JSON, and text otherwise."""

    def value(self, text: str) -> Any:
        """See `KeyValues.value`."""
        return typed(text)


def typed(text: str) -> Any:
    """A number, true, false or null as in JSON, and any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
