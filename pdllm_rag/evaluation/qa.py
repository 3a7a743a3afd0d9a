"""Questions with known answers, asked over a store: accuracy, retrieval, refusals and cost.

- a file holds one JSON object per line: question, answers (or answer), doc_ids, kind, id, context;
- kind is "answerable", "unrelated" (no document touches it) or "near_miss" (the topic is there, the fact is
  not); the last two should be refused. A row that has answers and no kind is answerable;
- a row with a "context" (a text or several) is asked over that, without the store and without retrieval figures;
- a refusal of an answerable question counts as a wrong answer;
- a withheld answer is asked for again with abstaining off, so that refusals can be told for any `min_support`.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from pdllm_rag.answer import AnswerStats, ChunkCounts
from pdllm_rag.clock import PHASES
from pdllm_rag.config import AskOptions
from pdllm_rag.engine import RagEngine
from pdllm_rag.evaluation.metrics import Estimate, Grade, first_rank, grade, location, mean, proportion
from pdllm_rag.first_stage import BM25Index

logger = logging.getLogger(__name__)

KINDS = ("answerable", "unrelated", "near_miss")
MIN_SUPPORTS = (0.0, 0.01, 0.02, 0.05, *(tenth / 10 for tenth in range(1, 10)), 0.95, 0.98, 0.99, 0.995, 0.999)
DEPTH = 4  # retrieved chunks that recall and reciprocal rank look at


@dataclass(frozen=True)
class Question:
    """A question and what is known of its answer.

    Attributes:
        answers: accepted answers; empty unless it is answerable.
        doc_ids: documents that state the answer; empty if unknown or none.
        context: the text, or texts, to answer from instead of the store.
    """

    id: str
    text: str
    kind: str
    answers: tuple[str, ...]
    doc_ids: tuple[str, ...]
    context: str | tuple[str, ...] | None


@dataclass(frozen=True)
class Outcome:
    """What became of one question.

    Attributes:
        prediction: the answer's text.
        refused: it was withheld, or says that the documents do not hold it.
        grade: of the prediction; a refusal's is the lowest.
        answered: the same with abstaining off.
        says_something: whether there is an answer with abstaining off.
        retrieved: documents of the retrieved chunks, best first; None where nothing is to be retrieved.
        bm25: the same of the first stage alone.
        stats: of the answer; retrieval for `retrieved` and a second answer are not in it.
    """

    question: Question
    prediction: str
    refused: bool
    grade: Grade
    answered: Grade
    says_something: bool
    retrieved: tuple[str, ...] | None
    bm25: tuple[str, ...] | None
    stats: AnswerStats

    def refused_at(self, min_support: float) -> bool:
        """Whether this `AskOptions.min_support` would have refused it."""
        support = self.stats.support
        return not self.says_something or (support is not None and support < min_support)

    def as_dict(self) -> dict[str, Any]:
        """One line of the details file."""
        question = self.question
        return {
            "id": question.id,
            "kind": question.kind,
            "question": question.text,
            "answers": list(question.answers),
            "doc_ids": list(question.doc_ids),
            "prediction": self.prediction,
            "refused": self.refused,
            "grade": self.grade._asdict(),
            "answered": self.answered._asdict(),
            "says_something": self.says_something,
            "retrieved": None if self.retrieved is None else list(self.retrieved),
            "bm25": None if self.bm25 is None else list(self.bm25),
            "stats": self.stats.as_dict(),
        }

    @classmethod
    def of_row(cls, question: Question, row: Mapping[str, Any]) -> Outcome:
        """The outcome of a line of the details file."""
        retrieved, bm25 = (None if row[key] is None else tuple(row[key]) for key in ("retrieved", "bm25"))
        return cls(
            question,
            row["prediction"],
            row["refused"],
            Grade(**row["grade"]),
            Grade(**row["answered"]),
            row["says_something"],
            retrieved,
            bm25,
            AnswerStats(**{**row["stats"], "chunks": ChunkCounts(**row["stats"]["chunks"])}),
        )


def read_questions(path: str | PathLike[str], *, limit: int | None = None) -> list[Question]:
    """The questions of a file; blank lines are skipped.

    Args:
        limit: only the first ones.

    Raises:
        ValueError: a line is malformed (named with its number), or there is no question.
        OSError: the file cannot be read.
    """
    questions: list[Question] = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(questions) == limit:
                break
            if line.strip():
                try:
                    questions.append(_question(json.loads(line), number))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
    if not questions:
        raise ValueError(f"{path} holds no questions; expected one JSON object per line")
    return questions


def _question(row: Any, number: int) -> Question:
    if not isinstance(row, dict):
        raise ValueError(f"got {type(row).__name__}, expected a JSON object")
    text, context = row.get("question"), row.get("context")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"question is {text!r}, expected some text")
    if isinstance(context, list):
        context = _texts(row, "context")
    elif context is not None and not isinstance(context, str):
        raise ValueError(f"context is {type(context).__name__}, expected a text or a list of texts")
    answers = _texts(row, "answers") or _texts(row, "answer")
    kind = row.get("kind", "answerable" if answers else None)
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)} (or answers)")
    if bool(answers) != (kind == "answerable"):
        raise ValueError(f"kind is {kind!r} with {len(answers)} answers, expected some for answerable ones only")
    return Question(str(row.get("id", number)), text, kind, answers, _texts(row, "doc_ids"), context)


def _texts(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = row.get(key)
    values = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(text, str) and text.strip() for text in values):
        raise ValueError(f"{key} is {value!r}, expected a list of texts")
    return tuple(values)


def ask_all(engine: RagEngine, questions: Sequence[Question], options: AskOptions) -> Iterator[Outcome]:
    """Ask every question, one after another.

    Chunks are retrieved for the figures after the answer, so that nothing is warm for it that would not be; a
    question whose answer was withheld is asked again with abstaining off.

    Raises:
        ValueError: the questions name documents and the store holds none of them.
        PdllmError: as `RagEngine.answer`.
    """
    _check_documents(engine, questions)
    with closing(BM25Index(engine.store, engine.fingerprint)) as index:
        for question in questions:
            yield _ask(engine, index, question, options)


def _ask(engine: RagEngine, index: BM25Index, question: Question, options: AskOptions) -> Outcome:
    answer = engine.answer(question.text, context=question.context, options=options)
    refused = not answer.stats.supported
    graded = answered = grade("" if refused else answer.text, question.answers)
    says_something = not refused
    if refused and answer.stats.support is not None:
        second = engine.answer(question.text, context=question.context, options=options, abstain=False)
        says_something = second.stats.supported
        answered = grade(second.text if says_something else "", question.answers)
    retrieved = bm25 = None
    if question.doc_ids and question.context is None:
        found = engine.retrieve(question.text, k=max(DEPTH, options.k), candidates=options.candidates)
        retrieved = tuple(chunk.ref.doc_id for chunk in found)
        bm25 = tuple(candidate.ref.doc_id for candidate in index.search(question.text, DEPTH))
    return Outcome(question, answer.text, refused, graded, answered, says_something, retrieved, bm25, answer.stats)


def _check_documents(engine: RagEngine, questions: Sequence[Question]) -> None:
    wanted = {doc_id for q in questions if q.context is None for doc_id in q.doc_ids}
    missing = sorted(wanted - {info.doc_id for info in engine.documents()})
    if wanted and len(missing) == len(wanted):
        raise ValueError(
            f"none of the {len(wanted)} documents that the questions name (such as {missing[0]!r}) is in the "
            f"store {engine.store.path}; expected their ids as `pdllm store list` shows them. Prefill the "
            "folder that the ids are relative to"
        )
    if missing:
        logger.warning("%d of %d documents that questions name are not in the store", len(missing), len(wanted))


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures over outcomes: the stable JSON form of `pdllm eval qa --json`, without data and settings.

    A proportion is {"value", "low", "high"} with its Wilson interval, f1 and mrr with a bootstrap interval;
    None where there is no question to count. Recall and mrr are over the `n_retrieval` questions that name
    documents.

    Raises:
        ValueError: no outcomes.
    """
    if not outcomes:
        raise ValueError("no outcomes to summarise; expected at least one")
    by_kind = {kind: [o for o in outcomes if o.question.kind == kind] for kind in KINDS}
    ms = [outcome.stats.ms for outcome in outcomes]
    return {
        "n": len(outcomes),
        "answerable": _answerable(by_kind["answerable"]),
        **{
            kind: {"n": len(by_kind[kind]), "refused": _form(proportion([o.refused for o in by_kind[kind]]))}
            for kind in KINDS[1:]
        },
        "nfe": location([outcome.stats.nfe for outcome in outcomes]),
        "ms": {
            **location([phases["total"] for phases in ms]),
            "phases": {phase: statistics.median(phases[phase] for phases in ms) for phase in PHASES},
        },
    }


