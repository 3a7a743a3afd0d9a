"""Text to hide something in: sentences about a valley that never was, and records of keys and values.

- a sentence is a template filled from word lists, so that two chunks of it are hardly ever alike;
- prose holds no number of more than three digits, records hold even keys and even values only: what is hidden among
  them (`needles`) is longer, or odd, and so stands there exactly once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable


def apart(phrases: str) -> tuple[str, ...]:
    """Phrases with a bar between them."""
    return tuple(phrases.split("|"))


WHO = apart(
    "the baker|a retired pilot|the night porter|two surveyors|the youngest gardener|a visiting choir|"
    "the bell founder|our neighbour|the toll keeper|a student of geology|the ferry crew|the tailor's cousin|"
    "a quiet stranger|the orchard warden|the clockmaker|an old shepherd|the postmistress|a group of cyclists|"
    "the new librarian|the carpenter|a travelling dentist|the mayor's driver|three apprentices|the fishmonger|"
    "a painter of signs|the weather observer|the stationmaster|a beekeeper|the miller's daughter|"
    "the village doctor|a pair of masons|the harbour pilot"
)
DID = apart(
    "repaired the garden gate|counted the empty barrels|carried a ladder home|read the newspaper aloud|"
    "planted a row of beans|sharpened every knife|sorted the winter blankets|drew a map of the footpaths|"
    "waited for the afternoon bus|painted the shutters green|cleaned the long windows|tuned the upright piano|"
    "bought a basket of pears|folded the market tents|looked for a lost glove|swept the upper landing|"
    "hung lanterns along the wall|mended a torn sail|weighed the last of the wool|tasted the new cheese|"
    "borrowed a wheelbarrow|wrote a long letter|stacked the firewood|fed the geese|oiled the rusty hinges|"
    "listened to the brass band|measured the width of the stream|caught a large trout|hid the ripe plums|"
    "closed the shop early|brewed a pot of tea|lost a game of draughts"
)
WHERE = apart(
    "behind the mill|near the old quarry|on the lower terrace|beside the chapel|at the edge of the reservoir|"
    "under the railway arch|in the back room|across from the bakery|along the towpath|above the boathouse|"
    "next to the tannery|by the stone bridge|inside the long barn|at the crossroads|outside the town hall|"
    "between the greenhouses|on the eastern slope|in the walled garden|below the viaduct|"
    "at the top of the stairs|around the duck pond|in the empty theatre|on the slipway|beyond the nettles"
)
WHEN = apart(
    "before breakfast|late in the evening|on a windy Tuesday|soon after the thaw|during the long break|"
    "at first light|while it rained|in the middle of harvest|on market day|just before midnight|"
    "after the concert|that same week|towards the end of spring|on the way home|when the lamps were lit|"
    "shortly after noon|during the fair|in the dry month|as the fog lifted|on the second Sunday|"
    "between two showers|once the tide had turned"
)
WHY = apart(
    "because the rain had stopped|since nobody else would|although it was far too late|to please the children|"
    "as the almanac advised|in spite of the cold|without telling anyone|because a cousin had asked|"
    "for want of anything better|to settle an old bet|as they did every year|because the road was closed|"
    "out of plain curiosity|to pass the time|since the roof was leaking|against all advice"
)
WEATHER = apart(
    "the wind came from the north|clouds hung over the ridge|the river was unusually low|frost covered the lawns|"
    "the air smelled of apples|snow lay on the hills|it was warm for the season|thunder rolled in the distance|"
    "the sun stood low|mist filled the valley|hail had flattened the barley|not a leaf was moving|"
    "the first swallows were back|the ice on the pond was thin"
)
THINGS = apart(
    "crates of oranges|wooden chairs|rolls of felt|sacks of oats|painted tiles|copper kettles|bundles of reeds|"
    "wicker baskets|jars of honey|old postcards|clay pipes|woollen socks|coils of rope|tin whistles|candles|"
    "spare buttons|horseshoes|glass floats|bricks|umbrellas|flower pots|music stands|oars|sheets of cork"
)
OPINION = apart(
    "nobody found this strange|the story was soon forgotten|opinions differed about it|"
    "it made the children laugh|few people remember it now|this was thought to bring luck|"
    "the innkeeper shook his head|a small crowd gathered|the dog took no notice|someone made a drawing of it|"
    "it was talked of for weeks|that was the end of the matter"
)
FEW = apart("two|three|four|five|six|seven|nine|eleven")
TEMPLATES = apart(
    "{who} {did} {where} {when}|{when}, {who} {did} {why}|{weather}, and {who} {did} {where}|"
    "{who} and {who} {did}, {why}|there were {n} {things} {where}, and {who} {did}|"
    "of the {n} {things} {where}, only {few} were ever used|{who} {did} {when}, but {opinion}|"
    "{when}, {n} {things} were brought out, and {opinion}|nobody saw that {who} {did} {where}|"
    "{who} said that {weather}, {why}|while {who} {did}, {who} {did} {where}|"
    "for {few} days {weather}, until {who} {did}|{where}, {who} once {did}, and {opinion}|"
    "whenever {weather}, {who} went to look for {things}"
)
LISTS = {
    "who": WHO,
    "did": DID,
    "where": WHERE,
    "when": WHEN,
    "why": WHY,
    "weather": WEATHER,
    "things": THINGS,
    "opinion": OPINION,
    "few": FEW,
}
ANIMALS = apart(
    "heron|otter|lynx|badger|falcon|marten|plover|stoat|curlew|beaver|magpie|weasel|osprey|hedgehog|sparrow|tern|"
    "pike|salmon|robin|adder|ibis|gannet|puffin|walrus|bison|moose|finch|eel|crane|newt"
)

# One more sentence of a filler.
Sentence = Callable[[random.Random], str]


def prose(random_words: random.Random) -> str:
    """A sentence of the valley."""

    def word(slot: re.Match[str]) -> str:
        if slot[1] == "n":
            return str(random_words.randint(12, 980))
        return random_words.choice(LISTS[slot[1]])

    sentence = re.sub(r"\{(\w+)\}", word, random_words.choice(TEMPLATES))
    return f"{sentence[0].upper()}{sentence[1:]}."


def records(random_words: random.Random) -> str:
    """A record with an even key and an even value."""
    return record(random_key(random_words, odd=False), random_digits(random_words, 6, odd=False))


def record(key: str, value: str) -> str:
    """One line of a list of records."""
    return f"Entry {key} holds {value}."


def random_key(random_words: random.Random, *, odd: bool) -> str:
    """An animal and a number of three digits: otter-417."""
    return f"{random_words.choice(ANIMALS)}-{random_digits(random_words, 3, odd=odd)}"


def random_digits(random_words: random.Random, n: int, *, odd: bool) -> str:
    """A number of n digits (2 or more) that does not begin with 0."""
    number = random_words.randrange(10 ** (n - 1), 10**n, 2)
    return str(number + odd)
