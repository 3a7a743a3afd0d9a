"""Long answers that stand in a passage word by word: quoted sentences, what is said about something, what follows."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from pdllm_rag.training.texts.corpus import Row
from pdllm_rag.training.texts.lexicon import Lexicon
from pdllm_rag.training.texts.spans import names
from pdllm_rag.training.texts.words import folded, sentences, stands_in

_QUOTE = (
    "Quote the sentence that answers: {}",
    "Which sentence answers this question? {}",
    "Copy the sentence that tells: {}",
    "{} Quote the sentence.",
    "{} Answer with the sentence of the documents that says so.",
    "Find the sentence that answers the question and repeat it word for word: {}",
    "Give the passage's own words: {}",
    "{} Cite the supporting sentence.",
)
_REPEAT = (
    "Repeat what the document says about {}:",
    "Repeat what the documents say about {}.",
    "What exactly do the documents say about {}? Quote them.",
    "Quote the part about {}.",
    "Copy the sentences on {} word for word.",
    "What is said about {}? Give the exact words.",
)
_CONTINUE = (
    "Continue: {}",
    "Continue the text: {}",
    "How does this go on? {}",
    "Finish the sentence as the documents do: {}",
    "Complete word for word: {}",
)
_FOLLOW = ("What comes right after this sentence? {}", "Quote the sentence that follows: {}", "Continue after: {}")
_BEFORE_NAME = re.compile(r"\b(?:in|of|by|to|from|at|with) $")  # a name by itself that is no adjective, most likely
_MAX_CHARS = 420  # of a quote
_MIN_CHARS = 25


def quoted(question: str, sentence: str, rng: random.Random) -> Row:
    """The question in an instruction to quote."""
    return Row(rng.choice(_QUOTE).format(question), sentence)


def sentence_of(answer: str, passage: str) -> str | None:
    """The one sentence of a passage that an answer stands in, if there is exactly one."""
    found = [sentence for sentence in sentences(passage) if stands_in(answer, folded(sentence))]
    return found[0] if len(found) == 1 and _MIN_CHARS <= len(found[0]) <= _MAX_CHARS else None


def said_about(passage: str, texts: Sequence[str], lexicon: Lexicon, rng: random.Random) -> Row | None:
    """All that the texts say about a name, where that is one run of at most three sentences of the passage."""
    parts = sentences(passage)
    found = [
        passage[start:end]
        for start, end, _ in names(passage, lexicon)
        if " " in passage[start:end] or _BEFORE_NAME.search(passage, max(0, start - 6), start)
    ]
    rng.shuffle(found)
    everything = folded("\n".join(texts))
    for name in found[:4]:
        own = [at for at, part in enumerate(parts) if stands_in(name, folded(part))]
        if not own or len(own) != own[-1] - own[0] + 1 or len(own) > 3:
            continue
        quote = run(passage, parts, own[0], own[-1])
        key = folded(name)
        if _MIN_CHARS <= len(quote) <= _MAX_CHARS and everything.count(key) == folded(passage).count(key):
            return Row(rng.choice(_REPEAT).format(name), quote)
    return None


def continued(passage: str, rng: random.Random) -> Row | None:
    """The rest of a sentence, up to the end of the next one, or the sentence after one; None in short passages."""
    parts = sentences(passage)
    at = rng.randrange(len(parts))
    if len(parts) > at + 1 and len(parts[at].split()) >= 6 and rng.random() < 0.35:
        follower = parts[at + 1]
        if _MIN_CHARS <= len(follower) <= _MAX_CHARS and passage.count(parts[at]) == 1:
            return Row(rng.choice(_FOLLOW).format(parts[at]), follower)
    said = parts[at].split(" ")
    if len(said) < 10:
        return None
    begun = " ".join(said[: rng.randint(5, min(12, len(said) - 4))])
    if passage.count(begun) != 1:
        return None
    last = at + 1 if len(parts) > at + 1 and rng.random() < 0.3 else at
    rest = run(passage, parts, at, last)[len(begun) :].strip()
    return Row(rng.choice(_CONTINUE).format(begun), rest) if _MIN_CHARS <= len(rest) <= _MAX_CHARS else None


def run(passage: str, parts: list[str], first: int, last: int) -> str:
    """The passage from one of its sentences to another, both in it."""
    place = 0
    starts = []
    for part in parts:
        place = passage.index(part, place)
        starts.append(place)
        place += len(part)
    return passage[starts[first] : starts[last] + len(parts[last])]
