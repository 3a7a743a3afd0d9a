"""Asking a benchmark's samples, each over its own context, and their scores.

- a context is prefilled as a document of its own; its chunks are chosen by the sample's query, and its prompt, the
  instruction and the question, stands behind them: there is nothing ahead of the chunks;
- what is too long of a prompt is cut out of its middle, as LongBench does;
- answers are never withheld, and one without a token is empty;
- a score is 0 to 1 for a sample; a task's is the mean of its samples' times 100, and the average is that of the tasks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import blake3

from pdllm_rag.answer import Answer
from pdllm_rag.config import AskOptions
from pdllm_rag.engine import RagEngine
from pdllm_rag.errors import ContextWindowError
from pdllm_rag.evaluation.long_context import Benchmark, Sample
from pdllm_rag.evaluation.metrics import mean
from pdllm_rag.prefill import InputDocument


class Result(NamedTuple):
    """What became of a sample; a line of the results file.

    n_chunks, context_tokens: that the model read.
    document_tokens: of the whole context.
    ms: of retrieval and answer; prefill_ms of encoding the context, next to nothing where it was in the store.
    """

    task: str
    id: str
    prediction: str
    score: float
    n_chunks: int
    context_tokens: int
    document_tokens: int
    nfe: int
    prefill_ms: float
    ms: float


def ask_samples(
    engine: RagEngine,
    benchmark: Benchmark,
    samples: Iterable[Sample],
    options: AskOptions,
    *,
    max_new_tokens: int | None = None,
    keep: bool = False,
) -> Iterator[Result]:
    """Ask every sample, one after another.

    Args:
        max_new_tokens: most answer tokens of any task; None takes each task's own.
        keep: leave contexts in the store; without it each is deleted once another is asked over.

    Raises:
        ValueError: a context cannot be prefilled; PdllmError: as `RagEngine.answer`.
    """
    held: str | None = None
    for sample in samples:
        doc_id = f"context-{blake3.blake3(sample.context.encode('utf-8', 'surrogatepass')).hexdigest(16)}"
        if held is not None and held != doc_id and not keep:
            engine.delete(held)
        started = time.perf_counter()
        report = engine.prefill([InputDocument(doc_id, sample.context, doc_id)])
        prefill_ms = (time.perf_counter() - started) * 1000
        if report.failed:
            raise ValueError(f"the context of {sample.task} {sample.id} did not go in: {report.failed[0].reason}")
        held = doc_id
        task = benchmark.tasks[sample.task]
        chosen = options.with_changes({"abstain": False, "max_new_tokens": max_new_tokens or task.max_new_tokens})
        started = time.perf_counter()
        answer = _answer(engine, sample, doc_id, chosen)
        ms = (time.perf_counter() - started) * 1000
        stats = answer.stats
        prediction = answer.text if stats.tokens else ""
        yield Result(
            task=sample.task,
            id=sample.id,
            prediction=prediction,
            score=task.metric(prediction, sample),
            n_chunks=stats.chunks.hit + stats.chunks.recomputed,
            context_tokens=stats.context_tokens,
            document_tokens=next(info.n_tokens for info in engine.documents() if info.doc_id == doc_id),
            nfe=stats.nfe,
            prefill_ms=prefill_ms,
            ms=ms,
        )


def _answer(engine: RagEngine, sample: Sample, doc_id: str, options: AskOptions) -> Answer:
    """Retrieve by the query, and answer the prompt over what was retrieved, as much of it as fits, best first."""
    room = engine.model.spec.family.window // 2 - options.max_new_tokens
    chosen = {name: getattr(options, name) for name in ("candidates", "first_stage", "rank_weight", "score_window")}
    found = engine.retrieve(
        _cut(engine, sample.query, room), options.k, **chosen, max_new_tokens=1, filter={"doc_id": doc_id}
    )
    near = [one.ref.chunk_id for one in found]  # within the score window
    prompt = _cut(engine, sample.prompt, room)
    while True:
        try:
            return engine.answer(prompt, chunk_ids=near, options=options)
        except ContextWindowError:
            if len(near) == 1:
                raise
            near.pop()


def _cut(engine: RagEngine, text: str, room: int) -> str:
    """A text of at most so many tokens, its middle left out if there are more.

    Raises:
        ContextWindowError: there is no room for any.
    """
    if room < 2:
        raise ContextWindowError(
            f"answers take up half the window of {engine.model.spec.family.window} tokens of {engine.model.spec.name} "
            "or more; expected room for the question. Lower --max-new-tokens"
        )
    tokenizer = engine.model.tokenizer
    ids = tokenizer.encode(text)
    half = room // 2
    return text if len(ids) <= room else tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Figures over results: of each task its score (0 to 100) with a bootstrap interval, and the tasks' average.

    Raises:
        ValueError: no results.
    """
    if not results:
        raise ValueError("no results to summarise; expected at least one")
    tasks: dict[str, Any] = {}
    for name in dict.fromkeys(result.task for result in results):
        own = [result for result in results if result.task == name]
        score = mean([100 * result.score for result in own])
        tasks[name] = {
            "n": len(own),
            "score": score.as_dict() if score else None,
            "empty": sum(not result.prediction.strip() for result in own),
            **{
                key: statistics.median(getattr(result, key) for result in own)
                for key in ("document_tokens", "context_tokens", "nfe", "prefill_ms", "ms")
            },
        }
    return {
        "n": len(results),
        "tasks": tasks,
        "average": statistics.fmean(task["score"]["value"] for task in tasks.values()),
    }
