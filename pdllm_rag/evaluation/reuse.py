"""What a smaller stored dtype costs: answers, retrieval, error and bytes, against the same documents stored in float32.

- every dtype has a new store that the documents are prefilled into; float32, the reference, is always among them;
- the questions are asked over each as `qa` asks them;
- agreement is the share of answers whose text is the reference's; errors are ||x - y|| / ||y|| over the keys, or the
  values, of all chunks;
- a load is that of as many chunks as a question scores, and what it reads is in the page cache.

Where the model computes in bfloat16, a bfloat16 store has nothing to lose.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from pdllm_store import ChunkId, KVDtype

from pdllm_rag.config import AskOptions
from pdllm_rag.engine import RagEngine
from pdllm_rag.evaluation.metrics import mean, proportion
from pdllm_rag.evaluation.qa import Outcome, Question, ask_all, summary
from pdllm_rag.models.loader import LoadedModel

REFERENCE: KVDtype = "float32"


def compare_dtypes(
    model: LoadedModel,
    documents: Sequence[str | PathLike[str]],
    questions: Sequence[Question],
    options: AskOptions,
    kv_dtypes: Sequence[KVDtype],
    *,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """Figures by dtype, the reference first: those of `summary` and what sets them off against the reference.

    Args:
        documents: files, folders and patterns.
        on_outcome: told of every question that was asked.

    Raises:
        ValueError: a document does not go in, or there is none.
        PdllmError: as `ask_all`.
    """

    def ask(engine: RagEngine) -> list[Outcome]:
        outcomes = []
        for outcome in ask_all(engine, questions, options):
            outcomes.append(outcome)
            on_outcome(outcome)
        return outcomes

    with _prefilled(model, documents, REFERENCE) as reference:
        expected = ask(reference)

        def figures(engine: RagEngine, outcomes: list[Outcome]) -> dict[str, Any]:
            agreement = proportion([a.prediction == b.prediction for a, b in zip(outcomes, expected, strict=True)])
            against = _against(engine, reference, n_together=options.candidates)
            return {**summary(outcomes), "agreement": agreement.as_dict() if agreement else None, **against}

        found: dict[str, dict[str, Any]] = {REFERENCE: figures(reference, expected)}
        for kv_dtype in dict.fromkeys(kv_dtypes):
            if kv_dtype != REFERENCE:
                with _prefilled(model, documents, kv_dtype) as engine:
                    found[kv_dtype] = figures(engine, ask(engine))
    return found


@contextmanager
def _prefilled(model: LoadedModel, documents: Sequence[str | PathLike[str]], kv_dtype: KVDtype) -> Iterator[RagEngine]:
    """An engine over a new store, which is removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="pdllm-reuse-") as folder,
        RagEngine.open(folder, model, kv_dtype=kv_dtype) as engine,
    ):
        report = engine.prefill(documents)
        if report.failed or not report.added:
            why = f"{report.failed[0].path}: {report.failed[0].reason}" if report.failed else "there is none"
            raise ValueError(f"not every document of {[str(path) for path in documents]} went in; {why}")
        yield engine


def _against(engine: RagEngine, reference: RagEngine, *, n_together: int) -> dict[str, Any]:
    """What the KV of a store takes, and how far it is from the reference's."""
    stats = engine.store.stats()
    ours, theirs = _chunk_ids(engine), _chunk_ids(reference)
    errors, norms = torch.zeros(2, 2, dtype=torch.float64)  # squared, of keys and values
    ms = []
    for start in range(0, len(ours), n_together):
        part = slice(start, start + n_together)
        started = time.perf_counter()
        loaded = engine.store.fetch(ours[part]).kv
        ms.append((time.perf_counter() - started) * 1000)
        expected = reference.store.fetch(theirs[part]).kv
        for pairs in zip(loaded.values(), expected.values(), strict=True):
            for index, (got, wanted) in enumerate(zip(*pairs, strict=True)):
                errors[index] += (got.double() - wanted).square().sum()
                norms[index] += wanted.double().square().sum()
    load = mean(ms)
    return {
        "relative_l2_error": dict(zip("kv", (errors / norms).sqrt().tolist(), strict=True)),
        "kv_bytes_per_1k_tokens": 1000 * stats.kv_bytes / stats.tokens,
        "load": {"chunks": n_together, "ms": load.as_dict() if load else None},
    }


def _chunk_ids(engine: RagEngine) -> list[ChunkId]:
    """Distinct ids in document order; the same chunks stand at the same places in every dtype."""
    return list(dict.fromkeys(ref.chunk_id for ref in engine.store.refs(engine.fingerprint)))
