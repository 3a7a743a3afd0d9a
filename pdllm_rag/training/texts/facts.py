"""Subjects with made-up names and what is told of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from pdllm_rag.training.texts.corpus import Row
from pdllm_rag.training.texts.names import company, date, digits, person, place, stem, surname
from pdllm_rag.training.texts.words import apart

Make = Callable[[random.Random], str]


class Attribute(NamedTuple):
    """How a property is told ({s}: the subject or a pronoun) and asked for ({n}: the subject's name); {v}: value."""

    make: Make
    tells: str  # with bars between them
    asks: str

    def asked(self, name: str) -> list[str]:
        """All questions."""
        return [ask.format(n=name) for ask in apart(self.asks)]

    def ask(self, name: str, rng: random.Random) -> str:
        """One of them."""
        return rng.choice(self.asked(name))


class Told(NamedTuple):
    """Paragraphs, their sentences each by itself, and what they leave unsaid."""

    paragraphs: tuple[str, ...]
    rows: tuple[tuple[Row, int], ...]  # with the number of the paragraph
    sentences: tuple[tuple[str, Row], ...]
    unsaid: tuple[str, ...]  # questions


def _of(*options: str) -> Make:
    return lambda rng: rng.choice(options)


def _year(rng: random.Random) -> str:
    return str(rng.randint(1790, 2028))


def _amount(unit: str, low: int, high: int) -> Make:
    return lambda rng: f"{rng.randint(low, high):,} {unit}"


def _price(rng: random.Random) -> str:
    return f"{rng.choice('$€£')}{rng.randint(3, 4800):,}{rng.choice(('', '', '.50', '.95'))}"


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(1, 12)}:{rng.choice(('00', '15', '20', '30', '40', '45'))} {rng.choice(('a.m.', 'p.m.'))}"


_JOB = _of(
    "a geologist", "a violin maker", "a tax lawyer", "a pastry chef", "a harbour pilot", "a software tester",
    "a veterinarian", "a court interpreter", "a beekeeper", "a bridge engineer", "a radio host", "an archivist",
)  # fmt: skip
_HOBBY = _of(
    "chess", "ice swimming", "kite building", "falconry", "choir singing", "pottery", "rock climbing", "origami",
    "amateur radio", "fencing", "mushroom picking", "gliding", "calligraphy", "juggling", "model railways",
)  # fmt: skip
_MATERIAL = _of("oak", "recycled glass", "titanium", "bamboo", "cork", "brass", "wool felt", "carbon fibre", "granite")
_COLOUR = _of("dark green", "orange", "silver", "turquoise", "pale yellow", "crimson", "violet", "chalk white")

