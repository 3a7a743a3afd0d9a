"""Samples drawn from a corpus by a recipe."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from pdllm_rag.training.texts import clozes, quotes, refusals
from pdllm_rag.training.texts.corpus import Corpus, Row
from pdllm_rag.training.texts.draft import Draft, Part, window
from pdllm_rag.training.texts.hidden import hide
from pdllm_rag.training.texts.lexicon import Lexicon
from pdllm_rag.training.texts.recipe import REFUSED, SYNTHETIC, Recipe
from pdllm_rag.training.texts.sample import Exchange, Kind, Sample
from pdllm_rag.training.texts.swaps import swap
from pdllm_rag.training.texts.words import content, folded, sentences, stands_in

_PASSAGES = (3, 8)  # fewest and most in a sample
_FIRST = 0.6  # of the characters, at most, for the first passage
_MIN_WINDOW = 280  # characters that a passage is never cut below
_N_INVERTED = 12  # sentences that half of the clozes look through for an inverted question
_CUT = 0.35  # of near-miss questions: of a passage whose answer was taken out
_RECURRING = 0.4  # of clozes: by another sentence with the same span
_OWN = 0.35  # of samples with a near-miss question: a passage that such questions were written for
_FILLER_CHARS = (220, 650)
_N_TRIES = 4  # of another kind where a sample has nothing for the one drawn
_UNSURE = 0.7  # weight of a question made unanswerable by rule, which may still hold


class _Weighted(NamedTuple):
    """Indices to draw from, and their summed weights."""

    indices: tuple[int, ...]
    summed: tuple[float, ...]

    @classmethod
    def of(cls, weights: Mapping[int, float]) -> _Weighted:
        kept = {index: weight for index, weight in weights.items() if weight > 0}
        return cls(tuple(kept), tuple(accumulate(kept.values())))

    def draw(self, rng: random.Random) -> int:
        return self.indices[bisect(self.summed, rng.random() * self.summed[-1])]


class Mixture:
    """A recipe over a corpus: `sample` is a function of the two and of the generator's state.

    Kinds that the corpus has no texts for are left out, the others keep their proportions.

    Raises:
        ValueError: the corpus holds no text, or none for any kind of the recipe.
    """

    def __init__(self, corpus: Corpus, recipe: Recipe | None = None) -> None:
        self.corpus, self.recipe = corpus, recipe or Recipe()
        passages = corpus.passages
        weigh = [self.recipe.source_weight(passage.source) for passage in passages]
        self._asked = _Weighted.of({at: weigh[at] * min(len(one.rows), 5) for at, one in enumerate(passages)})
        self._read = self._asked if self._asked.indices else _Weighted.of(dict.fromkeys(range(len(passages)), 1.0))
        self._free = _Weighted.of(
            {at: float(sum(min(len(row.answer), 200) for row in one.free)) for at, one in enumerate(passages)}
        )
        self._missing = _Weighted.of({at: float(min(len(one.misses), 4)) for at, one in enumerate(passages)})
        self._sentences = [one for one in corpus.evidence if _speaks_of(one.sentence, one.question)]
        self.shares = self._supplied()
        self._lexicon = Lexicon(corpus)
        synthetic = sum(share for kind, share in self.shares.items() if kind in SYNTHETIC)
        refused = sum(share for kind, share in self.shares.items() if kind in REFUSED)
        self._refusals = refused / sum(self.shares.values())
        rest = sum(self.shares.values()) - refused
        self._synthetic = synthetic / rest if rest else 0.0

    def sample(self, rng: random.Random) -> Sample:
        """The next sample that the generator leads to."""
        if rng.random() < self._synthetic:
            return self._made_up(rng)
        return self._real(rng)

    def _supplied(self) -> dict[Kind, float]:
        corpus = self.corpus
        if not corpus.n_texts:
            raise ValueError("the corpus holds no text; give it rows of questions or prose")
        questions = bool(self._asked.indices or self._sentences)
        supplied: dict[Kind, bool] = {
            "qa": bool(self._asked.indices),
            "likelihood": questions,
            "free": bool(self._free.indices),
        }
        shares = {kind: share for kind, share in self.recipe.shares.items() if share and supplied.get(kind, True)}
        if not shares:
            raise ValueError(f"the corpus has nothing for {', '.join(self.recipe.shares)}; give other shares or texts")
        return shares

    def _kinds(self, others: Callable[[Kind], bool], rng: random.Random) -> list[Kind]:
        """Kinds for a sample: as many refused ones as the recipe asks for everywhere, and others."""
        n = rng.randint(*self.recipe.exchanges)
        return [
            self._draw((lambda kind: kind in REFUSED) if rng.random() < self._refusals else others, rng)
            for _ in range(n)
        ]

    def _draw(self, among: Callable[[Kind], bool], rng: random.Random) -> Kind:
        kinds = [kind for kind in self.shares if among(kind)]
        return rng.choices(kinds, [self.shares[kind] for kind in kinds])[0]

    # Samples of real text

    def _real(self, rng: random.Random) -> Sample:
        kinds = self._kinds(_is_real, rng)
        draft = self._draft(kinds, rng)
        self._swap(draft, rng)
        exchanges, waiting = [], []
        for kind in kinds:
            made = None
            if kind == "near-miss" and rng.random() < _CUT:
                made = self._refused(kind, refusals.cut(draft, rng), rng)
            elif kind == "cloze" and rng.random() < _RECURRING:
                made = self._recurring(draft, rng)
            if made:
                exchanges.append(made)
            else:
                waiting.append(kind)
        # What one of them took out may have been another one's answer.
        exchanges = [one for one in exchanges if one.passage is None or one.answer in draft.parts[one.passage].text]
        asking = _Asking(self, draft, rng)
        for kind in waiting:
            tries = [kind, *(self._draw(_is_real, rng) for _ in range(_N_TRIES))]
            said = {exchange.question for exchange in exchanges}
            new = next((made for each in tries if (made := asking.ask(each)) and made.question not in said), None)
            exchanges += [new] if new else []
        rng.shuffle(exchanges)
        return Sample(tuple(part.text for part in draft.parts), tuple(exchanges))

    def _draft(self, kinds: Sequence[Kind], rng: random.Random) -> Draft:
        """Passages up to a random length in random order."""
        recipe = self.recipe
        limit = rng.randint(recipe.min_chars, recipe.max_chars)
        draft = Draft([])
        if "free" in kinds and self._free.indices:
            draft.parts.append(Part.of_passage(self.corpus.passages[self._free.draw(rng)], limit, rng))
        if "near-miss" in kinds and self._missing.indices and rng.random() < _OWN:
            draft.parts.append(Part.of_passage(self.corpus.passages[self._missing.draw(rng)], limit, rng))
        if "quote" in kinds and self._sentences and rng.random() < 0.5:
            draft.parts.append(self._evidence(rng))
        used = sum(len(part.text) for part in draft.parts)
        for _ in range(4 * _PASSAGES[1]):
            missing = _PASSAGES[0] - len(draft.parts)
            if (missing <= 0 and used >= limit - _MIN_WINDOW) or len(draft.parts) == _PASSAGES[1]:
                break
            share = _FIRST if not draft.parts else 1 / max(1, missing)
            part = self._next(draft, max(_MIN_WINDOW, min(recipe.max_passage_chars, int(share * (limit - used)))), rng)
            if (used + len(part.text) <= limit or missing > 0) and not draft.overlaps(part.text):
                draft.parts.append(part)
                used += len(part.text)
        rng.shuffle(draft.parts)
        return draft

    def _next(self, draft: Draft, limit: int, rng: random.Random) -> Part:
        """Another passage of at most so many characters: a whole one if one of a few is short enough."""
        corpus, drawn = self.corpus, rng.random()
        if self._sentences and (drawn < self.recipe.evidence or not (self._asked.indices or corpus.prose)):
            return self._evidence(rng)
        if corpus.prose and (drawn > 1 - self.recipe.prose or not self._asked.indices):
            return Part(window(rng.choice(corpus.prose), [], limit, rng))
        near: list[int] = []
        if draft.parts and rng.random() < self.recipe.alike:
            near = [at for at in self._lexicon.neighbours(draft.parts[0].text) if corpus.passages[at].rows]
            near = [at for at in near if not draft.overlaps(corpus.passages[at].text)]
        for _ in range(_N_TRIES):
            at = rng.choice(near) if near else self._read.draw(rng)
            if len(corpus.passages[at].text) <= limit:
                break
        return Part.of_passage(corpus.passages[at], limit, rng)

    def _evidence(self, rng: random.Random) -> Part:
        chosen = [rng.choice(self._sentences) for _ in range(rng.randint(3, 5))]
        return Part.of_evidence(
            chosen,
            lambda question, sentence: clozes.short_answer(question, sentence, self._lexicon),
            rng.choice((" ", " ", "\n")),
        )

    def _swap(self, draft: Draft, rng: random.Random) -> None:
        for part in draft.parts:
            if not part.rows or rng.random() >= self.recipe.swapped:
                continue
            whole = [text for one in draft.parts for text in one.texts()]
            for row in rng.sample(part.rows, min(len(part.rows), _N_TRIES)):
                change = swap(row.question, row.answer, whole, self._lexicon, rng)
                if change and all(change(one.answer) in change(p.text) for p in draft.parts for one in p.rows):
                    for one in draft.parts:
                        one.change(change)
                    break

    def _recurring(self, draft: Draft, rng: random.Random) -> Exchange | None:
        places = [(at, sentence) for at, part in enumerate(draft.parts) for sentence in sentences(part.text)]
        for at, sentence in rng.sample(places, min(len(places), 6)):
            rest = draft.parts[at].without([sentence])
            if rest is None:
                continue
            others = [rest.text if place == at else part.text for place, part in enumerate(draft.parts)]
            row = clozes.recurring(sentence, others, self._lexicon, rng)
            for holder, text in enumerate(others):
                if row and row.answer in text and stands_in(row.answer, folded(text)):
                    draft.parts[at] = rest
                    return Exchange("cloze", row.question, row.answer, holder)
        return None

    def _refused(self, kind: Kind, question: str | None, rng: random.Random, weight: float = 1.0) -> Exchange | None:
        weight *= self.recipe.refused_weight
        return Exchange(kind, typed(question, rng), self.recipe.not_found, None, weight) if question else None

    def _any_row(self, rng: random.Random) -> Row:
        """Any question with its answer."""
        corpus = self.corpus
        if self._asked.indices and rng.random() < 0.7:
            return rng.choice(corpus.passages[self._asked.draw(rng)].rows)
        if self._sentences and rng.random() < 0.7:
            one = rng.choice(self._sentences)
            return Row(one.question, one.sentence)
        return rng.choice(hide(rng.choice(SYNTHETIC), 2, [""], rng).rows)[0]

    # Samples of made-up text

    def _made_up(self, rng: random.Random) -> Sample:
        kinds = self._kinds(_is_synthetic, rng)
        present = list(dict.fromkeys(kind for kind in kinds if kind in SYNTHETIC))
        present = present or [self._draw(_is_synthetic, rng)]
        passages: list[str] = []
        rows: dict[Kind, list[tuple[Row, int]]] = {}
        absent: list[str] = []
        for kind in present:
            n_fillers = max(1, rng.randint(3, 5) // len(present))
            made = hide(kind, kinds.count(kind), [self._filler(rng) for _ in range(n_fillers)], rng)
            rows[kind] = [(row, at + len(passages)) for row, at in made.rows]
            passages += made.passages
            absent += made.absent
        while len(passages) < _PASSAGES[0]:
            passages.append(self._filler(rng))
        order = rng.sample(range(len(passages)), len(passages))
        exchanges: list[Exchange] = []
        rng.shuffle(absent)
        for kind in kinds:
            if kind == "near-miss" and absent:
                exchanges.append(Exchange(kind, absent.pop(), self.recipe.not_found, None))
            elif kind == "not-found":
                draft = Draft([Part(passage) for passage in passages])
                foreign = self._refused(kind, refusals.foreign(draft, self._any_row, self._lexicon, rng), rng)
                exchanges += [foreign] if foreign else []
            elif rows.get(kind):
                row, at = rows[kind].pop()
                exchanges.append(Exchange(kind, row.question, row.answer, order.index(at)))
        return Sample(tuple(passages[at] for at in order), tuple(exchanges))

    def _filler(self, rng: random.Random) -> str:
        corpus = self.corpus
        pools: list[Callable[[], str]] = []
        if corpus.passages:
            pools.append(lambda: rng.choice(corpus.passages).text)
        if corpus.prose:
            pools.append(lambda: rng.choice(corpus.prose))
        text = rng.choice(pools)() if pools else " ".join(one.sentence for one in rng.choices(self._sentences, k=4))
        return window(text, [], rng.randint(*_FILLER_CHARS), rng)


class _Asking:
    """What is asked of a draft, each question once."""

    def __init__(self, mixture: Mixture, draft: Draft, rng: random.Random) -> None:
        self._mixture, self._draft, self._rng = mixture, draft, rng
        self._lexicon = mixture._lexicon
        self._rows = draft.rows()
        self._quotes = [(row, at) for at, part in enumerate(draft.parts) for row in part.quotes]
        self._free = [(row, at) for at, part in enumerate(draft.parts) for row in part.free]
        for rows in (self._rows, self._quotes, self._free):
            rng.shuffle(rows)
        self._likely = self._rows + self._quotes
        rng.shuffle(self._likely)

    def ask(self, kind: Kind) -> Exchange | None:
        """An exchange of a kind, or None where the draft has nothing for it (any more)."""
        rng, draft = self._rng, self._draft
        if kind == "near-miss":
            return self._near_miss()
        if kind == "not-found":
            question = refusals.foreign(draft, self._mixture._any_row, self._lexicon, rng)
            return self._mixture._refused(kind, question, rng)
        supply = {"qa": self._rows, "free": self._free, "likelihood": self._likely}.get(kind)
        if supply is not None:
            if not supply:
                return None
            row, at = supply.pop()
            return Exchange(kind, typed(row.question, rng), row.answer, at)
        at = rng.randrange(len(draft.parts))
        text = draft.parts[at].text
        row_made: Row | None = None
        if kind == "cloze":
            return self._cloze()
        if kind == "continuation":
            row_made = quotes.continued(text, rng)
        elif self._quotes and rng.random() < 0.6:
            asked, at = self._quotes.pop()
            row_made = quotes.quoted(asked.question, asked.answer, rng)
        elif rng.random() < 0.5:
            row_made = quotes.said_about(text, [part.text for part in draft.parts], self._lexicon, rng)
        elif draft.parts[at].rows:
            asked = rng.choice(draft.parts[at].rows)
            sentence = quotes.sentence_of(asked.answer, text)
            row_made = quotes.quoted(asked.question, sentence, rng) if sentence else None
        return Exchange(kind, row_made.question, row_made.answer, at) if row_made else None

    def _cloze(self) -> Exchange | None:
        """An inverted question if one of a few sentences gives one, else any form."""
        rng = self._rng
        places = [(one, at) for at, part in enumerate(self._draft.parts) for one in sentences(part.text)]
        drawn = rng.sample(places, min(len(places), _N_INVERTED if rng.random() < 0.5 else 1))
        for sentence, at in drawn:
            if row := clozes.inverted(sentence, self._lexicon, rng):
                return Exchange("cloze", typed(row.question, rng), row.answer, at)
        sentence, at = drawn[0]
        made = clozes.about(sentence, self._lexicon, rng)
        return Exchange("cloze", made.question, made.answer, at) if made else None

    def _near_miss(self) -> Exchange | None:
        rng, draft, mixture = self._rng, self._draft, self._mixture
        makers: list[tuple[Callable[[], str | None], float]] = [
            (lambda: refusals.own(draft, rng), 1.0),
            (lambda: refusals.mined(draft, mixture.corpus.passages, self._lexicon, rng), 1.0),
            (lambda: refusals.edited(draft, self._lexicon, rng), _UNSURE),
        ]
        rng.shuffle(makers)
        for make, weight in makers:
            if question := make():
                return mixture._refused("near-miss", question, rng, weight)
        return None


def _is_real(kind: Kind) -> bool:
    return kind not in SYNTHETIC and kind not in REFUSED


def _is_synthetic(kind: Kind) -> bool:
    return kind in SYNTHETIC


def _speaks_of(sentence: str, question: str) -> bool:
    """Whether a sentence shares two words with a question, or most of its few: it is understood by itself then."""
    asked = {word[:5] for word in content(question)}
    return len(asked & {word[:5] for word in content(sentence)}) >= min(2, len(asked))


def typed(question: str, rng: random.Random) -> str:
    """A question as people type it: now and then without a capital or a question mark."""
    drawn = rng.random()
    if drawn < 0.08 and question[1:2].islower():
        question = question[0].lower() + question[1:]
    return question.removesuffix("?") if 0.04 < drawn < 0.12 else question
