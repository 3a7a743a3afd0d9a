"""Words and sentences of a text, as far as rules find them."""

from __future__ import annotations

import re


def apart(phrases: str) -> tuple[str, ...]:
    """Phrases with a bar between them, or words with a blank."""
    return tuple(phrases.split("|" if "|" in phrases else " "))


_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*(?:\[\d+\])*\s+(?=[\"'“‘(\[]?[A-Z0-9])|\s*\n\s*")
# What ends in a full stop inside a sentence: titles, initials, and the like.
_ABBREVIATED = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|Rev|Gen|Col|Capt|Lt|Sgt|Gov|Sen|Rep|St|Jr|Sr|Mt|Ft|No|Nos|Vol|vs?|cf|ca|c|al|etc"
    r"|e\.g|i\.e|approx|Inc|Ltd|Co|Corp|Bros|Fig|Figs|Eq|Sec|pp?|ed|eds|Ae|[rdb]"
    r"|Jan|Feb|Mar|Apr|Aug|Sept?|Oct|Nov|Dec)|\b[A-Z]|\b[A-Z]\.[A-Z])\.$"
)
_WORD = re.compile(r"\w+")
_ARTICLES = frozenset({"a", "an", "the"})
STOP_WORDS = frozenset(
    apart(
        "a about above after again against all almost along already also although always am among an and another any "
        "are around as at away back be became because become been before being below between both but by came can "
        "cannot could did do does done down during each either else end even ever every few first for from further "
        "get give go had has have he her here hers him his how however i if in into is it its itself just last later "
        "least less like made make many may me might more most much must my near neither never next no nor not now of "
        "off often on once one only or other others our out over own part per put rather said same say second see "
        "several shall she should since so some still such take than that the their them themselves then there these "
        "they thing things third this those though three through thus time to together too took toward two under "
        "until up upon us use used using very was way we well went were what when where whether which while who whom "
        "whose why will with within without would year years yet you your"
    )
)


def sentences(text: str) -> list[str]:
    """The sentences of a text in order, each a part of it without outer white space."""
    found, start = [], 0
    for end in _END.finditer(text):
        if "\n" not in end[0] and _ABBREVIATED.search(text, max(start, end.start() - 8), end.start()):
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def words(text: str) -> list[str]:
    """The words of a text in lower case, without signs."""
    return _WORD.findall(text.lower())


def folded(text: str) -> str:
    """The words of a text in lower case with a blank before and after each, for `stands_in`."""
    return f" {' '.join(words(text))} "


def stands_in(answer: str, folded_text: str) -> bool:
    """Whether an answer's words, articles in front left out, stand in a folded text in one run."""
    said = words(answer)
    while len(said) > 1 and said[0] in _ARTICLES:
        del said[0]
    return bool(said) and f" {' '.join(said)} " in folded_text


def content(text: str) -> list[str]:
    """The words that say what a text is about, in order."""
    return [word for word in words(text) if word not in STOP_WORDS and len(word) > 1]


def shingles(text: str, n_words: int = 8) -> set[str]:
    """All runs of so many words; the whole text where it has fewer."""
    said = words(text)
    return {" ".join(said[at : at + n_words]) for at in range(max(1, len(said) - n_words + 1))}
