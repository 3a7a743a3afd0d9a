"""Texts without their white space, so that a copy that was wrapped, indented or joined anew is known again.

- the signs of a text are its characters in NFC, white space left out;
- an imprint finds a text in another one: a hash of its first `ANCHOR_SIGNS` signs (of all, where it has fewer) is
  looked up at every place where a text may begin, then the hash of the whole is compared.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

import blake3

ANCHOR_SIGNS = 32


class Imprint(NamedTuple):
    """What is indexed of a text: hash of its first signs, their whole number, hash of all. Hashes are int64."""

    anchor: int
    n_signs: int
    digest: int


class Squeezed(NamedTuple):
    """The signs of a text, and the code points [start, end) of the text that each one stands for."""

    signs: str
    starts: list[int]
    ends: list[int]

    def beginnings(self) -> Iterator[int]:
        """Signs that a text may begin with: all but those inside a word of ASCII letters and digits."""
        inside = [sign.isascii() and sign.isalnum() for sign in self.signs]
        for at in range(len(self.signs)):
            if at == 0 or not (inside[at - 1] and inside[at]) or self.ends[at - 1] < self.starts[at]:
                yield at


def signs_of(text: str) -> str:
    """The signs of a text."""
    words = text.split()
    return "".join(words if text.isascii() else (unicodedata.normalize("NFC", word) for word in words))


def squeeze(text: str) -> Squeezed:
    """The signs of a text and where they stand in it; a word that NFC makes longer or shorter is cut nowhere."""
    signs: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    for match in re.finditer(r"\S+", text):
        word = unicodedata.normalize("NFC", match.group())
        begin, end = match.span()
        signs.append(word)
        if len(word) == end - begin:
            starts += range(begin, end)
            ends += range(begin + 1, end + 1)
        else:
            starts += [begin] * len(word)
            ends += [end] * len(word)
    return Squeezed("".join(signs), starts, ends)


def hashed(signs: str) -> int:
    """A hash of signs, int64, the same in every process."""
    return int.from_bytes(blake3.blake3(signs.encode("utf-8", "surrogatepass")).digest(8), "little", signed=True)


def imprint(text: str) -> Imprint:
    """The imprint of a text."""
    signs = signs_of(text)
    return Imprint(hashed(signs[:ANCHOR_SIGNS]), len(signs), hashed(signs))
