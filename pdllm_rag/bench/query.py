"""Where a question's time goes, and what static chunk KV saves: everything in one run, in turns.

- asks: whole questions over a store whose KV is already in memory, by phase;
- decode: static_kv against vanilla over the same chunks, the same prompt and the same number of steps;
- long_context: static_kv over a few chunks against vanilla over a context of many, which needs no retrieval
  (cost only: so long a context may be more than the model was trained on);
- question: the same, but all that a question costs our side (candidates read from disk, a draft, scoring, decoding);
- scoring: selecting among the candidates against decoding: s_I alone, which is all for a question whose best chunk
  leads clearly, and the most that it can come to, with a full draft made and scored where the family weighs s_P.

Denoising steps are forced: one token is committed at a time and no token ends the answer, so both sides run
exactly the steps asked for, whatever they decode. Chunks are random tokens: their content does not change the
work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from pdllm_store import ChunkKV, LMDBStore

from pdllm_rag.answer import AnswerStats
from pdllm_rag.attention import causal_block
from pdllm_rag.bench.decode_sides import endless
from pdllm_rag.bench.machine import Spread, compare, describe, take_turns
from pdllm_rag.bench.prefill import random_chunks
from pdllm_rag.clock import PHASES
from pdllm_rag.decoding import CommitRule, Decoder, DecodeRequest, StaticKVDecoder, VanillaDecoder
from pdllm_rag.drafts import DRAFT_CHUNKS
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.engine import RagEngine
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.placement import plan_offsets
from pdllm_rag.scoring import CandidateScorer, ScoringOptions

QUESTION = "Which instrument did the crew replace on the northern mooring after the storm in March?"
SELECTING = ("s_i", "draft", "s_p")
PARTS = ("load", *SELECTING, "static_kv")  # of a question, on our side
SECTIONS = {  # what each comparison times
    "decode": ("vanilla", "static_kv"),
    "long_context": ("vanilla_long", "static_kv"),
    "question": ("vanilla_long", *PARTS),
    "scoring": (*SELECTING, "static_kv"),
}


@dataclass(frozen=True)
class QueryShapes:
    """Sizes of the comparisons.

    Attributes:
        chunk_len: tokens of a chunk, BOS included.
        n_chunks: chunks that both decoders read.
        long_chunks: chunks of vanilla's long context.
        candidates: chunks that are scored.
        steps: denoising steps of a decode, at most one block's.
    """

    chunk_len: int = 256
    n_chunks: int = 4
    long_chunks: int = 16
    candidates: int = 8
    steps: int = 6

    def __post_init__(self) -> None:
        if self.chunk_len < 2 or min(self.n_chunks, self.long_chunks, self.steps) < 1:
            raise ValueError(f"{self}; expected chunk_len of 2 or more and the others of 1 or more")
        if self.candidates < self.n_chunks:
            raise ValueError(f"candidates is {self.candidates}; expected n_chunks ({self.n_chunks}) or more")


def bench_query(
    engine: RagEngine,
    questions: Sequence[str] = (),
    *,
    repeat: int = 5,
    shapes: QueryShapes | None = None,
    sections: Collection[str] = tuple(SECTIONS),
) -> dict[str, Any]:
    """Measure the query side.

    Args:
        questions: asked over the engine's store; without any, `asks` is None.
        sections: what is compared, of `SECTIONS`.
        repeat: counted repetitions of everything; one more goes ahead.

    Raises:
        ValueError: a bad size; PdllmError: as `RagEngine.answer`.
    """
    shapes = shapes or QueryShapes()
    model = engine.model
    family = model.spec.family
    if shapes.steps > family.block_len:
        raise ValueError(f"steps is {shapes.steps}; expected at most the {family.block_len} of one block")
    prompt = model.tokenizer.render(family.template, [{"role": "user", "content": QUESTION}])
    ms = _decodes(model, shapes, repeat, prompt, {run for name in sections for run in SECTIONS[name]})
    return {
        "machine": describe(model)._asdict(),
        "model": model.spec.name,
        "repeat": repeat,
        "shapes": {**asdict(shapes), "prompt_tokens": len(prompt.ids), "answer_rows": family.block_len},
        "asks": _asks(engine, questions, repeat) if questions else None,
        **_comparisons(ms, shapes, sections),
    }


def _asks(engine: RagEngine, questions: Sequence[str], repeat: int) -> dict[str, Any]:
    stats: list[AnswerStats] = []
    for turn in range(repeat + 1):
        for question in questions:
            answer = engine.answer(question)
            if turn:
                stats.append(answer.stats)
    options = engine.options
    return {
        "measures": "whole questions, chunk KV in memory",
        "n_questions": len(questions),
        "n_asks": len(stats),
        "k": options.k,
        "candidates": options.candidates,
        "decoder": options.decoder,
        "policy": options.policy,
        "ms": {phase: Spread.of([one.ms[phase] for one in stats]).as_dict() for phase in (*PHASES, "total")},
        "nfe": Spread.of([one.nfe for one in stats]).as_dict(),
        "context_tokens": Spread.of([one.context_tokens for one in stats]).as_dict(),
    }


def _decodes(
    model: LoadedModel, shapes: QueryShapes, repeat: int, prompt: Prompt, wanted: Collection[str]
) -> dict[str, list[float]]:
    """Milliseconds of the parts that are compared."""
    chunks = random_chunks(model, max(shapes.long_chunks, shapes.candidates), shapes.chunk_len, seed=0)
    fingerprint = model.fingerprint("bfloat16")
    encoder = ChunkEncoder(model, fingerprint)
    encoded = [entry for batch in encoder.batches(chunks[: shapes.candidates]) for entry in batch]
    kv = [chunk for _, chunk in encoded]
    one_at_a_time = CommitRule(threshold=1.0)
    static_kv = StaticKVDecoder(endless(model), one_at_a_time)
    vanilla = VanillaDecoder(endless(model), one_at_a_time)

    scoring = ScoringOptions()
    block = causal_block(model.spec.family) or 1
    draft = chunks[0][-scoring.draft_len :].tolist() if model.spec.family.draft_weight else []

    def decode(decoder: Decoder, n_chunks: int, n_steps: int, chunk_kv: Sequence[ChunkKV] = ()) -> None:
        request = DecodeRequest(
            prompt.ids,
            plan_offsets([shapes.chunk_len] * n_chunks, "sequential", chunk_len=shapes.chunk_len, multiple=block),
            model.spec.family.block_len,
            chunk_ids=[chunk.tolist() for chunk in chunks[:n_chunks]],
            chunk_kv=chunk_kv,
        )
        n_done = sum(1 for _ in islice(decoder.steps([request]), n_steps))
        if n_done != n_steps:
            raise RuntimeError(f"{decoder.name} ended after {n_done} steps; expected {n_steps}")

    def make_draft() -> None:
        if draft:
            decode(static_kv, len(kv[:DRAFT_CHUNKS]), 1, kv[:DRAFT_CHUNKS])

    scorers: list[CandidateScorer] = []  # the latest one last

    def score_question() -> None:
        at_once = len(scoring.estimator.readings(prompt.content))
        scorers[:] = [CandidateScorer(model, prompt, kv, draft_len=len(draft), at_once=at_once)]
        scorers[-1].s_i(scoring.estimator)

    def score_draft() -> None:
        if draft:
            scorers[-1].s_p([draft] * len(kv))

    with tempfile.TemporaryDirectory(prefix="pdllm-bench-") as folder:
        store = LMDBStore.open(folder, kv_dtype="bfloat16")
        try:
            store.register(fingerprint)
            store.put(fingerprint, encoded)
            runs: dict[str, Callable[[], object]] = {
                "load": lambda: [store.load(meta.chunk_id) for meta, _ in encoded],
                "s_i": score_question,
                "draft": make_draft,
                "s_p": score_draft,
                "static_kv": lambda: decode(static_kv, shapes.n_chunks, shapes.steps, kv[: shapes.n_chunks]),
                "vanilla": lambda: decode(vanilla, shapes.n_chunks, shapes.steps),
                "vanilla_long": lambda: decode(vanilla, shapes.long_chunks, shapes.steps),
            }
            kept = {name: run for name, run in runs.items() if name in wanted}
            return take_turns(kept, repeat, device=model.backbone.device)
        finally:
            store.close()


def _comparisons(ms: Mapping[str, Sequence[float]], shapes: QueryShapes, sections: Collection[str]) -> dict[str, Any]:
    short, long = (n * shapes.chunk_len for n in (shapes.n_chunks, shapes.long_chunks))

    def per_step(name: str, key: str, context_tokens: int) -> dict[str, Any]:
        values = [value / shapes.steps for value in ms[key]]
        return {"name": name, "context_tokens": context_tokens, "steps": shapes.steps, "ms": values}

    def together(*parts: str) -> list[float]:
        return [sum(one) for one in zip(*(ms[part] for part in parts), strict=True)]

    def selecting(what: str, *parts: str) -> dict[str, Any]:
        return compare(
            f"ms, selecting among the candidates ({what}) / decoding with static_kv",
            {"name": ", ".join(parts), "candidates": shapes.candidates, "ms": together(*parts)},
            {"name": "static_kv", "context_tokens": short, "steps": shapes.steps, "ms": ms["static_kv"]},
        )

    unit = "ms per denoising step, vanilla / static_kv (gathering its KV included)"
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "decode": lambda: compare(
            f"{unit}, over the same chunks",
            per_step("vanilla", "vanilla", short),
            per_step("static_kv", "static_kv", short),
        ),
        "long_context": lambda: compare(
            f"{unit}, over many chunks / over few",
            per_step("vanilla", "vanilla_long", long),
            per_step("static_kv", "static_kv", short),
        ),
        "question": lambda: {
            **compare(
                "ms of a whole question, vanilla over the long context / ours (candidates read, draft, scoring, "
                "decoding)",
                {"name": "vanilla", "context_tokens": long, "steps": shapes.steps, "ms": ms["vanilla_long"]},
                {"name": ", ".join(PARTS), "context_tokens": short, "steps": shapes.steps, "ms": together(*PARTS)},
            ),
            "parts_ms": {part: Spread.of(ms[part]).as_dict() for part in PARTS},
        },
        "scoring": lambda: {**selecting("all of it", *SELECTING), "s_i": selecting("s_I alone", "s_i")},
    }
    return {name: makers[name]() for name in SECTIONS if name in sections}
