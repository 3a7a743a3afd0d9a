"""Retrieval alone: how high the documents that answer a question rank, by each first stage and after scoring.

- ranks count chunks, as the model reads them; a document counts where its first chunk stands, and once;
- recall@k is the share of questions with a document that answers them among the first k chunks;
- a cascade is a first stage whose best candidates are scored; behind those the first stage's others follow;
- differences are paired: over the same questions, with a bootstrap interval of their mean;
- milliseconds are of one query after another; what a first query has to build or read is left to a warm-up.

Source: Järvelin and Kekäläinen (2002), discounted cumulative gain; a document's gain is 1 or 0.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from pdllm_store import ChunkRef

from pdllm_rag.engine import RagEngine
from pdllm_rag.evaluation.metrics import first_rank, location, mean, proportion
from pdllm_rag.evaluation.qa import Question
from pdllm_rag.first_stage import FirstStage
from pdllm_rag.prefill import InputDocument
from pdllm_rag.retrieval import with_ranks

DEPTH = 32  # chunks of a ranking that are looked at, at least
RECALLS = (1, 4, 8, 32)
NDCG_DEPTH = 10
MEASURES = (*(f"recall_at_{k}" for k in RECALLS), "mrr", f"ndcg_at_{NDCG_DEPTH}")
ALL_KEPT = 1e9  # a score window that leaves nothing out, but has candidates scored even if all of them fit


@dataclass(frozen=True)
class Ranking:
    """One question's documents by one ranker: those of its chunks, best first, and the milliseconds it took."""

    doc_ids: tuple[str, ...]
    ms: float

    def measures(self, relevant: Collection[str]) -> dict[str, float]:
        """Each of `MEASURES`."""
        rank = first_rank(self.doc_ids, relevant)
        return {
            **{f"recall_at_{k}": float(rank is not None and rank <= k) for k in RECALLS},
            "mrr": 0.0 if rank is None else 1 / rank,
            f"ndcg_at_{NDCG_DEPTH}": ndcg(self.doc_ids, relevant, NDCG_DEPTH),
        }


class Cascade(NamedTuple):
    """A stage whose best candidates are scored; `rank_weight` as `AskOptions` has it."""

    stage: str
    candidates: int
    rank_weight: float = 0.0

    @property
    def name(self) -> str:
        """How the figures call it."""
        return f"scored {self.stage}, {self.candidates}" + (f", rank {self.rank_weight:g}" if self.rank_weight else "")


def ndcg(retrieved: Sequence[str], relevant: Collection[str], depth: int) -> float:
    """Normalised discounted cumulative gain of the first `depth` places; a repeated document gains nothing."""
    wanted = set(relevant)
    if not wanted:
        raise ValueError("ndcg got no relevant documents; expected at least one")
    gain = 0.0
    for rank, doc_id in enumerate(retrieved[:depth], start=1):
        if doc_id in wanted:
            wanted.remove(doc_id)
            gain += 1 / math.log2(rank + 1)
    best = sum(1 / math.log2(rank + 1) for rank in range(1, min(len(set(relevant)), depth) + 1))
    return gain / best


def usable(questions: Sequence[Question], *, sample: int | None = None, seed: int = 0) -> list[Question]:
    """The questions that name documents and bring no context, or so many of them, drawn with a seed, in their order.

    Raises:
        ValueError: there is none.
    """
    found = [question for question in questions if question.doc_ids and question.context is None]
    if not found:
        raise ValueError(
            f'none of the {len(questions)} questions names documents; expected "doc_ids" in each line, the ids of '
            "the documents that answer it"
        )
    if sample is None or sample >= len(found):
        return found
    return [found[index] for index in sorted(random.Random(seed).sample(range(len(found)), sample))]


def read_documents(path: str | PathLike[str]) -> list[InputDocument]:
    """Documents of a file with one JSON object per line: id (or doc_id) and text.

    Raises:
        ValueError: a line is malformed (named with its number), or there is none.
        OSError: the file cannot be read.
    """
    documents = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            doc_id = row.get("doc_id", row.get("id")) if isinstance(row, dict) else None
            text = row.get("text") if isinstance(row, dict) else None
            if not isinstance(doc_id, (str, int)) or not isinstance(text, str):
                raise ValueError(f"{path}, line {number}: expected a JSON object with id and text")
            documents.append(InputDocument(str(doc_id), text, f"{path}#{doc_id}"))
    if not documents:
        raise ValueError(f"{path} holds no documents; expected one JSON object per line, with id and text")
    return documents


