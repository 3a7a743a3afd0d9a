"""Made-up passages: codes, numbers and records among near twins, and what is told of people and things that never were.

What is asked for stands there exactly once. `absent` holds questions about twins, or about what was left unsaid.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdllm_rag.training.texts.corpus import Row
from pdllm_rag.training.texts.facts import told
from pdllm_rag.training.texts.names import code, digits, number, person, place, stem, surname, twin
from pdllm_rag.training.texts.sample import Kind
from pdllm_rag.training.texts.words import apart, folded, sentences, stands_in


class Hidden(NamedTuple):
    """Passages, what they answer, and questions that nothing in them answers."""

    passages: list[str]
    rows: list[tuple[Row, int]]  # with the passage that holds the answer
    absent: list[str]


_SITES = apart(
    "loading bay|server room|boiler house|east wing|parcel locker|vault|garage|wine cellar|laboratory|staff entrance|"
    "roof terrace|cold room|boardroom|generator shed|paint shop|film archive|kennel|observatory|chapel|locker|hangar|"
    "safe|elevator|guest network|back office|workshop|medicine cabinet|greenhouse|lighthouse|bunker|gym|control room"
)
_MARKS = apart("north|south|upper|lower|old|new|first|second|blue|green|left|right|inner|outer|main|spare")
_SECRETS = apart(
    "access code|entry code|password|PIN|secret key|unlock code|pass key|passcode|security code|combination"
)
_KEY_TELLS = (
    "The {what} for the {site} is {value}.",
    "Remember this: the {site} has the {what} {value}.",
    "{value} is the {what} for the {site}.",
    "To get into the {site}, use the {what} {value}.",
    "Note that the {what} of the {site} was changed to {value}.",
    "Anyone who needs the {site} should know that its {what} is {value}.",
    "{Site}: {what} {value}.",
)
_KEY_ASKS = (
    "What is the {what} for the {site}?",
    "Which {what} does the {site} have?",
    "Give the {what} of the {site}.",
    "{Site} {what}?",
    "I have forgotten the {what} for the {site}. What is it?",
    "Tell me the {what} that opens the {site}.",
)
_GOODS = apart(
    "pump|turbine|camera|drone|printer|tractor|scale|freezer|lathe|scanner|ferry|tram|harp|clock|kiln|loom|crane|"
    "satellite dish|water meter|forklift|piano|projector|oven|radar|sledge|generator|wheelchair|sewing robot"
)
_FIGURES = apart(
    "part number|registration number|account number|tracking number|license number|order number|inventory number|"
    "meter reading|contract number|case number|batch number|asset tag"
)
_NUMBER_TELLS = (
    "The {what} of the {site} is {value}.",
    "The {site} carries the {what} {value}.",
    "{value} was noted as the {what} of the {site}.",
    "According to the ledger, the {site} has {what} {value}.",
    "Its label gives {value} as the {what} of the {site}.",
    "{Site} ({what}: {value}).",
)
_NUMBER_ASKS = (
    "What is the {what} of the {site}?",
    "What {what} does the {site} carry?",
    "State the {what} of the {site}.",
    "Under which {what} is the {site} listed?",
    "{what} of the {site}?",
)
_LIST_TELLS = ("The {what}s of the {site} are {value}.", "For the {site} these {what}s hold: {value}.")
_LIST_ASKS = (
    "List the {what}s of the {site}.",
    "What are all the {what}s of the {site}?",
    "Name every {what} of the {site}.",
)
_SENTENCES = {
    "passkey": (_SITES, _SECRETS, _KEY_TELLS, _KEY_ASKS),
    "number": (_GOODS, _FIGURES, _NUMBER_TELLS, _NUMBER_ASKS),
}
_LISTS = 0.12  # of sentences: several values
_RECORD_ASKS = (
    "What is the value of {key}?",
    "Which value is stored under {key}?",
    "What does the key {key} map to?",
    "Look up {key}.",
    "{key}?",
    "Give the value for {key}.",
    "What belongs to {key}?",
)
_REVERSE_ASKS = ("Which key has the value {value}?", "Under which key is {value} stored?", "What maps to {value}?")
_FORMS: tuple[Callable[[str, str], str], ...] = (
    lambda key, value: f"{json.dumps(key)}: {json.dumps(value)},",
    lambda key, value: f'{{"key": "{key}", "value": "{value}"}}',
    lambda key, value: f"{key}: {value}",
    lambda key, value: f"{key} = {value}",
    lambda key, value: f"{key} | {value}",
    lambda key, value: f"- {key} -> {value}",
    lambda key, value: f"{key},{value}",
    lambda key, value: f"The value of {key} is {value}.",
    lambda key, value: f"Under {key} we keep {value}.",
    lambda key, value: f"Record {key} contains {value}.",
)
_REVERSED = 0.12  # of questions about records: for the key
_IN_LINES = 7  # of the forms: one record a line
_MAX_RECORDS = (4, 16)
_RECORD_CHARS = 900  # of the records of a passage


def hide(kind: Kind, n: int, fillers: Sequence[str], rng: random.Random) -> Hidden:
    """Passages of a synthetic kind that answer at least n questions and leave at least one open.

    Args:
        fillers: texts to hide sentences in; records and most facts stand in passages of their own.
    """
    if kind == "key-value":
        return _records(n, rng)
    if kind == "fact":
        return _facts(n, fillers, rng)
    sites, whats, tells, asks = _SENTENCES[kind]
    told_of = _marked(rng.choice(sites), n + rng.randint(2, 4), rng)
    if rng.random() < 0.4:
        told_of = _marked(rng.choice(sites), 2, rng) + told_of
    what, hidden = rng.choice(whats), {}
    make = number if kind == "number" and rng.random() < 0.75 else _value
    for site in dict.fromkeys(told_of):
        value, told, asked = make(rng), tells, asks
        if rng.random() < _LISTS:
            value, told, asked = _listed([make(rng) for _ in range(rng.randint(2, 5))]), _LIST_TELLS, _LIST_ASKS
        slots = {"what": what, "site": site, "Site": site[0].upper() + site[1:], "value": value}
        question = rng.choice(asked).format(**slots)
        hidden[rng.choice(told).format(**slots)] = Row(question[0].upper() + question[1:], value)
    _, left_out = hidden.popitem()
    return _inserted(list(hidden.items()), fillers, [left_out.question], rng)


def _marked(site: str, n: int, rng: random.Random) -> list[str]:
    """So many sites that differ in one word."""
    form = rng.random()
    if form < 0.5:
        return [f"{mark} {site}" for mark in rng.sample(_MARKS, min(n, len(_MARKS)))]
    if form < 0.75:
        start = rng.randint(1, 400)
        return [f"{site} {start + step}" for step in rng.sample(range(3 * n), n)]
    return [f"{site} of {rng.choice((place, person))(rng)}" for _ in range(n)]


def _value(rng: random.Random) -> str:
    return digits(rng, rng.randint(4, 8)) if rng.random() < 0.6 else code(rng)


def _listed(values: list[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


def _records(n: int, rng: random.Random) -> Hidden:
    """Records of one form in one passage or two, their keys alike."""
    keys, values = _keys(n + rng.randint(*_MAX_RECORDS), rng), rng.choice((number, code, code, person, place, _word))
    form = rng.randrange(len(_FORMS))
    kept: dict[str, str] = {}
    length = 0
    for key in keys:
        value = values(rng)
        length += len(_FORMS[form](key, value)) + 1
        if length > _RECORD_CHARS:
            break
        if value not in kept.values():
            kept[key] = value
    left = [key for key in keys if key not in kept] or [twin(key, rng) for key in keys[:2]]
    absent = [rng.choice(_RECORD_ASKS).format(key=key) for key in left if key not in kept]
    parts = list(kept.items())
    half = len(parts) // 2 if rng.random() < 0.5 else len(parts)
    passages, rows = [], []
    for passage, held in enumerate(part for part in (parts[:half], parts[half:]) if part):
        lines = [_FORMS[form](key, value) for key, value in held]
        text = ("\n" if form < _IN_LINES else " ").join(lines)
        passages.append(f"{{\n{text[:-1]}\n}}" if form == 0 else text)
        for key, value in held:
            if rng.random() < _REVERSED:
                rows.append((Row(rng.choice(_REVERSE_ASKS).format(value=value), key), passage))
            else:
                rows.append((Row(rng.choice(_RECORD_ASKS).format(key=key), value), passage))
    rng.shuffle(rows)
    return Hidden(passages, rows, absent)


def _keys(n: int, rng: random.Random) -> list[str]:
    """Distinct keys of one form; most differ from another one in a sign or a word."""
    word = stem(rng, rng.choice((1, 2))).lower()
    make: Callable[[random.Random], str] = rng.choice(
        (
            code,
            code,
            person,
            lambda rng: f"{word}-{digits(rng, 3)}",
            lambda rng: f"{word}_{digits(rng, 2)}",
            lambda rng: f"{rng.choice(('user', 'item', 'node', 'ticket'))} {digits(rng, 4)}",
            _word,
            surname,
        )
    )
    keys: dict[str, None] = {}
    while len(keys) < n:
        near = rng.choice(list(keys)) if keys and rng.random() < 0.6 else None
        keys[twin(near, rng) if near else make(rng)] = None
    return rng.sample(list(keys), n)


def _word(rng: random.Random) -> str:
    return stem(rng, rng.choice((1, 2, 3))).lower()


def _facts(n: int, fillers: Sequence[str], rng: random.Random) -> Hidden:
    """Paragraphs about two or three subjects with names alike, or their sentences among others'."""
    about = told(2 if n < 4 else 3, rng)
    absent = list(about.unsaid)
    rng.shuffle(absent)
    if rng.random() < 0.3 and fillers:
        # Each sentence by itself: it must name its subject.
        return _inserted(list(about.sentences), fillers, absent, rng)
    rows = list(about.rows)
    rng.shuffle(rows)
    return Hidden(list(about.paragraphs), rows, absent)


def _inserted(hidden: list[tuple[str, Row]], fillers: Sequence[str], absent: list[str], rng: random.Random) -> Hidden:
    """Each sentence between two of a random filler."""
    parts = [sentences(filler) for filler in fillers]
    home = {}
    for sentence, row in hidden:
        at = rng.randrange(len(parts))
        parts[at].insert(rng.randint(0, len(parts[at])), sentence)
        home[row] = at
    passages = [" ".join(part) for part in parts]
    everything = folded("\n".join(passages))
    rows = [(row, at) for row, at in home.items() if everything.count(folded(row.answer)) == 1]
    rng.shuffle(rows)
    return Hidden(passages, [(row, at) for row, at in rows if stands_in(row.answer, everything)], absent)