def by_min_support(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """What each of `MIN_SUPPORTS` would have refused of each kind, and the accuracy that it would have left.

    Without calibrated support only what the model itself says decides, and the rows are alike.
    """
    return [
        {
            "min_support": least,
            "accuracy": _form(
                proportion([o.answered.correct and not o.refused_at(least) for o in outcomes if o.question.answers])
            ),
            **{
                kind: _form(proportion([o.refused_at(least) for o in outcomes if o.question.kind == kind]))
                for kind in KINDS
            },
        }
        for least in MIN_SUPPORTS
    ]


def _answerable(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    ours = [first_rank(o.retrieved, o.question.doc_ids) for o in outcomes if o.retrieved is not None]
    bm25 = [first_rank(o.bm25, o.question.doc_ids) for o in outcomes if o.bm25 is not None]
    return {
        "n": len(outcomes),
        "accuracy": _form(proportion([o.grade.correct for o in outcomes])),
        "accuracy_without_abstaining": _form(proportion([o.answered.correct for o in outcomes])),
        "exact": _form(proportion([o.grade.exact for o in outcomes])),
        "f1": _form(mean([o.grade.f1 for o in outcomes])),
        "n_retrieval": len(ours),
        "recall_at_1": _form(_recall(ours, 1)),
        "recall_at_4": _form(_recall(ours, DEPTH)),
        "mrr": _form(mean([1 / rank if rank is not None and rank <= DEPTH else 0.0 for rank in ours])),
        "bm25_recall_at_1": _form(_recall(bm25, 1)),
        "bm25_recall_at_4": _form(_recall(bm25, DEPTH)),
        "false_refusals": _form(proportion([o.refused for o in outcomes])),
    }


def _recall(ranks: Sequence[int | None], depth: int) -> Estimate | None:
    return proportion([rank is not None and rank <= depth for rank in ranks])


def _form(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else estimate.as_dict()
