"""Training texts: what is asked is answered where it says, what is refused is answered nowhere, draws repeat."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import chain

import pytest

from pdllm_rag.training.texts import Corpus, Mixture, Recipe, clozes, quotes, refusals
from pdllm_rag.training.texts.corpus import Evidence, Passage, Row
from pdllm_rag.training.texts.draft import Draft, Part
from pdllm_rag.training.texts.hidden import hide
from pdllm_rag.training.texts.lexicon import Lexicon
from pdllm_rag.training.texts.recipe import SHARES, SYNTHETIC
from pdllm_rag.training.texts.swaps import swap
from pdllm_rag.training.texts.words import folded, sentences, shingles, stands_in

TOWNS = ("Aldermoor", "Birkhaven", "Corrandale", "Dunsmere", "Eskerby", "Fallowick", "Garstone", "Hexlow")
PEOPLE = ("Mabel Thornquist", "Otto Brandvold", "Ines Calloway", "Rufus Pemberley", "Greta Ullswater", "Jonas Tidewell")
TRADES = ("rope", "glass", "cheese", "paper", "clock", "candle")


def town_passage(number: int) -> Passage:
    """A passage that is like its neighbours in form, and unlike them in every fact."""
    town, other = TOWNS[number % 8], TOWNS[(number + 3) % 8]
    person, trade, year = PEOPLE[number % 6], TRADES[(number // 2) % 6], 1401 + 13 * number
    text = (
        f"The {trade} works of {town} was founded by {person} in {year}. "
        f"It employed {40 + 7 * number} people at its best. "
        f"A canal joined {town} to {other}, where the finished goods were loaded on barges each spring. "
        f"Visitors to {town} may still see the old wheel house, which stands beside the parish church. "
        f"{person} was buried in {other} after a long illness, and the workshop passed to a nephew."
    )
    rows = (
        Row(f"Who founded the {trade} works of {town}?", person),
        Row(f"In what year was the {trade} works of {town} founded?", str(year)),
        Row(f"How many people did the {trade} works of {town} employ?", str(40 + 7 * number)),
    )
    misses = (f"Which king visited the wheel house of {town}?",)
    free = (Row(f"What became of the workshop of {town}?", "A nephew of the founder took it over."),)
    return Passage(text, "squad-towns" if number % 2 else "towns", rows, free, misses)


def evidence_of(number: int) -> Evidence:
    person, town = PEOPLE[number % 6], TOWNS[(number * 5) % 8]
    sentence = f"In {1802 + 3 * number}, {person} planted {12 + number} walnut trees on the north road of {town}."
    return Evidence(f"When did {person} plant trees on the north road of {town}?", sentence, "walks")


PROSE = tuple(
    f"The ferry of {town} leaves at dawn and carries mostly sheep. Nobody in {town} owns a clock that runs on time. "
    f"In {1750 + number} a storm took the bell of {town} into the lake. The smith of {TOWNS[number - 1]} made a new "
    f"one, and it rings a little flat to this day. Children are told that the old bell of {town} answers from below."
    for number, town in enumerate(TOWNS)
)
CORPUS = Corpus(tuple(map(town_passage, range(24))), tuple(map(evidence_of, range(24))), PROSE)
SAMPLES = [Mixture(CORPUS).sample(random.Random(f"7-{index}")) for index in range(400)]


def exchanges(*kinds: str) -> list[tuple]:
    found = [(sample, one) for sample in SAMPLES for one in sample.exchanges if not kinds or one.kind in kinds]
    assert found
    return found


def test_a_sample_depends_on_the_generator_alone() -> None:
    again = Mixture(Corpus(CORPUS.passages, CORPUS.evidence, CORPUS.prose))
    for index in (399, 0, 17, 17):
        assert again.sample(random.Random(f"7-{index}")) == SAMPLES[index]


def test_samples_are_the_same_under_another_hash_seed(tmp_path) -> None:
    prose = tmp_path / "prose.txt"
    prose.write_text("\n\n".join(PROSE))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "\n".join(json.dumps({"context": p.text, **row._asdict()}) for p in CORPUS.passages for row in p.rows)
    )
    code = (
        "import random, sys; from pdllm_rag.training.texts import Corpus, Mixture;"
        "m = Mixture(Corpus.read([sys.argv[1]]));"
        "print([m.sample(random.Random(f'1-{i}')) for i in range(40)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_answers_stand_in_the_passage_that_is_named() -> None:
    for sample, one in exchanges():
        if one.passage is not None and one.kind != "free":
            assert one.answer in sample.passages[one.passage], one
        assert one.question.strip()
        assert one.answer.strip()


def test_what_is_refused_names_no_passage_and_says_so() -> None:
    for _, one in exchanges():
        assert (one.passage is None) == (one.kind in ("near-miss", "not-found"))
        assert (one.passage is None) == (one.answer == Recipe().not_found)


def test_a_refused_question_of_the_corpus_has_its_answer_nowhere() -> None:
    answers = {row.question: row.answer for passage in CORPUS.passages for row in passage.rows}
    answers |= {one.question: one.sentence for one in CORPUS.evidence}
    mixture = Mixture(CORPUS, Recipe(shares={"near-miss": 2, "not-found": 1, "qa": 1}, swapped=0))
    known = [  # an edited question, of lower weight, may be another passage's by chance
        (sample, answers[one.question])
        for sample in (mixture.sample(random.Random(index)) for index in range(60))
        for one in sample.exchanges
        if one.passage is None and one.question in answers and one.weight == Recipe().refused_weight
    ]
    assert len(known) > 20
    for sample, answer in known:
        assert not stands_in(answer, folded("\n".join(sample.passages)))


def test_kinds_come_in_the_shares_asked_for() -> None:
    counts = Counter(one.kind for _, one in exchanges())
    for kind, share in SHARES.items():
        assert counts[kind] / counts.total() == pytest.approx(share, abs=0.035), kind


def test_a_recipe_of_few_kinds_gives_only_those() -> None:
    mixture = Mixture(CORPUS, Recipe(shares={"quote": 3, "key-value": 1}))
    counts = Counter(one.kind for index in range(200) for one in mixture.sample(random.Random(index)).exchanges)
    assert set(counts) == {"quote", "key-value"}
    assert counts["quote"] / counts.total() == pytest.approx(0.75, abs=0.08)


def test_the_long_recipe_asks_for_longer_answers() -> None:
    mixture = Mixture(CORPUS, Recipe.long())
    long = [one.answer for index in range(100) for one in mixture.sample(random.Random(index)).exchanges]
    short = [one.answer for _, one in exchanges()]
    assert sum(map(len, long)) / len(long) > 2 * sum(map(len, short)) / len(short)


def test_the_recipe_of_both_lies_halfway() -> None:
    both, short, long = (recipe.shares for recipe in (Recipe.both(), Recipe(), Recipe.long()))
    assert both["quote"] == pytest.approx((short["quote"] + long["quote"]) / 2)
    assert both["passkey"] == pytest.approx(short["passkey"] / 2)
    assert both.keys() == (short.keys() | long.keys()) - {"likelihood"}


@pytest.mark.parametrize(
    "corpus",
    [
        Corpus(CORPUS.passages),
        Corpus(evidence=CORPUS.evidence),
        Corpus(prose=PROSE),
        Corpus(CORPUS.passages[:1]),
        Corpus(
            tuple(Passage(passage.text, passage.source, free=passage.free) for passage in CORPUS.passages)
        ),  # answered in other words only
    ],
    ids=["questions", "evidence", "prose", "one passage", "other words"],
)
def test_a_corpus_of_one_sort_of_text_is_enough(corpus: Corpus) -> None:
    for index in range(60):
        sample = Mixture(corpus).sample(random.Random(index))
        assert sample.exchanges
        assert all(
            one.kind == "free" or one.passage is None or one.answer in sample.passages[one.passage]
            for one in sample.exchanges
        )


def test_a_corpus_without_texts_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no text"):
        Mixture(Corpus())
    with pytest.raises(ValueError, match="nothing for qa"):
        Mixture(Corpus(prose=PROSE), Recipe(shares={"qa": 1}))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shares": {"poem": 1}}, "poem"),
        ({"shares": {"qa": -1}}, "at least 0"),
        ({"shares": {"qa": 0}}, "above 0"),
        ({"min_chars": 10, "max_chars": 5}, "min_chars <= max_chars"),
        ({"exchanges": (0, 4)}, "fewest"),
    ],
)
def test_a_bad_recipe_says_what_is_wrong(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Recipe(**wrong)


@pytest.mark.parametrize("index", range(3))
def test_a_swap_is_the_same_everywhere(index: int) -> None:
    passage = town_passage(5)
    row = passage.rows[index]
    texts = [passage.text, *chain.from_iterable(passage.rows)]
    lexicon = Lexicon(CORPUS)
    made = [swap(row.question, row.answer, texts, lexicon, random.Random(seed)) for seed in range(20)]
    changed = [change for change in made if change]
    assert changed
    for change in changed:
        assert change(row.answer) != row.answer
        assert not stands_in(row.answer, folded(change(passage.text)))
        for other in passage.rows:
            assert change(other.answer) in change(passage.text)
        # Nothing else moves: as many words, and the same ones outside the answer.
        kept = set(re.findall(r"\w+", passage.text)) - set(re.findall(r"\w+", row.answer))
        assert kept <= set(re.findall(r"\w+", change(passage.text)))


@pytest.mark.parametrize("text", ["Lutherans followed Luther in 1520.", "The Lutheran church knew Luther."])
def test_a_name_that_others_give_away_is_not_swapped(text: str) -> None:
    texts = [text, "Who was it?", "Luther"]
    lexicon = Lexicon(Corpus((Passage(text + " We met Luther here, and Luther there.", ""),)))
    assert swap("Who was it?", "Luther", texts, lexicon, random.Random(0)) is None


def test_the_sentence_with_a_recurring_span_is_taken_out() -> None:
    mixture = Mixture(CORPUS, Recipe(shares={"cloze": 1}, swapped=0))
    originals = {one for passage in CORPUS.passages for one in sentences(passage.text)}
    n_taken = 0
    for index in range(80):
        sample = mixture.sample(random.Random(index))
        for one in sample.exchanges:
            whole = next((s for s in originals if _filled(one) == s), None)
            if whole and whole not in "\n".join(sample.passages):
                n_taken += 1
                assert one.answer in sample.passages[one.passage]
    assert n_taken > 10


def _filled(one) -> str:
    """The sentence that a cloze was, if it was a whole one."""
    text = one.question
    for lead in ("Fill in the blank: ", "Complete the sentence: ", "What is missing? ", "Fill the gap: "):
        text = text.removeprefix(lead)
    return re.sub(r"_{3,4}|\.\.\.|\[blank\]|\[\?\]", lambda _: one.answer, text, count=1)


def test_a_cut_passage_answers_no_longer() -> None:
    for index in range(20):
        draft = Draft([Part(one.text, list(one.rows)) for one in CORPUS.passages[index : index + 3]])
        answers = {row.question: row.answer for part in draft.parts for row in part.rows}
        before = draft.folded()
        question = refusals.cut(draft, random.Random(index))
        assert question
        assert stands_in(answers[question], before)
        assert not stands_in(answers[question], draft.folded())
        for part in draft.parts:
            assert all(row.answer in part.text for row in part.rows)


def test_a_mined_question_is_of_another_passage_and_has_no_answer_here(monkeypatch) -> None:
    monkeypatch.setattr(refusals, "_MIN_NEAR", 1.0)  # hardly a word is rare in so small a corpus
    answers = {row.question: row.answer for passage in CORPUS.passages for row in passage.rows}
    lexicon, n_made = Lexicon(CORPUS), 0
    for index in range(120):
        # Read without its questions: it can be told apart from one of the corpus by its text alone.
        draft = Draft([Part(one.text) for one in CORPUS.passages[index % 20 : index % 20 + 3]])
        asked = refusals.mined(draft, CORPUS.passages, lexicon, random.Random(index))
        if asked:
            n_made += 1
            assert not stands_in(answers[asked], draft.folded())
    assert n_made > 40


def test_an_edited_question_differs_from_the_one_that_is_answered() -> None:
    lexicon, n_made = Lexicon(CORPUS), 0
    for index in range(40):
        draft = Draft([Part(one.text, list(one.rows)) for one in CORPUS.passages[index % 20 : index % 20 + 3]])
        asked = {row.question for part in draft.parts for row in part.rows}
        made = refusals.edited(draft, lexicon, random.Random(index))
        n_made += made is not None
        assert made not in asked
    assert n_made > 20


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_hidden_things_are_found_and_absent_ones_are_not_told(kind) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        made = hide(kind, 4, list(PROSE[:3]), rng)
        assert made.rows
        assert made.absent
        asked = {row.question for row, _ in made.rows}
        assert asked.isdisjoint(made.absent)
        for row, at in made.rows:
            assert row.answer in made.passages[at]


def test_keys_of_records_are_told_apart() -> None:
    """No key stands in two records, and none that is said to be absent in any."""
    for seed in range(40):
        made = hide("key-value", 4, [], random.Random(seed))
        everything = "\n".join(made.passages)
        for row, _ in made.rows:
            assert len(re.findall(rf"(?<![\w-]){re.escape(row.answer)}(?![\w-])", everything)) == 1


@pytest.mark.parametrize(
    ("sentence", "question", "answer"),
    [
        ("The mill of Eskerby was closed in 1911.", "When was the mill of Eskerby closed?", "1911"),
        ("In 1844, the bridge was moved to Hexlow, where it stands.", "When was the bridge moved to Hexlow?", "1844"),
        ("The choir won a silver cup on 4 May 1962.", "When did the choir win a silver cup?", "4 May 1962"),
        ("Greta Ullswater founded a school of weaving.", "Who founded a school of weaving?", "Greta Ullswater"),
        ("The archive is located in Fallowick, near the station.", "Where is the archive located?", "Fallowick"),
        ("The valley has 14 chapels of grey stone.", "How many chapels does the valley have of grey stone?", "14"),
    ],
)  # fmt: skip
def test_plain_sentences_are_inverted(sentence: str, question: str, answer: str) -> None:
    assert clozes.inverted(sentence, Lexicon(CORPUS), random.Random(0)) == (question, answer)


@pytest.mark.parametrize("sentence", ["He was born in 1911.", "The mill that stood here was closed in 1911."])
def test_sentences_that_need_others_are_not_inverted(sentence: str) -> None:
    assert clozes.inverted(sentence, Lexicon(CORPUS), random.Random(0)) is None


@pytest.mark.parametrize(
    ("question", "sentence", "answer"),
    [
        ("When did the ferry start?", "The ferry started on 3 June 1888.", "3 June 1888"),
        ("When did the ferry start?", "It started in 1888, not in 1890.", None),
        ("How many boats sank?", "Of these, 31 boats sank.", "31"),
        ("How many boats sank?", "Some 31 sailors left the boats.", None),
        ("Who built the ferry?", "It was Otto Brandvold who built it.", "Otto Brandvold"),
        ("Why did it sink?", "It sank in 1888.", None),
    ],
)
def test_short_answers_are_taken_only_where_one_span_can_answer(question: str, sentence: str, answer) -> None:
    assert clozes.short_answer(question, sentence, Lexicon(CORPUS)) == answer


def test_what_is_said_about_a_name_is_all_of_it() -> None:
    lexicon, n_made = Lexicon(CORPUS), 0
    for seed in range(40):
        texts = [PROSE[seed % 8], CORPUS.passages[seed % 24].text]
        row = quotes.said_about(texts[0], texts, lexicon, random.Random(seed))
        if row:
            n_made += 1
            name = next(town for town in TOWNS if town in row.question)
            assert "\n".join(texts).count(name) == row.answer.count(name)
    assert n_made > 5


def test_sentences_end_where_they_end() -> None:
    text = 'Dr. E. Vale came at 5 p.m. to St. Ives. "Is it 3.5 miles?" she asked. See Fig. 2.\nIt was.'
    assert sentences(text) == [
        "Dr. E. Vale came at 5 p.m. to St. Ives.",
        '"Is it 3.5 miles?" she asked.',
        "See Fig. 2.",
        "It was.",
    ]


def write(path, rows) -> None:
    data = "\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_files_are_read_by_what_is_in_them(tmp_path) -> None:
    text = "A heron stood in the reeds. The heron had been ringed in 2011."
    write(
        tmp_path / "a.jsonl.gz",
        [
            {"context": text, "question": "When was it ringed?", "answer": "2011, ", "source": "birds"},
            {"context": text, "question": "Why did it stand there?", "answer": "It was fishing."},
            {"context": text, "question": "Who saw it?"},
            {"context": text, "instruction": "Where was the heron?", "response": "A heron stood in the reeds."},
        ],
    )
    paragraph = "The reeds are cut in winter and bundled by hand. " * 4
    (tmp_path / "b.txt").write_text(f"{paragraph.strip()}\n\n{paragraph.strip()}\n\nA heading\n\nShort.")
    corpus = Corpus.read([tmp_path])
    assert corpus.passages == (
        Passage(
            text,
            "birds",
            (Row("When was it ringed?", "2011"),),
            (Row("Why did it stand there?", "It was fishing."),),
            ("Who saw it?",),
        ),
    )
    assert corpus.evidence == (Evidence("Where was the heron?", "A heron stood in the reeds.", ""),)
    assert corpus.prose == (f"{paragraph.strip()}\n{paragraph.strip()}",)


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "line 2 is no JSON"), ("[1]", "line 2 is list"), ('{"text": "x"}', "line 2 has the fields text")],
)
def test_a_bad_row_is_named(tmp_path, line: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"context": "a b", "question": "c?"}}\n{line}\n')
    with pytest.raises(ValueError, match=re.escape(said)):
        Corpus.read([path])


def test_paths_that_hold_nothing_are_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no file"):
        Corpus.read([tmp_path])
    with pytest.raises(FileNotFoundError):
        Corpus.read([tmp_path / "none.jsonl"])
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ValueError, match="no known kind"):
        Corpus.read([tmp_path / "rows.csv"])


@pytest.mark.parametrize("name", ["dev.json", "dev.jsonl", "dev.txt"])
def test_what_excluded_files_know_is_left_out(tmp_path, name: str) -> None:
    write(
        tmp_path / "rows.jsonl",
        [{"context": p.text, **row._asdict()} for p in CORPUS.passages for row in p.rows],
    )
    known = CORPUS.passages[3].text
    held = {"dev.json": json.dumps({"data": [{"p": [known]}]}), "dev.jsonl": json.dumps({"c": known}), "dev.txt": known}
    (tmp_path / name).write_text(held[name])
    everything, rest = (Corpus.read([tmp_path / "rows.jsonl"], exclude=paths) for paths in ([], [tmp_path / name]))
    assert known in list(everything.texts())
    assert known not in list(rest.texts())
    assert rest.n_excluded == everything.n_texts - rest.n_texts > 0
    for text in rest.texts():
        assert len(shingles(text) & shingles(known)) < 0.2 * len(shingles(text))


def test_the_split_is_by_text_and_the_same_every_time() -> None:
    train, held = CORPUS.split(0.2)
    again, _ = Corpus(CORPUS.passages[::-1], CORPUS.evidence, CORPUS.prose).split(0.2)
    assert held.n_texts > 0
    assert set(train.texts()).isdisjoint(held.texts())
    assert set(again.texts()) == set(train.texts())
    for text in train.texts():
        assert all(len(shingles(text) & shingles(other)) < 0.2 * len(shingles(text)) for other in held.texts())
