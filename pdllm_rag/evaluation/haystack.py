"""Haystacks: filler cut into parts of one chunk each, and one part more that holds the needle.

A haystack of n chunks has n - 1 parts that stay, and the needle's part between two of them. So a needle at another
place, or another needle, changes one chunk and no other; and a longer haystack begins with the parts of a shorter one.
A part is a paragraph of whole sentences that fits one chunk: no needle is cut in two.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from pdllm_rag.evaluation.needles import TASKS, Needle, make_needle, rivals

BETWEEN = "\n\n"  # of two parts, where they are one text
FEW_DRAWS = 6  # of another sentence, when one does not fit


class Part(NamedTuple):
    """One chunk's text. `place` numbers are in text order; those of parts that stay are odd."""

    place: int
    text: str


class Hidden(NamedTuple):
    """A needle in its part.

    depth: characters of the whole text ahead of the needle, as a share of all that are not the needle's.
    """

    needle: Needle
    part: Part
    depth: float


class Haystack:
    """Filler of one task and length.

    Args:
        n_tokens: length of the whole, the needle's part and a BOS in each chunk included; at least one chunk's.
        chunk_len: tokens of a chunk, BOS included.
        count: tokens of a text, BOS left out.

    Raises:
        ValueError: an unknown task, or a chunk does not hold a needle.
    """

    def __init__(self, task: str, n_tokens: int, chunk_len: int, count: Callable[[str], int], *, seed: int) -> None:
        if task not in TASKS:
            raise ValueError(f"task is {task!r}; expected one of {', '.join(TASKS)}")
        if n_tokens < chunk_len:
            raise ValueError(f"haystack of {n_tokens} tokens in chunks of {chunk_len}; expected one chunk or more")
        self.task, self.n_tokens, self.chunk_len, self.seed = task, n_tokens, chunk_len, seed
        self._filler, self._count = TASKS[task].filler, count
        n_parts = n_tokens // chunk_len - 1
        beside = rivals(task, random.Random(f"rivals {task} {n_tokens} {chunk_len} {seed}"))
        if beside and not n_parts:
            raise ValueError(f"task {task!r} needs two chunks or more; got {n_tokens} tokens in chunks of {chunk_len}")
        held: dict[int, list[str]] = {}
        for number, sentence in enumerate(beside):  # evenly
            held.setdefault(n_parts * (2 * number + 1) // (2 * len(beside)), []).append(sentence)
        kind = self._filler.__name__
        self.parts = tuple(
            Part(2 * i + 1, self._paragraph(random.Random(f"{kind} {chunk_len} {seed} {i}"), held.get(i, ()), 0.5))
            for i in range(n_parts)
        )

    def hide(self, depth: float, trial: int) -> Hidden:
        """Another needle for each trial, at a depth: 0 is ahead of all filler, 1 behind it.

        Raises:
            ValueError: a depth outside 0 to 1.
        """
        if not 0 <= depth <= 1:
            raise ValueError(f"depth is {depth}; expected 0 to 1")
        random_words = random.Random(f"needle {self.task} {self.n_tokens} {self.chunk_len} {self.seed} {depth} {trial}")
        needle = make_needle(self.task, random_words)
        n_chunks = len(self.parts) + 1
        index = min(int(depth * n_chunks), n_chunks - 1)
        text = self._paragraph(random_words, (needle.sentence,), depth * n_chunks - index)
        part = Part(2 * index, text)
        whole = self.text_with(part)
        return Hidden(needle, part, whole.index(needle.sentence) / max(1, len(whole) - len(needle.sentence)))

    def parts_with(self, part: Part) -> list[Part]:
        """All parts in text order."""
        return sorted((*self.parts, part))

    def text_with(self, part: Part) -> str:
        """The whole as one text."""
        return BETWEEN.join(one.text for one in self.parts_with(part))

    def _paragraph(self, random_words: random.Random, held: tuple[str, ...] | list[str], at: float) -> str:
        """Filler up to a chunk, with the held sentences behind the share `at` of it."""
        budget = self.chunk_len - 1
        sentences: list[str] = []
        room = budget - self._count(" ".join(held))
        if room < 0:
            raise ValueError(
                f"{held[0]!r} and {len(held) - 1} more take {budget - room} tokens of a chunk of {self.chunk_len}, BOS "
                "included; expected them to fit. Take longer chunks"
            )
        misses = 0
        while misses < FEW_DRAWS:
            sentence = self._filler(random_words)
            cost = self._count(f" {sentence}")
            if cost > room:
                misses += 1
            else:
                sentences.append(sentence)
                room -= cost
        while True:
            split = round(at * len(sentences))
            paragraph = " ".join((*sentences[:split], *held, *sentences[split:]))
            if self._count(paragraph) <= budget:
                return paragraph
            sentences.pop()
