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
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from pdllm_rag.engine import RagEngine
from pdllm_rag.evaluation.metrics import first_rank, mean, percentile, proportion
from pdllm_rag.evaluation.qa import Question
from pdllm_rag.first_stage import FirstStage
from pdllm_rag.prefill import InputDocument

DEPTH = 32  # chunks of a ranking that are looked at
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
    *,
    cascades: Sequence[str],
    candidates: int,
) -> Iterator[dict[str, Ranking]]:
    """For every question a ranking by each stage, and by scoring the candidates of those in `cascades`.

    Args:
        candidates: chunks that a cascade scores.

    Raises:
        PdllmError: as `RagEngine.retrieve`.
    """
    for stage in stages.values():
        stage.search(questions[0].text, DEPTH)
    for name in cascades:
        _scored(engine, questions[0].text, stages[name], candidates)
    for question in questions:
        found: dict[str, Ranking] = {}
        for name, stage in stages.items():
            started = time.perf_counter()
            hits = stage.search(question.text, DEPTH)
            found[name] = Ranking(tuple(hit.ref.doc_id for hit in hits), _ms_since(started))
            if name in cascades:
                started = time.perf_counter()
                scored = _scored(engine, question.text, stage, candidates)
                ms = _ms_since(started)
                rest = [hit.ref.doc_id for hit in hits[candidates:]]
                found[cascade_name(name)] = Ranking((*scored, *rest), ms)
        yield found


def cascade_name(stage: str) -> str:
    """How the figures call the cascade over a stage."""
    return f"scored {stage}"


def summary(
    rankings: Sequence[Mapping[str, Ranking]], questions: Sequence[Question], *, reference: str
) -> dict[str, Any]:
    """Figures by ranker: each measure with its interval, its difference from the reference's, and milliseconds.

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
            "difference": None if name == reference else differences(values, measured[reference]),
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


def location(values: Sequence[float]) -> dict[str, float]:
    """Median and 90th percentile."""
    return {"median": float(statistics.median(values)), "p90": percentile(values, 90)}


def _scored(engine: RagEngine, text: str, stage: FirstStage, candidates: int) -> list[str]:
    found = engine.retrieve(text, k=candidates, candidates=candidates, score_window=ALL_KEPT, first_stage=stage)
    return [chunk.ref.doc_id for chunk in found]


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