_SEAT = Attribute(
    place,
    "{s} is based in {v}|{s} has its head office in {v}|the headquarters of {s} are in {v}",
    "Where is {n} based?|In which town is the head office of {n}?",
)
SUBJECTS: dict[str, tuple[Make, str, tuple[Attribute, ...]]] = {
    "person": (
        person,
        "",
        (
            Attribute(
                date,
                "{s} was born on {v}|{v} is the day on which {s} was born",
                "When was {n} born?|What is {n}'s date of birth?|On which day was {n} born?",
            ),
            Attribute(
                place,
                "{s} lives in {v}|{s} has a house in {v}|{s} settled in {v}|home to {s} is {v}",
                "Where does {n} live?|In which town does {n} live?|Where is {n}'s home?",
            ),
            Attribute(
                company,
                "{s} works for {v}|{s} is employed by {v}|{s} has a job at {v}",
                "Who does {n} work for?|Which company employs {n}?|Where does {n} work?",
            ),
            Attribute(
                _JOB,
                "{s} is {v}|{s} trained as {v}|{s} earns a living as {v}",
                "What is {n}'s profession?|What does {n} do for a living?",
            ),
            Attribute(
                _HOBBY,
                "{s} spends every weekend on {v}|{s} is fond of {v}|{s} took up {v} years ago",
                "What is {n}'s hobby?|What does {n} like to do?",
            ),
            Attribute(
                person,
                "{s} is married to {v}|{s} shares a flat with {v}, whom everybody knows as the better half",
                "Who is {n} married to?|What is the name of {n}'s spouse?",
            ),
            Attribute(
                _year,
                "{s} finished school in {v}|{s} graduated in {v}|the class of {v} counted {s} among its best",
                "When did {n} finish school?|In what year did {n} graduate?",
            ),
        ),
    ),
    "firm": (
        company,
        "it",
        (
            Attribute(
                _year,
                "{s} was founded in {v}|{s} opened its doors in {v}|the history of {s} goes back to {v}",
                "When was {n} founded?|In which year did {n} begin?|How far back does {n} go?",
            ),
            _SEAT,
            Attribute(
                person,
                "{s} is run by {v}|{v} is the chief executive of {s}|since last year {v} has led {s}",
                "Who runs {n}?|Who is the chief executive of {n}?|Who leads {n}?",
            ),
            Attribute(
                _amount("people", 12, 9800),
                "{s} employs {v}|the staff of {s} counts {v}",
                "How many people does {n} employ?|How large is the staff of {n}?",
            ),
            Attribute(
                lambda rng: f"{rng.choice('$€£')}{rng.randint(2, 940)} million",
                "{s} had a turnover of {v}|last year {s} earned {v}",
                "What was the turnover of {n}?|How much did {n} earn last year?",
            ),
        ),
    ),
    "product": (
        lambda rng: f"{stem(rng)} {digits(rng, rng.choice((2, 3, 4)))}",
        "it",
        (
            Attribute(
                _price,
                "{s} costs {v}|{s} sells for {v}|the price of {s} is {v}",
                "How much does the {n} cost?|What is the price of the {n}?|{n} price?",
            ),
            Attribute(
                _amount("kilograms", 2, 940),
                "{s} weighs {v}|the scales show {v} for {s}",
                "How much does the {n} weigh?|What is the weight of the {n}?|How heavy is the {n}?",
            ),
            Attribute(
                date,
                "{s} went on sale on {v}|{s} was first shown on {v}",
                "When did the {n} come out?|When was the {n} first shown or sold?",
            ),
            Attribute(
                _MATERIAL,
                "{s} is made of {v}|the frame of {s} is {v}",
                "What is the {n} made of?|Which material is the {n} made of?",
            ),
            Attribute(
                _COLOUR,
                "{s} comes in {v}|{s} is painted {v}",
                "What colour is the {n}?|In which colour does the {n} come?",
            ),
            Attribute(
                person,
                "{s} was designed by {v}|{v} drew the first sketch of {s}",
                "Who designed the {n}?|Whose design is the {n}?",
            ),
        ),
    ),
    "event": (
        lambda rng: f"{surname(rng)} {rng.choice(('Festival', 'Regatta', 'Conference', 'Fair', 'Marathon', 'Summit'))}",
        "it",
        (
            Attribute(
                place,
                "{s} takes place in {v}|{s} is held in {v}|visitors travel to {v} for {s}",
                "Where is the {n} held?|Where does the {n} take place?",
            ),
            Attribute(
                date,
                "{s} begins on {v}|{s} opens on {v}",
                "When does the {n} begin?|On which date does the {n} open?",
            ),
            Attribute(
                _clock,
                "the doors open at {v}|everybody must be there by {v}",
                "At what time do the doors of the {n} open?|By when must one be at the {n}?",
            ),
            Attribute(
                _amount("visitors", 120, 96000),
                "{s} drew {v} last time|the organisers of {s} expect {v}",
                "How many visitors does the {n} have?|How many people come to the {n}?",
            ),
            Attribute(
                person,
                "{v} gives the opening speech at {s}|{s} is opened by {v}",
                "Who opens the {n}?|Who gives the opening speech at the {n}?",
            ),
        ),
    ),
    "river": (
        lambda rng: f"{stem(rng, rng.choice((1, 2)))} {rng.choice(('River', 'Lake', 'Glacier', 'Canal'))}",
        "it",
        (
            Attribute(
                _amount("kilometres", 14, 3900),
                "{s} is {v} long|{s} measures {v} from end to end",
                "How long is the {n}?|What is the length of the {n}?",
            ),
            Attribute(
                _amount("metres", 3, 460),
                "{s} is up to {v} deep|the greatest depth of {s} is {v}",
                "How deep is the {n}?|What is the greatest depth of the {n}?",
            ),
            Attribute(
                place,
                "{s} passes {v}|the largest town on {s} is {v}",
                "Which town lies on the {n}?|What is the largest town on the {n}?",
            ),
            Attribute(
                person,
                "{s} was mapped by {v}|{v} was the first to survey {s}",
                "Who mapped the {n}?|Who surveyed the {n} first?",
            ),
        ),
    ),
}


def told(n: int, rng: random.Random) -> Told:
    """So many subjects of one sort, some alike in name, and what is told of each.

    With firms stands somebody who works for one: the employer's seat is asked for across two paragraphs.
    """
    sort = rng.choice(sorted(SUBJECTS))
    make, pronoun, attributes = SUBJECTS[sort]
    named: list[str] = []
    while len(named) < n + 1:
        name = _alike(named[0], sort, rng) if named and rng.random() < 0.5 else make(rng)
        if name not in named:
            named.append(name)
    missing = named.pop()
    paragraphs, rows, by_itself = [], [], []
    unsaid = [attribute.ask(missing, rng) for attribute in attributes]
    for at, name in enumerate(named):
        said = rng.sample(attributes, rng.randint(2, len(attributes)))
        unsaid += [attribute.ask(name, rng) for attribute in attributes if attribute not in said]
        paragraph: list[str] = []
        for attribute in said:
            row = Row(attribute.ask(name, rng), attribute.make(rng))
            tell = rng.choice(apart(attribute.tells))
            subject = f"the {name}" if sort in ("product", "event", "river") else name
            is_known = bool(paragraph) and "of {s}" not in tell and rng.random() < 0.6
            short = (pronoun or name.split()[-1]) if is_known else subject
            paragraph.append(_tell(tell, short, row.answer))
            rows.append((row, at))
            if "{s}" in tell:
                by_itself.append((_tell(tell, subject, row.answer), row))
        paragraphs.append(" ".join(paragraph))
    seats = [(row, at) for row, at in rows if row.question in _SEAT.asked(named[at])]
    if seats:
        worker = person(rng)
        row, at = rng.choice(seats)
        paragraphs.append(f"{worker} works for {named[at]} as {_JOB(rng)}. {worker.split()[-1]} likes {_HOBBY(rng)}.")
        rows.append((Row(f"In which town is the company that {worker} works for based?", row.answer), at))
    return Told(tuple(paragraphs), tuple(rows), tuple(by_itself), tuple(unsaid))


def _alike(name: str, sort: str, rng: random.Random) -> str:
    """Another name with the first or (unless that is what a person is called by) the last word of this one."""
    first, _, last = name.partition(" ")
    if last.isdigit():
        return f"{first} {digits(rng, len(last))}"
    return f"{first} {surname(rng)}" if sort == "person" else f"{stem(rng, 2)} {last}"


def _tell(tell: str, subject: str, value: str) -> str:
    said = tell.format(s=subject, v=value)
    return f"{said[0].upper()}{said[1:]}{'' if said.endswith('.') else '.'}"
