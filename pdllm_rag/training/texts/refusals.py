"""Questions that the passages of a draft do not answer: near ones, and ones about something else.

Each maker gives a question, or None where the draft has nothing for it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from pdllm_rag.training.texts.corpus import Passage, Row
from pdllm_rag.training.texts.draft import Draft, Part, is_unanswered, nearness
from pdllm_rag.training.texts.lexicon import Lexicon
from pdllm_rag.training.texts.names import MONTHS
from pdllm_rag.training.texts.spans import names, values
from pdllm_rag.training.texts.swaps import Swap, other_value
from pdllm_rag.training.texts.words import apart, folded, sentences, stands_in, words

_MIN_NEAR = 7.0  # nearness from which a question sounds as if the passages might answer it
_MAX_FAR = 3.5  # rarity of a question's word that may stand in passages about something else
_N_TRIES = 6
_OPPOSITES = apart(
    "first last|largest smallest|highest lowest|oldest youngest|north south|east west|northern southern|before after|"
    "eastern western|most least|increase decrease|maximum minimum|longest shortest|best worst|male female|won lost|"
    "born died|import export|begin end|began ended|summer winter|men women|more fewer|above below|earliest latest"
)
_OPPOSITE = {a: b for pair in _OPPOSITES for a, b in (pair.split(), pair.split()[::-1])}


def cut(draft: Draft, rng: random.Random) -> str | None:
    """A question whose answer's sentences are taken out of its passage: the rest of it stays, without what it lost."""
    rows = [(row, at) for row, at in draft.rows() if not stands_in(row.answer, folded(row.question))]
    rng.shuffle(rows)
    for row, at in rows[:_N_TRIES]:
        gone = [one for one in sentences(draft.parts[at].text) if stands_in(row.answer, folded(one))]
        rest = draft.parts[at].without(gone) if gone else None
        if rest is None:
            continue
        left = Draft([rest if place == at else part for place, part in enumerate(draft.parts)])
        if is_unanswered(row.answer, left.folded()):
            draft.parts[at] = rest
            return row.question
    return None


def own(draft: Draft, rng: random.Random) -> str | None:
    """A question written for one of the passages that does not answer it."""
    asked = [question for part in draft.parts for question in part.misses]
    return rng.choice(asked) if asked else None


def mined(draft: Draft, passages: Sequence[Passage], lexicon: Lexicon, rng: random.Random) -> str | None:
    """A question of a passage that is like one of the draft, but not in it."""
    said = draft.folded()
    part = rng.choice(draft.parts)
    near = lexicon.neighbours(part.text)
    rng.shuffle(near)
    for at in near[:_N_TRIES]:
        rows = [row for row in passages[at].rows if is_unanswered(row.answer, said)]
        if rows:
            row = rng.choice(rows)
            if nearness(row.question, said, lexicon) >= _MIN_NEAR and not stands_in(row.answer, folded(row.question)):
                return row.question
    return None


def edited(draft: Draft, lexicon: Lexicon, rng: random.Random) -> str | None:
    """A question of the draft with a name, a number or an opposite put in, so that its answer holds no longer."""
    asked = {row.question for part in draft.parts for row in part.rows}
    rows = draft.rows()
    rng.shuffle(rows)
    for row, at in rows[:_N_TRIES]:
        if stands_in(row.answer, folded(row.question)):
            continue
        made = _edited(row, draft.parts[at], draft, lexicon, rng)
        if made and made not in asked:
            return made
    return None


def foreign(draft: Draft, draw: Callable[[random.Random], Row], lexicon: Lexicon, rng: random.Random) -> str | None:
    """A question about what no passage speaks of.

    Args:
        draw: gives any question with its answer.
    """
    said = draft.folded()
    for _ in range(_N_TRIES):
        row = draw(rng)
        known = [word for word in words(row.question) if lexicon.rarity(word) > _MAX_FAR and f" {word} " in said]
        if not known and is_unanswered(row.answer, said):
            return row.question
    return None


def _edited(row: Row, part: Part, draft: Draft, lexicon: Lexicon, rng: random.Random) -> str | None:
    said, everything = folded(part.text), draft.folded()
    evidence = folded("\n".join(one for one in sentences(part.text) if stands_in(row.answer, folded(one))))
    opposites = [word for word in words(row.question) if word in _OPPOSITE and f" {_OPPOSITE[word]} " not in evidence]
    if opposites and rng.random() < 0.5:
        return Swap({opposites[0]: _OPPOSITE[opposites[0]]})(row.question)
    found = [row.question[span.start : span.end] for span in values(row.question) + names(row.question, lexicon)]
    found = [old for old in found if stands_in(old, said)]
    if not found:
        return None
    old = rng.choice(found)
    if any(sign.isdigit() for sign in old):
        new = re.sub(r"[\d,.]*\d", lambda found: _other_figure(found[0], old, rng), old)
    elif rng.random() < 0.5:
        texts = [part.text] * 2 + [rng.choice(draft.parts).text]
        text = rng.choice(texts)
        others = [text[span.start : span.end] for span in names(text, lexicon)]
        others = [name for name in others if not set(words(name)) & set(words(f"{row.question} {row.answer}"))]
        others = [name for name in others if not stands_in(name, evidence)]
        others = [name for name in others if lexicon.sort(name) == lexicon.sort(old)] or others
        if not others:
            return None
        new = rng.choice(others)
    else:
        new = lexicon.named(lexicon.sort(old), rng)
        if stands_in(new, everything):
            return None
    return row.question.replace(old, new, 1) if not stands_in(new, evidence) else None


def _other_figure(figure: str, whole: str, rng: random.Random) -> str:
    """Another day where the figure is that of a date, else another number of its form."""
    is_day = len(figure) < 3 and any(month in whole for month in MONTHS)
    return str(rng.randint(1, 28)) if is_day else other_value(figure, rng)
