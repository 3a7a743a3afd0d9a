"""Generated questions: which facts there are, where they lie, and that there is one answer."""

from __future__ import annotations

import re

import pytest

from pdllm_rag.evaluation.twohop import KINDS, N_CHAINS, STANDS, WORKS, make_question


def facts(text: str, forms: tuple[str, ...]) -> list[dict[str, str]]:
    """What a document says, read back with the forms of sentences."""
    found = []
    for form in forms:
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^.]+?)", re.escape(form))
        found += [match.groupdict() for match in re.finditer(rf"(?:(?<=[.] )|^){pattern}", text)]
    return found


@pytest.mark.parametrize("seed", [0, 5])
def test_the_two_facts_lie_in_different_documents_and_give_one_answer(seed: int) -> None:
    for number in range(100):
        question = make_question("twohop", number, seed=seed)
        assert isinstance(question.context, tuple)
        assert len(question.context) == 2 * N_CHAINS
        works = [(at, fact) for at, text in enumerate(question.context) for fact in facts(text, WORKS)]
        stands = [(at, fact) for at, text in enumerate(question.context) for fact in facts(text, STANDS)]
        assert len(works) == len(stands) == N_CHAINS
        assert not {at for at, _ in works} & {at for at, _ in stands}
        (person,) = re.findall("does (.+) work", question.text)
        ((first, work),) = [(at, fact) for at, fact in works if fact["person"] == person]
        ((second, place),) = [(at, fact) for at, fact in stands if fact["company"] == work["company"]]
        assert question.answers == (place["city"],)
        assert {first, second} == {0, 1}  # the best first
        assert person not in question.context[second]
        assert sum(place["city"] in text for text in question.context) == 1


@pytest.mark.parametrize("number", range(20))
def test_the_kinds_ask_for_the_same_facts(number: int) -> None:
    twohop, onehop, together = (make_question(kind, number) for kind in KINDS)
    assert twohop.answers == onehop.answers == together.answers
    assert twohop.context == onehop.context
    assert twohop.text == together.text
    assert isinstance(twohop.context, tuple)
    assert together.context == tuple(" ".join(pair) for pair in zip(*[iter(twohop.context)] * 2, strict=True))
    (company,) = re.findall(r"In which city is (.+)\?", onehop.text)
    assert company in twohop.context[0]
    assert company in twohop.context[1]


def test_the_same_seed_and_number_give_the_same_question_and_others_another() -> None:
    assert make_question("twohop", 3, seed=1) == make_question("twohop", 3, seed=1)
    texts = {make_question("twohop", number, seed=seed).context for number in range(20) for seed in (0, 1)}
    assert len(texts) == 40


def test_no_two_names_of_a_question_share_a_word() -> None:
    for number in range(100):
        context = make_question("twohop", number).context
        assert isinstance(context, tuple)
        read = [fact for text in context for fact in facts(text, (*WORKS, *STANDS))]
        names = {name for fact in read for key, name in fact.items() if key != "few"}
        words = [word for name in names for word in name.split()]
        assert len(names) == 3 * N_CHAINS
        assert len(set(words)) == len(words)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of twohop, onehop, together"):
        make_question("threehop", 0)
