"""A whole question, as the engine asks it but for the first stage: load, draft, score, decode.

The candidates' KV comes from a pool that holds it on the device, or from a store whose file is in the page cache. The
draft is made and scored for every question, which is the most that scoring can come to (a family may not weigh drafts,
and a clear lead of one chunk spares them).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from pdllm_store import ChunkId, ChunkKV, LMDBStore

from pdllm_rag.bench.decode_sides import DecodeSizes, StaticSteps, random_ids, request_over
from pdllm_rag.bench.prefill import random_chunks
from pdllm_rag.decoding import CommitRule, DecodeRequest, StaticKVDecoder
from pdllm_rag.drafts import DRAFT_CHUNKS
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.evidence import scored_at_once
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.placement import plan_offsets
from pdllm_rag.pool import KVPool
from pdllm_rag.scoring import CandidateScorer, ScoringOptions

PARTS = ("load", "draft", "score", "decode")
MARGIN = 4  # template rows before and behind a question's own words


def fill_store(model: LoadedModel, folder: str, sizes: DecodeSizes) -> tuple[LMDBStore, list[ChunkId]]:
    """A new store with as many chunks as are scored at most; the caller closes it."""
    store = LMDBStore.open(folder, kv_dtype="bfloat16")
    try:
        fingerprint = model.fingerprint("bfloat16")
        store.register(fingerprint)
        ids: list[ChunkId] = []
        for encoded in ChunkEncoder(model, fingerprint).batches(
            random_chunks(model, sizes.candidates, sizes.chunk_len, seed=0)
        ):
            store.put(fingerprint, encoded)
            ids += [meta.chunk_id for meta, _ in encoded]
    except BaseException:
        store.close()
        raise
    return store, ids


class Question:
    """One question over some candidates of a store.

    Args:
        candidates: chunks that are loaded and scored.
        steps: denoising steps at most; None for one token a step.
    """

    def __init__(
        self, model: LoadedModel, candidates: Sequence[ChunkId], sizes: DecodeSizes, *, steps: int | None = None
    ) -> None:
        self._model, self._sizes, self._steps = model, sizes, steps
        self._candidates = candidates
        rows = sizes.question_rows
        margin = min(MARGIN, (rows - 1) // 2)
        self._prompt = Prompt(tuple(random_ids(model, rows)), range(margin, rows - margin))
        self._scoring = ScoringOptions()
        self.n_forwards = 0

    def ask(self, pool: KVPool) -> dict[str, float]:
        """Milliseconds of each part and of the whole."""
        ms: dict[str, float] = {}
        device, sizes = self._model.backbone.device, self._sizes
        with _timed(ms, "total", device):
            with _timed(ms, "load", device):
                held = pool.acquire(self._candidates).kv
                kvs = [held[chunk_id] for chunk_id in self._candidates]
            with _timed(ms, "draft", device):
                draft = self._draft(kvs[:DRAFT_CHUNKS])
            with _timed(ms, "score", device):
                scores = self._scores(kvs, draft)
            best = scores.argsort(descending=True)[: sizes.selected].sort().values.tolist()
            with _timed(ms, "decode", device):
                request = request_over(self._model, [kvs[index] for index in best], sizes)
                self.n_forwards = StaticSteps(self._model, [request], steps=self._steps).whole()
        return ms

    def _draft(self, kvs: Sequence[ChunkKV]) -> list[int]:
        """One forward over the first candidates; all of its tokens, whatever they are."""
        decoder = StaticKVDecoder(self._model, CommitRule(threshold=0.0))
        placement = plan_offsets([kv.k.shape[1] for kv in kvs], "sequential", chunk_len=0)
        request = DecodeRequest(self._prompt.ids, placement, self._scoring.draft_len, chunk_kv=kvs)
        filled = {row: token for s in decoder.steps([request]) for row, token in zip(s.rows, s.tokens, strict=True)}
        return [token for _, token in sorted(filled.items())][: self._scoring.draft_len]

    def _scores(self, kvs: Sequence[ChunkKV], draft: Sequence[int]) -> torch.Tensor:
        estimator = self._scoring.estimator
        at_once = len(estimator.readings(self._prompt.content))
        found = []
        step = scored_at_once(kvs)
        for start in range(0, len(kvs), step):
            some = kvs[start : start + step]
            scorer = CandidateScorer(self._model, self._prompt, some, draft_len=len(draft), at_once=at_once)
            found.append(scorer.s_i(estimator) + scorer.s_p([draft] * len(some)))
        return torch.cat(found)


@contextmanager
def _timed(ms: dict[str, float], name: str, device: torch.device) -> Iterator[None]:
    """Milliseconds of the block, what it left to the device included."""
    started = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ms[name] = (time.perf_counter() - started) * 1000
