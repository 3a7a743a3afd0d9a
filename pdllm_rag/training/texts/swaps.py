"""An answer replaced by another of its kind wherever it stands, so that it must be read and cannot be remembered."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from pdllm_rag.training.texts.lexicon import Lexicon, asked_sort
from pdllm_rag.training.texts.names import MONTHS
from pdllm_rag.training.texts.spans import COUNTING, values
from pdllm_rag.training.texts.words import words

_DAY = re.compile(rf"\b(\d{{1,2}}) ({'|'.join(MONTHS)})\b|\b({'|'.join(MONTHS)}) (\d{{1,2}})\b(?!\d)")
_FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")
_WORD = re.compile(r"[^\W_]+")
_MAX_VALUE_WORDS = 6
_MAX_NAME_WORDS = 5


class Swap:
    """Words and numbers, and what they become: all at once, in any number of texts."""

    def __init__(self, new: dict[str, str]) -> None:
        self._new = new
        olds = "|".join(re.escape(old) for old in sorted(new, key=lambda old: (-len(old), old)))
        self._pattern = re.compile(rf"(?<!\w)(?<!\d[.,])(?:{olds})(?!\w)(?![.,]\d)")

    def __call__(self, text: str) -> str:
        """The text with every one replaced."""
        return self._pattern.sub(lambda found: self._new[found[0]], text)


def swap(question: str, answer: str, texts: Sequence[str], lexicon: Lexicon, rng: random.Random) -> Swap | None:
    """What makes another answer of this one in all of the texts, or None where that cannot be done safely.

    Args:
        texts: every passage, question and answer that will be swapped with it.
    """
    whole = "\n".join(texts)
    new = _new_value(answer, whole, rng) or _new_name(question, answer, whole, lexicon, rng)
    if not new or not set(words(" ".join(new.values()))).isdisjoint(set(words(whole)) - set(words(" ".join(new)))):
        return None
    made = Swap(new)
    return made if made(answer) != answer else None


def other_value(text: str, rng: random.Random) -> str:
    """A number of the same form: a near year for a year, as many digits otherwise; another word for "seven"."""
    if text in COUNTING:
        return rng.choice([word for word in COUNTING[:11] if word != text])
    if re.fullmatch(r"(?:1[0-9]|20)\d\d", text):
        step = rng.randint(1, 40) * rng.choice((-1, 1))
        return str(int(text) + (step if int(text) + step < 2030 else -abs(step)))
    drawn = "".join(rng.choice("0123456789") if sign.isdigit() else sign for sign in text[1:])
    first = rng.choice("123456789") if text[0] != "0" else "0"
    return first + drawn


def _new_value(answer: str, whole: str, rng: random.Random) -> dict[str, str]:
    """For an answer that is a date or an amount."""
    found = values(answer)
    if len(found) != 1 or len(answer.split()) > _MAX_VALUE_WORDS:
        return {}
    span = found[0]
    text = answer[span.start : span.end]
    new: dict[str, str] = {}
    if span.sort == "date":
        if day := _DAY.search(text):
            month, number = rng.choice(MONTHS), str(rng.randint(1, 28))
            new[day[0]] = f"{number} {month}" if day[1] else f"{month} {number}"
            text = text.replace(day[0], "")
        text = text.strip(", ")
        for month in MONTHS:
            text = text.removeprefix(month).strip(", ")
    for figure in [text] if text in COUNTING else _FIGURE.findall(text):
        # A small number stands for many things: only where it is the only one.
        if len(figure) < 3 and len(re.findall(rf"(?<!\w){re.escape(figure)}(?!\w)", whole)) > 2:
            return {}
        new[figure] = other_value(figure, rng)
    return {old: made for old, made in new.items() if old != made}


def _new_name(question: str, answer: str, whole: str, lexicon: Lexicon, rng: random.Random) -> dict[str, str]:
    """For an answer with names in it: each word of them by another, "University of" and the like stay."""
    parts = [part for part in re.findall(r"[\w-]+", answer) if part.isalpha() and part.istitle()]
    parts = [part for part in parts if lexicon.is_name(part) and part not in MONTHS]
    if not parts or len(answer.split()) > _MAX_NAME_WORDS:
        return {}
    new: dict[str, str] = {}
    for old in dict.fromkeys(parts):
        root = old[:-1].lower() if len(old) > 4 else old.lower()
        if any(word != old and word.lower().startswith(root) for word in _WORD.findall(whole)):
            return {}  # "Normans" or "Lutheran" would give "Norman" or "Luther" away
        pool = lexicon.named(lexicon.sort(old, asked_sort(question)), rng).split()
        new[old] = pool[min(len(new), len(pool) - 1)]
    return new if len(set(new.values())) == len(new) else {}
