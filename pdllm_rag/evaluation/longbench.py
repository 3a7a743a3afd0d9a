"""LongBench's English and code tasks, as in its own evaluation: prompts, lengths of answers, metrics.

- left out: the five Chinese tasks, whose metrics need a segmenter, and LongBench-E's scores by length;
- a prompt says in fewer words what the official one says, and all of it behind the context;
- every task goes through the model's chat template, which the official run leaves out for few-shot and code tasks;
- chunks for lcc, which has no question, are chosen by the end of the context.

Source: Bai et al., LongBench (arXiv 2308.14508), and its public evaluation.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from pdllm_rag.evaluation.long_context import Benchmark, Sample, Task

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
COMMENTS = ("`", "#", "//")  # a line with one of these is no code

Metric = Callable[[str, Sample], float]


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the bags of words without ASCII punctuation and articles; unlike `metrics.token_f1`, 0 of no words."""
    said, wanted = _words(prediction), _words(answer)
    shared = sum((Counter(said) & Counter(wanted)).values())
    return 2 * shared / (len(said) + len(wanted)) if shared else 0.0


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L of summaries over the sets of their words, as the package rouge 1.0.1 computes it.

    Sentences end at full stops. A word counts once, if some pair of sentences has it in a longest common subsequence.
    Sentences of some thousand words are scored, for which that package gives up and LongBench counts 0.
    """
    said, wanted = _sentences(prediction), _sentences(answer)
    if not said or not wanted:
        return 0.0
    shared = set[str]().union(*(_common(one, other) for one in wanted for other in said))
    precision, recall = (len(shared) / len(set[str]().union(*text)) for text in (said, wanted))
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the prediction names, if the right one is among them."""
    named = [name for name in classes if name in prediction]
    # Names that are part of the right one do not count. The official loop skips a name after each that it removes.
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """Share of the prediction's numbers that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Share of the prediction's numbers that are the right paragraph's.

    Raises:
        ValueError: the answer names no paragraph.
    """
    found = re.search(r"Paragraph (\d+)", answer)
    if found is None:
        raise ValueError(f"answer is {answer!r}, expected such as 'Paragraph 12'")
    return count(prediction, found[1])


def code_similarity(prediction: str, answer: str) -> float:
    """Likeness of the prediction's first line of code to the right one, in hundredths.

    By difflib, as fuzzywuzzy without python-Levenshtein; with that the official figure can be a little higher.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in COMMENTS)), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(NO_PUNCTUATION)).split()


def _sentences(text: str) -> list[list[str]]:
    """Words of each sentence; one of blanks only has one empty word."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(one: Sequence[str], other: Sequence[str]) -> set[str]:
    """Words of a longest common subsequence; of several the one that drops the other's words first, from the end."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one, start=1):
        for j, counterpart in enumerate(other, start=1):
            both = lengths[i - 1][j - 1] + 1
            lengths[i][j] = both if word == counterpart else max(lengths[i - 1][j], lengths[i][j - 1])
    i, j = len(one), len(other)
    words = set()
    while i and j:
        if one[i - 1] == other[j - 1]:
            words.add(one[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def _best(metric: Callable[[str, str], float]) -> Metric:
    """Of the right answers the one that suits a prediction best."""
    return lambda prediction, sample: max(metric(prediction, str(answer)) for answer in sample.answers)


def _best_of_first_line(metric: Metric) -> Metric:
    """The same of a prediction's first line: few-shot examples tempt a model to go on with more of them."""
    return lambda prediction, sample: metric(prediction.lstrip("\n").split("\n")[0], sample)


def _classified(prediction: str, sample: Sample) -> float:
    return max(classification(prediction, str(answer), sample.choices) for answer in sample.answers)


ASKED = "\n\nQuestion: {input}\nAnswer:"
STORY = f"Answer the question about the story with a single phrase if possible. Explain nothing.{ASKED}"
ARTICLE = (
    "Answer the question about the article with a single phrase or sentence if possible: yes or no where that is asked "
    f'for, and "unanswerable" where the article does not say. Explain nothing.{ASKED}'
)
TEXT = f"Answer the question about the text with the answer only and no other words.{ASKED}"
PASSAGES = f"Answer the question from the given passages with the answer only and no other words.{ASKED}"
REPORT = "Write a one-page summary of the report.\n\nSummary:"
MEETING = "Answer the query about the meeting's transcript in one or more sentences.\n\nQuery: {input}\nAnswer:"
NEWS = "Write a one-page summary of all the news.\n\nSummary:"
KIND = "Determine the type of the question, as in the examples.\n\n{input}"
PASSAGE = "Answer the question from its passage with the answer only, as in the examples.\n\n{input}"
DIALOGUE = "Summarize the dialogue in a few short sentences, as in the examples.\n\n{input}"
COUNT = (
    "How many different paragraphs are there, when those that stand several times count once? Give only the number."
    "\n\nThe final answer is:"
)
ABSTRACT = (
    "The following is an abstract.\n\n{input}\n\nGive the number of the paragraph that it is of, in the form "
    '"Paragraph 1".\n\nThe answer is:'
)
CODE_ABOVE = "Please complete the code.\nNext line of code:"
CODE_BELOW = "Please complete the code.\n{input}\nNext line of code:"
F1, ROUGE, CODE = _best(qa_f1), _best(rouge_l), _best(code_similarity)

LONGBENCH = Benchmark(
    "LongBench",
    {
        "narrativeqa": Task(STORY, F1, 128),
        "qasper": Task(ARTICLE, F1, 128),
        "multifieldqa_en": Task(TEXT, F1, 64),
        "hotpotqa": Task(PASSAGES, F1, 32),
        "2wikimqa": Task(PASSAGES, F1, 32),
        "musique": Task(PASSAGES, F1, 32),
        "gov_report": Task(REPORT, ROUGE, 512),
        "qmsum": Task(MEETING, ROUGE, 512),
        "multi_news": Task(NEWS, ROUGE, 512),
        "trec": Task(KIND, _best_of_first_line(_classified), 64),
        "triviaqa": Task(PASSAGE, _best_of_first_line(F1), 32),
        "samsum": Task(DIALOGUE, _best_of_first_line(ROUGE), 128),
        "passage_count": Task(COUNT, _best(count), 32),
        "passage_retrieval_en": Task(ABSTRACT, _best(retrieval), 32),
        "lcc": Task(CODE_ABOVE, CODE, 64, "{tail}"),
        "repobench-p": Task(CODE_BELOW, CODE, 64),
    },
    id_key="_id",
    answers_key="answers",
    choices_key="all_classes",
)
