"""Questions over made-up documents, whose answer is one stated fact, or has to be joined from two.

Each question has its own people, companies and cities: "X works at Y", "Y is in Z", for three of each. The kinds ask
over the same facts, so that questions of one number are pairs:

- "twohop": every fact in a document of its own; "In which city does X work?";
- "onehop": the same documents; "In which city is Y?": the control, with the same answer;
- "together": the two facts of each person in one document; the question of "twohop": what a reader that joins facts
  within a chunk can get.

All names are put together from lists and stand nowhere else in a question's documents. The texts are ours; the form
is that of the compositional questions of 2WikiMultihopQA (arXiv 2011.01060).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from pdllm_rag.evaluation.filler import FEW, apart, prose
from pdllm_rag.evaluation.qa import Question

KINDS = ("twohop", "onehop", "together")
N_CHAINS = 3  # one is asked for

FORENAMES = apart("Agnes|Bruno|Clara|Dmitri|Edith|Felix|Greta|Hugo|Irma|Jasper|Lydia|Magnus|Nora|Oscar|Paula|Rufus")
SURNAMES = apart("Ash|Bell|Crane|Drake|Finch|Green|Hart|Lamb|Marsh|Nash|Reed|Snow|Stone|Thorn|Wolf|Young")
COMPANIES = apart(
    "Anchor|Beacon|Comet|Dragon|Eagle|Falcon|Granite|Horizon|Jupiter|Lantern|Mercury|Neptune|Orchid|Phoenix"
)
TRADES = apart("Optics|Foundry|Shipping|Instruments|Textiles|Printing|Brewery|Ceramics|Clocks|Timber")
COLOURS = apart("Amber|Copper|Crystal|Elm|Garden|Golden|Iron|Maple|Pearl|River|Silver|Summer|Winter|Willow")
PLACES = apart("Bay|Bridge|Creek|Falls|Grove|Harbor|Hill|Island|Lake|Point|Springs|Valley")
WORKS = apart(
    "{person} works at {company}.|{person} has worked at {company} for {few} years.|"
    "For {few} years now {person} has worked at {company}."
)
STANDS = apart(
    "{company} is in the city of {city}.|The offices of {company} are in {city}.|{company} has its workshops in {city}."
)


class Chain(NamedTuple):
    """Two facts that share a company."""

    person: str
    company: str
    city: str


def make_question(kind: str, number: int, *, seed: int = 0) -> Question:
    """One question; its context has the documents that hold its facts first, then the others.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind of generated questions is {kind!r}; expected one of {', '.join(KINDS)}")
    random_words = random.Random(f"{seed} {number}")
    chains = _chains(random_words)
    documents = []
    for chain in chains:
        facts = [_around(random_words, random_words.choice(forms), chain) for forms in (WORKS, STANDS)]
        documents += [" ".join(facts)] if kind == "together" else facts
    asked = chains[0]
    text = f"In which city is {asked.company}?" if kind == "onehop" else f"In which city does {asked.person} work?"
    return Question(f"{kind}-{number:05d}", text, "answerable", (asked.city,), (), tuple(documents))


def _chains(random_words: random.Random) -> list[Chain]:
    """Chains of which no two share a word of a name."""

    def names(*parts: Sequence[str]) -> list[str]:
        drawn = [random_words.sample(words, N_CHAINS) for words in parts]
        return [" ".join(words) for words in zip(*drawn, strict=True)]

    people, companies, cities = names(FORENAMES, SURNAMES), names(COMPANIES, TRADES), names(COLOURS, PLACES)
    return [Chain(*some) for some in zip(people, companies, cities, strict=True)]


def _around(random_words: random.Random, form: str, chain: Chain) -> str:
    """A fact between two sentences of filler."""
    fact = form.format(**chain._asdict(), few=random_words.choice(FEW))
    return f"{prose(random_words)} {fact} {prose(random_words)}"
