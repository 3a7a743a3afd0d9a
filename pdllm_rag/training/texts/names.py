"""Names, codes and numbers that nobody has read before."""

from __future__ import annotations

import random

from pdllm_rag.training.texts.words import apart

_ONSETS = apart("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh sk st t th tr v w z")
_VOWELS = apart("a e i o u a e i o ai ea ei ou")
_CODAS = apart("l m n r s t ck nd rn lt ss x sk th")
_FIRST = apart(
    "Anna Omar Lucia Peter Mei Samuel Ingrid Tomas Farah Julian Nadia Victor Clara Hassan Elena Marcus Yuki Daniel "
    "Priya Oscar Leila Anton Grace Mateo Sonia Felix Amara Henrik Rosa Karim Judith Pavel Zoe Isaac Marta Dmitri"
)
_LAST_ENDS = apart("son man er ley ski ova wood berg ini ez ell ard ow ey")
_PLACE_ENDS = apart("ford ham ton wick holm stad burg ville mouth by port field dale grad ia ona")
_COMPANY_ENDS = apart("Works|Labs|Group|& Sons|Freight|Foods|Systems|Instruments|Holdings|Textiles|Optics|Motors")
_ALIKE = ("0123456789", "aeiou", "ABCDEFGHKMNPRT", "bcdfgklmnprst")
_HEX = "0123456789abcdef"
_SIGNS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
MONTHS = apart("January February March April May June July August September October November December")


def stem(rng: random.Random, n_syllables: int = 1) -> str:
    """Syllables with a capital in front."""
    made = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(n_syllables)) + rng.choice(_CODAS)
    return made.capitalize()


def surname(rng: random.Random) -> str:
    """One word."""
    return stem(rng, rng.choice((1, 1, 2))) + rng.choice(_LAST_ENDS)


def person(rng: random.Random) -> str:
    """First name and surname."""
    first = rng.choice(_FIRST) if rng.random() < 0.7 else stem(rng, 1) + rng.choice("aeio")
    return f"{first} {surname(rng)}"


def place(rng: random.Random) -> str:
    """A town."""
    name = stem(rng, rng.choice((1, 2))) + rng.choice(_PLACE_ENDS)
    return f"{rng.choice(('Port', 'New', 'East', 'Upper', 'Lake'))} {name}" if rng.random() < 0.15 else name


def company(rng: random.Random) -> str:
    """A firm."""
    return f"{stem(rng, rng.choice((1, 2)))} {rng.choice(_COMPANY_ENDS)}"


def twin(name: str, rng: random.Random) -> str:
    """A name that begins with the same word, or has one sign in another place or form."""
    if " " in name and name.replace(" ", "").isalpha() and rng.random() < 0.6:
        return f"{name.split()[0]} {surname(rng)}"
    inner = [at for at in range(1, len(name)) if name[at].isalnum()]
    at = rng.choice(inner)
    pool = next((signs for signs in _ALIKE if name[at] in signs), _ALIKE[-1])
    return f"{name[:at]}{rng.choice([sign for sign in pool if sign != name[at]])}{name[at + 1 :]}"


def digits(rng: random.Random, n: int) -> str:
    """A number of so many digits that does not begin with 0."""
    return str(rng.randrange(10 ** (n - 1), 10**n))


def number(rng: random.Random) -> str:
    """4 to 12 digits, a few of them grouped."""
    made = digits(rng, rng.randint(4, 12))
    form = rng.random()
    if form < 0.1:
        return f"{int(made):,}"
    if form < 0.2:
        return "-".join(made[at : at + 3] for at in range(0, len(made), 3))
    return made


def code(rng: random.Random) -> str:
    """8 to 32 hexadecimal digits, a UUID, signs with dashes, or a word with digits."""
    form = rng.randrange(5)
    if form == 0:
        return "".join(rng.choices(_HEX, k=rng.choice((8, 8, 10, 12, 16, 24, 32))))
    if form == 1:
        return "-".join("".join(rng.choices(_HEX, k=k)) for k in (8, 4, 4, 4, 12))
    if form == 2:
        return "-".join("".join(rng.choices(_SIGNS, k=rng.randint(2, 4))) for _ in range(rng.randint(2, 4)))
    if form == 3:
        return f"{stem(rng, rng.choice((1, 2))).lower()}-{digits(rng, rng.randint(2, 5))}"
    return "".join(rng.choices(_SIGNS + _SIGNS.lower(), k=rng.randint(8, 14)))


def date(rng: random.Random) -> str:
    """A day of the years 1820 to 2030."""
    day, month, year = rng.randint(1, 28), rng.choice(MONTHS), rng.randint(1820, 2030)
    return rng.choice((f"{day} {month} {year}", f"{month} {day}, {year}"))
