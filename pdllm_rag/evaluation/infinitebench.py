"""InfiniteBench's English, code, retrieval and search tasks, as in its own evaluation: prompts, lengths, metrics.

- left out: longbook_qa_chn (Chinese), longbook_sum_eng and math_calc (answers of 1,200 and 30,000 tokens);
- a prompt says in fewer words what the official ones (those for base models) say, the answer's cue included, and all
  of it behind the context;
- a choice's letter is found from its text where the data has the text only;
- an answer in a list of one counts as that answer in every task; the official kv_retrieval never finds one.

Source: Zhang et al., InfiniteBench (arXiv 2402.13718), and its public evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pdllm_rag.evaluation.long_context import LETTERS, Benchmark, Sample, Task
from pdllm_rag.evaluation.longbench import qa_f1

MARKS = "\n:\"'.,?!{}"  # between words


def first_number(prediction: str, sample: Sample) -> float:
    """Whether the first run of digits is the answer, leading zeros included."""
    found = re.search("[0-9]+", prediction)
    return float(found is not None and found[0] == str(sample.answers[0]))


def has_word(prediction: str, sample: Sample) -> float:
    """Whether the answer stands among the words."""
    return float(str(sample.answers[0]) in _apart(prediction, MARKS).split())


def has_name(prediction: str, sample: Sample) -> float:
    """Whether the name stands among the words, whatever their case; the data has names in capitals."""
    return float(sample.answers[0] in _apart(prediction, MARKS).upper().split())


def last_number(prediction: str, sample: Sample) -> float:
    """Whether the last word is the answer's number."""
    words = _apart(prediction, "\n.`'\":").split()
    return float(bool(words) and re.fullmatch("[+-]?[0-9]+", words[-1]) is not None and _equal(words[-1], sample))


def first_value(prediction: str, sample: Sample) -> float:
    """Whether the first number, whole or decimal, is the answer; signs are not looked at."""
    found = re.search(r"\d+\.\d+|\d+", prediction)
    return float(found is not None and _equal(found[0], sample))


def best_f1(prediction: str, sample: Sample) -> float:
    """Token F1 with the answer that suits it best."""
    return max(qa_f1(prediction, str(answer)) for answer in sample.answers)


def chosen(prediction: str, sample: Sample) -> float:
    """Whether the right option is chosen: by the first letter, after a cue, or by the first letter alone."""
    text, letter = _option(sample)
    said = prediction.strip()
    if said[:1] in tuple(LETTERS):
        return float(said[0] in (text, letter))
    if said == text:
        return 1.0
    said = _folded(_apart(said, "\n\"'.,?!{}"))
    after = _after(said, ("answer is:", "answer:", "answer is", "option is"))
    if after is not None:
        return float(after.startswith((text, letter)))
    word = next((word for word in said.split() if word in LETTERS), None)
    return float(word in (text, letter))


def found_error(prediction: str, sample: Sample) -> float:
    """Whether the right function is chosen: by its letter at the beginning, or by letter or name after a cue."""
    name, letter = _option(sample)
    said = prediction.strip()
    if said[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    said = _folded(re.sub("Option|option", " ", _apart(said, "\n`'\"-*")))
    after = _after(said, ("answer is:", "is:", "answer:"))
    return float(after is not None and after.startswith((letter, name)))


def _option(sample: Sample) -> tuple[str, str]:
    """Text and letter of the right option.

    Raises:
        ValueError: it is none of the options.
    """
    text, *letter = (str(answer) for answer in sample.answers)
    if letter and letter[0] in tuple(LETTERS):
        return text, letter[0]
    if text not in sample.choices[: len(LETTERS)]:
        raise ValueError(f"{sample.task} {sample.id}: answer is {text!r}, expected one of its four options")
    return text, LETTERS[sample.choices.index(text)]


def _apart(text: str, marks: str) -> str:
    """With a blank for each of these marks."""
    return text.translate(dict.fromkeys(map(ord, marks), " "))


def _folded(text: str) -> str:
    return re.sub(" +", " ", text)


def _after(text: str, cues: Sequence[str]) -> str | None:
    """What stands behind the first of the cues that there is, and a blank; None without any."""
    cue = next((cue for cue in cues if cue in text), None)
    return None if cue is None else text[text.index(cue) + len(cue) + 1 :]


def _equal(number: str, sample: Sample) -> bool:
    """Raises ValueError if the answer is no number."""
    try:
        return float(number) == float(sample.answers[0])
    except ValueError as error:
        raise ValueError(f"{sample.task} {sample.id}: answer is {sample.answers[0]!r}, expected a number") from error


QUESTION = "Question: {input}"
WHICH = "Exactly one of these functions has a deliberate error: it crashes.\n{options}\n\nThe correct option is:"

INFINITEBENCH = Benchmark(
    "InfiniteBench",
    {
        "passkey": Task("{input}\n\nThe pass key is", first_number, 6),
        "number_string": Task("{input}\n\nThe sequence of digits is", first_number, 12),
        "kv_retrieval": Task("{input}", has_word, 50),
        "longbook_choice_eng": Task(
            f"{QUESTION}\n{{options}}\n\nThe letter of the correct answer is", chosen, 40, f"{QUESTION}\n{{options}}"
        ),
        "math_find": Task("{input}", first_value, 3),
        "code_debug": Task(WHICH, found_error, 5, "{options}"),
        "longbook_qa_eng": Task(f"Be very concise in your answer.\n\n{QUESTION}\nAnswer:", best_f1, 40),
        "longdialogue_qa_eng": Task("{input}", has_name, 40),
        "code_run": Task("{input}", last_number, 5),
    },
    id_key="id",
    answers_key="answer",
    choices_key="options",
)
