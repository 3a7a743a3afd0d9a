"""What is typed for the value of an option: counts, numbers, sizes, durations.

Each function is an option's `type`: it gives the value of a text, or raises argparse.ArgumentTypeError, which ends the
command with one line that says what was got and what was expected.
"""

from __future__ import annotations

import json
import math
import re
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from fractions import Fraction
from typing import Any

_SIZE_UNITS = {"": 1} | {
    f"{letter}{suffix}".lower(): base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def positive_int(text: str) -> int:
    """A count of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"got {text!r}, expected a whole number of 1 or more")
    return value


def seed(text: str) -> int:
    """The seed of a random generator."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise ArgumentTypeError(f"got {text!r}, expected a whole number of 0 or more")
    return value


def probability(text: str) -> float:
    """A number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"got {text!r}, expected a number from 0 to 1")
    return value


def share(text: str) -> float:
    """A part of a whole that is not nothing."""
    value = _number(text)
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"got {text!r}, expected a number above 0 and up to 1, such as 0.05")
    return value


def not_negative(text: str) -> float:
    """A number of 0 or more, infinity among them."""
    value = _number(text)
    if not value >= 0:
        raise ArgumentTypeError(f"got {text!r}, expected a number of 0 or more, or inf")
    return value


def weight(text: str) -> float:
    """A finite number of 0 or more."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"got {text!r}, expected a number of 0 or more")
    return value


temperature = weight


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


def _number(text: str) -> float:
    """The number, NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