def rank_all(
    engine: RagEngine,
    questions: Sequence[Question],
    stages: Mapping[str, FirstStage],
    cascades: Collection[Cascade],
) -> Iterator[dict[str, Ranking]]:
    """For every question a ranking by each stage and by each cascade; those that differ in `rank_weight` score once.

    Raises:
        PdllmError: as `RagEngine.retrieve`.
    """
    for stage in stages.values():
        stage.search(questions[0].text, DEPTH)
    depth = max(DEPTH, *(cascade.candidates for cascade in cascades), 0)
    by_candidates = {key: list(some) for key, some in groupby(sorted(cascades), key=lambda one: one[:2])}
    for name, n in by_candidates:
        _scores(engine, questions[0].text, stages[name], n)
    for question in questions:
        found: dict[str, Ranking] = {}
        refs: dict[str, list[ChunkRef]] = {}
        for name, stage in stages.items():
            started = time.perf_counter()
            refs[name] = [hit.ref for hit in stage.search(question.text, depth)]
            found[name] = Ranking(tuple(ref.doc_id for ref in refs[name]), _ms_since(started))
        for (name, n), some in by_candidates.items():
            started = time.perf_counter()
            scores = _scores(engine, question.text, stages[name], n)
            ms = _ms_since(started)
            for cascade in some:
                total = with_ranks([scores[ref] for ref in refs[name][:n]], cascade.rank_weight)
                order = sorted(zip(total, refs[name], strict=False), key=lambda pair: (-pair[0], pair[1]))
                doc_ids = [ref.doc_id for _, ref in order] + [ref.doc_id for ref in refs[name][n:]]
                found[cascade.name] = Ranking(tuple(doc_ids), ms)
        yield found


def as_row(question: Question, rankings: Mapping[str, Ranking]) -> dict[str, Any]:
    """A question's rankings in JSON form."""
    found = {name: [one.doc_ids, one.ms] for name, one in rankings.items()}
    return {"id": question.id, "question": question.text, "rankings": found}


def of_row(row: Mapping[str, Any]) -> dict[str, Ranking]:
    """The rankings of a row."""
    return {name: Ranking(tuple(doc_ids), ms) for name, (doc_ids, ms) in row["rankings"].items()}


def summary(
    rankings: Sequence[Mapping[str, Ranking]], questions: Sequence[Question], *, references: Sequence[str]
) -> dict[str, Any]:
    """Figures by ranker: each measure with its interval, its differences from the references', and milliseconds.

    Raises:
        ValueError: no rankings.
    """
    if not rankings:
        raise ValueError("no rankings to summarise; expected at least one")
    measured = {
        name: [row[name].measures(question.doc_ids) for row, question in zip(rankings, questions, strict=True)]
        for name in rankings[0]
    }
    return {
        name: {
            **estimates(values),
            "differences": {one: differences(values, measured[one]) for one in references if one != name},
            "ms": location([row[name].ms for row in rankings]),
        }
        for name, values in measured.items()
    }


def estimates(values: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Means of each measure over questions: shares with a Wilson interval, others with a bootstrap interval."""
    found: dict[str, Any] = {}
    for measure in values[0]:
        column = [row[measure] for row in values]
        is_share = measure.startswith("recall")
        estimate = proportion([bool(value) for value in column]) if is_share else mean(column)
        found[measure] = estimate.as_dict() if estimate else None
    return found


def differences(values: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Mean of (value - other's) of each measure over the same questions, with its bootstrap interval."""
    found: dict[str, Any] = {}
    for measure in values[0]:
        estimate = mean([own[measure] - other[measure] for own, other in zip(values, others, strict=True)])
        found[measure] = estimate.as_dict() if estimate else None
    return found


def _scores(engine: RagEngine, text: str, stage: FirstStage, candidates: int) -> dict[ChunkRef, float]:
    found = engine.retrieve(text, k=candidates, candidates=candidates, score_window=ALL_KEPT, first_stage=stage)
    return {chunk.ref: chunk.score or 0.0 for chunk in found}  # a single one is not scored


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
