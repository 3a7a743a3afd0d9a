"""What the words of a corpus are: names or not, rare or not, and which passages share rare ones."""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from pdllm_rag.training.texts.corpus import Corpus
from pdllm_rag.training.texts.names import company, person, place
from pdllm_rag.training.texts.words import STOP_WORDS, content

Sort = Literal["person", "place", "thing"]

_TOKEN = re.compile(r"(?<![.!?\"“]\s)(?<![\w'’])[^\W\d_][\w'’]*")
_PERSON = re.compile(r"\b(?:who|whose|whom)\b", re.IGNORECASE)
_PLACE = re.compile(
    r"\b(?:where|(?:what|which) (?:\w+ )?(?:city|country|state|town|county|place|region))\b", re.IGNORECASE
)
_MAX_PASSAGES = 60  # that a word may stand in and still make two of them alike
_MAX_LOWER = 0.04  # share of a name's uses that may be in lower case
_N_NEIGHBOURS = 12
_N_MADE = 200  # names of each sort that no text holds


class Lexicon:
    """Counts over a corpus, taken once."""

    def __init__(self, corpus: Corpus) -> None:
        self._upper: Counter[str] = Counter()
        self._lower: Counter[str] = Counter()
        for text in (*(p.text for p in corpus.passages), *(e.sentence for e in corpus.evidence), *corpus.prose):
            for word in _TOKEN.findall(text):
                (self._upper if word[0].isupper() else self._lower)[word.lower()] += 1
        self._names = self._pools(corpus)
        self._sorts = {word: sort for sort in self._names for name in self._names[sort] for word in name.split()}
        self._passages = self._index([passage.text for passage in corpus.passages])

    def is_name(self, word: str) -> bool:
        """Whether a word is a capitalised one that is hardly ever written otherwise."""
        if not word[:1].isupper() or word.lower() in STOP_WORDS or len(word) < 3:
            return False
        key = word.lower()
        return self._lower[key] <= _MAX_LOWER * self._upper[key]

    def named(self, sort: Sort, rng: random.Random) -> str:
        """A name of a sort, out of the corpus or made up."""
        return rng.choice(self._names[sort])

    def sort(self, name: str, otherwise: Sort = "thing") -> Sort:
        """What a name is most likely of: its first word that the corpus has an answer with tells."""
        return next((self._sorts[word] for word in name.split() if word in self._sorts), otherwise)

    def rarity(self, word: str) -> float:
        """Natural logarithm of how many passages there are to one with the (lower-case) word; 0 if none has it."""
        return self._rarity.get(word, 0.0)

    def neighbours(self, text: str) -> list[int]:
        """Passages by what rare words they share with a text, the most alike first; the text's own may be one."""
        score: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(content(text)):
            for passage in self._passages.get(word, ()):
                score[passage] += self._rarity[word]
        return sorted(score, key=lambda passage: (-score[passage], passage))[:_N_NEIGHBOURS]

    def _pools(self, corpus: Corpus) -> dict[Sort, Sequence[str]]:
        pools: dict[Sort, dict[str, None]] = {"thing": {}, "place": {}, "person": {}}
        for passage in corpus.passages:
            for question, answer in passage.rows:
                parts = answer.split()
                if len(parts) <= 4 and all(part.isalpha() and part.istitle() and self.is_name(part) for part in parts):
                    pools[asked_sort(question)][answer] = None
        rng = random.Random("names")
        made: dict[Sort, Callable[[random.Random], str]] = {"person": person, "place": place, "thing": company}
        return {sort: (*found, *(made[sort](rng) for _ in range(_N_MADE))) for sort, found in pools.items()}

    def _index(self, texts: Iterable[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        n = 0
        for n, text in enumerate(texts, start=1):
            for word in dict.fromkeys(content(text)):
                found[word].append(n - 1)
        self._rarity = {word: math.log(n / len(passages)) for word, passages in found.items()}
        return {word: passages for word, passages in found.items() if 1 < len(passages) <= _MAX_PASSAGES}


def asked_sort(question: str) -> Sort:
    """What sort of name a question asks for."""
    if _PERSON.search(question):
        return "person"
    return "place" if _PLACE.search(question) else "thing"
