"""What is hidden in a haystack and asked for: passkeys, numbers, values of keys, one needle of several.

- "passkey": five digits that belong to a place, in prose;
- "number": ten digits that belong to a thing, in prose;
- "key_value": the value of one record among records of the same form;
- "multi": a passkey of one place in prose that also holds those of other places.

All texts are ours; the tasks are in the spirit of RULER's (arXiv 2404.06654) and InfiniteBench's (arXiv 2402.13718).
"""

from __future__ import annotations

import random
from typing import NamedTuple

from pdllm_rag.evaluation.filler import Sentence, apart, prose, random_digits, random_key, record, records

PLACES = apart(
    "north gate|boat shed|archive|upper cellar|signal tower|ice house|seed vault|map room|west stairs|"
    "glass house|pump station|tithe barn|watch room|salt store|reading room|bell loft|cable hut|rope walk|"
    "strong room|dry dock|lamp room|weir house|tea pavilion|tool shed"
)
OWNERS = apart(
    "red|grey|folding|Danish|brass|second|leather|striped|heavy|spare|silver|wooden|borrowed|round|tall|patched"
)
OBJECTS = apart(
    "telescope|bicycle|typewriter|barometer|cello|sewing machine|compass|suitcase|ledger|stove|microscope|"
    "gramophone|violin|theodolite|printing press|diving helmet"
)
N_RIVALS = 3  # needles of the same form beside the one that is asked for


class Needle(NamedTuple):
    """A sentence to hide, and the question that its value answers."""

    sentence: str
    question: str
    value: str


class Task(NamedTuple):
    """One kind of needle and what it lies in."""

    filler: Sentence
    has_rivals: bool = False


TASKS = {
    "passkey": Task(prose),
    "number": Task(prose),
    "key_value": Task(records),
    "multi": Task(prose, has_rivals=True),
}


def make_needle(task: str, random_words: random.Random) -> Needle:
    """A needle of a task; equal generators give equal needles.

    Raises:
        ValueError: an unknown task.
    """
    if task == "passkey":
        return _passkey(random_words.choice(PLACES), random_digits(random_words, 5, odd=True))
    if task == "multi":
        return _passkey(random_words.choice(PLACES[::2]), random_digits(random_words, 5, odd=True))
    if task == "number":
        name = f"{random_words.choice(OWNERS)} {random_words.choice(OBJECTS)}"
        value = random_digits(random_words, 10, odd=True)
        sentence = f"The serial number of the {name} is {value}."
        return Needle(sentence, f"What is the serial number of the {name}?", value)
    if task == "key_value":
        key, value = random_key(random_words, odd=True), random_digits(random_words, 6, odd=True)
        return Needle(record(key, value), f"What does entry {key} hold?", value)
    raise ValueError(f"task is {task!r}; expected one of {', '.join(TASKS)}")


def rivals(task: str, random_words: random.Random) -> list[str]:
    """Sentences that lie in the haystack beside the needle: of other places than any needle's."""
    if not TASKS[task].has_rivals:
        return []
    places = random_words.sample(PLACES[1::2], N_RIVALS)
    return [_passkey(place, random_digits(random_words, 5, odd=False)).sentence for place in places]


def _passkey(place: str, value: str) -> Needle:
    return Needle(f"The pass key of the {place} is {value}.", f"What is the pass key of the {place}?", value)
