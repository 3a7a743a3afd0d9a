"""What decoding costs, by a step and by a question, against vanilla, autoregressive and prefix-cached decoding.

Everything in one run and on one machine. What is compared takes turns, and a ratio is taken within a round:
- step: static-KV over a few selected chunks against vanilla, which encodes the whole context anew;
- question: load, draft, score and all steps of ours against all of vanilla's; vanilla's steps are alike, so a few are
  timed and multiplied;
- autoregressive: a model of the same shape that reads the same selected chunks as a prompt and writes as many tokens;
- prefix cached: the whole context's KV is kept, and the canvas attends to all of it in the same captured step; a
  question first costs one forward over everything;
- batch: several questions, each with chunks of its own, in one step, against the floor of that step.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from pdllm_store import ChunkId, LMDBStore

from pdllm_rag.bench.autoregressive import KINDS, Autoregressive
from pdllm_rag.bench.ceilings import Ceilings, describe_device, measure_ceilings
from pdllm_rag.bench.contenders import cannot_run
from pdllm_rag.bench.decode_sides import (
    DecodeSizes,
    StaticSteps,
    StepCost,
    VanillaStep,
    check_family,
    random_kv,
    request_over,
    step_rounds,
)
from pdllm_rag.bench.device_clock import idle_ms, once_ms
from pdllm_rag.bench.machine import Spread, describe
from pdllm_rag.bench.question import PARTS, Question, fill_store
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.pool import KVPool

SECTIONS = ("step", "question", "autoregressive", "prefix", "batch")
MEMORY_SHARE = 0.4  # of a GPU's free memory that one copy of a prefix cache may take
FORWARDS = 9  # of a static-KV run whose steps are timed
MANY_BYTES = 1 << 18  # of a token's KV: with more, fewer candidates are scored
MAX_S = 3.0


def bench_decode(
    model: LoadedModel,
    *,
    contexts: Sequence[int] = (8192, 16384, 32768),
    batches: Sequence[int] = (1, 2, 4, 8),
    sizes: DecodeSizes | None = None,
    sections: Sequence[str] = SECTIONS,
    folder: str | None = None,
    on_part: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure decoding with a model.

    Args:
        contexts: tokens that vanilla encodes at every step, and of which our side selects.
        batches: questions that are decoded together.
        sections: of `SECTIONS`.
        folder: where the store is made, and removed again; None for the system's own.
        on_part: gets all figures so far, after each part.

    Raises:
        ValueError: a block-causal family, an unknown section, a bad size.
    """
    sizes = sizes or DecodeSizes()
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        raise ValueError(f"section {unknown[0]!r} is unknown; expected some of {', '.join(SECTIONS)}")
    if any(context < sizes.context_rows for context in contexts):
        raise ValueError(f"contexts are {list(contexts)}; expected at least the {sizes.context_rows} rows selected")
    check_family(model)
    device, backbone = model.backbone.device, model.backbone
    ceilings = measure_ceilings(device, backbone.dtype)
    block_len = model.spec.family.block_len
    figures: dict[str, Any] = {
        "machine": {**describe(model)._asdict(), **describe_device(device, backbone.dtype)},
        "model": model.spec.name,
        "repeat": sizes.repeat,
        "sizes": {**asdict(sizes), "answer_rows": block_len, "layers": backbone.n_layers},
        "ceilings": ceilings._asdict(),
        "decoder": {},
        "contexts": [{"context": context} for context in contexts],
    }

    def done() -> None:
        if on_part:
            on_part(figures)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what a part kept for itself counts as free for the next

    bench = _Bench(model, sizes, ceilings)
    figures["decoder"] = {"backend": bench.static.decoder.backend}
    if {"step", "question", "prefix"} & {*sections}:
        for row in figures["contexts"]:
            row["step"] = bench.step(row["context"])
            done()
    if "autoregressive" in sections:
        figures["autoregressive"] = bench.autoregressive()
        done()
    if "prefix" in sections:
        for row in figures["contexts"]:
            row["prefix_cached"] = bench.prefix_cached(row["context"], row["step"])
            done()
    if "batch" in sections:
        figures["batch"] = [bench.batch(count) for count in batches]
        done()
    if "question" in sections:
        with tempfile.TemporaryDirectory(prefix="pdllm-bench-", dir=folder) as temporary:
            store, chunk_ids = fill_store(model, temporary, sizes)
            with closing(store):
                for row in figures["contexts"]:
                    row["question"] = bench.question(row["context"], row["step"], store, chunk_ids)
                    done()
    return figures


def default_candidates(model: LoadedModel) -> int:
    """Chunks that a question scores at most: 32, or 16 where their KV is large."""
    return 16 if StepCost.of(model).kv_row_bytes > MANY_BYTES else DecodeSizes.candidates


class _Bench:
    """What the parts share: the model, and one question over selected chunks."""

    def __init__(self, model: LoadedModel, sizes: DecodeSizes, ceilings: Ceilings) -> None:
        self._model, self._sizes, self._ceilings = model, sizes, ceilings
        self._device = model.backbone.device
        self._cost = StepCost.of(model)
        self.static = self._static(1)
        VanillaStep(model, sizes.context_rows, sizes)()  # compiles what every vanilla step runs

    def step(self, context: int) -> dict[str, Any]:
        """Static-KV and vanilla steps in turns."""
        vanilla = VanillaStep(self._model, context, self._sizes)
        n_rounds, long_ms = step_rounds(vanilla, self._device, self._sizes.repeat)
        self.static.gaps_ms(2)
        ours_ms: list[float] = [self._gap(self.static) for _ in long_ms]
        for _ in range(n_rounds):
            long_ms.append(once_ms(vanilla, self._device))
            ours_ms.append(self._gap(self.static))
        floor = self._floor(1, self._sizes.context_rows)
        return {
            "static_kv": {"context_rows": self._sizes.context_rows, "ms": Spread.of(ours_ms).as_dict(), "floor": floor},
            "vanilla": {"context_rows": context, "ms": Spread.of(long_ms).as_dict(), "steps_timed": len(long_ms)},
            **_speed_up(long_ms, ours_ms),
        }

    def question(
        self, context: int, step: dict[str, Any], store: LMDBStore, chunk_ids: Sequence[ChunkId]
    ) -> dict[str, Any]:
        """Whole questions, candidates on the device or in the page cache, against as many vanilla steps."""
        sizes = self._sizes
        candidates = chunk_ids[: min(len(chunk_ids), max(sizes.selected, context // sizes.chunk_len))]
        kv_bytes = len(candidates) * sizes.chunk_len * self._cost.kv_row_bytes
        pools = {
            "warm": KVPool.beside(self._model.backbone, store, budget_bytes=2 * kv_bytes),
            "page_cache": KVPool.beside(self._model.backbone, store, budget_bytes=0),
        }
        found: dict[str, Any] = {"candidates": len(candidates)}
        for key, few in (("all_steps", None), ("few_steps", sizes.few_steps)):
            question = Question(self._model, candidates, sizes, steps=few)
            asked: dict[str, list[dict[str, float]]] = {name: [] for name in pools}
            for turn in range(sizes.repeat + 1):
                for name, pool in pools.items():
                    ms = question.ask(pool)
                    if turn:
                        asked[name].append(ms)
            n_forwards = question.n_forwards
            vanilla_ms = n_forwards * step["vanilla"]["ms"]["median"]
            found[key] = {"nfe": n_forwards, "vanilla_ms": vanilla_ms}  # of as many steps
            for name, all_ms in asked.items():
                total = Spread.of([ms["total"] for ms in all_ms])
                found[key][name] = {
                    "ms": total.as_dict(),
                    "parts_ms": {part: Spread.of([ms[part] for ms in all_ms]).as_dict() for part in PARTS},
                    "speed_up": vanilla_ms / total.median,
                }
        return {**found, "speed_up": found["all_steps"]["warm"]["speed_up"]}

    def autoregressive(self) -> dict[str, Any]:
        """The same shape, autoregressive, over the selected chunks and the question as a prompt."""
        sizes, n_tokens = self._sizes, self._block_len
        prompt_len = sizes.context_rows + sizes.question_rows
        cost = self._cost
        n_bytes = cost.weight_bytes + prompt_len * cost.kv_row_bytes
        flops = cost.row_flops + cost.head_flops + cost.pair_flops * prompt_len
        found: dict[str, Any] = {
            "prompt_rows": prompt_len,
            "tokens": n_tokens,
            "step_floor_ms": self._ceilings.floor_s(n_bytes, flops) * 1000,
            "kinds": {},
            "skipped": {},
        }
        for kind in KINDS:
            try:
                side = Autoregressive(self._model, prompt_len=prompt_len, n_steps=n_tokens, kind=kind)
                ms = idle_ms(
                    {"prefill": side.prefill, "decode": side.decode}, sizes.repeat, device=self._device, max_s=MAX_S
                )
            except cannot_run() as error:
                found["skipped"][kind] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                continue
            found["kinds"][kind] = {
                "prefill_ms": Spread.of(ms["prefill"]).as_dict(),
                "decode_ms": Spread.of(ms["decode"]).as_dict(),
                "step_ms": Spread.of([value / n_tokens for value in ms["decode"]]).as_dict(),
                "total_ms": Spread.of([a + b for a, b in zip(ms["prefill"], ms["decode"], strict=True)]).as_dict(),
            }
        totals = [one["total_ms"]["median"] for one in found["kinds"].values()]
        few = self._static(1, steps=sizes.few_steps)
        for key, ours in (("static_kv", self.static), ("static_kv_few_steps", few)):
            whole = Spread.of(ours.whole_ms(self._device, sizes.repeat))
            found[key] = {"what": "gathering and all steps", "ms": whole.as_dict()}
            if totals:
                found[key]["speed_up"] = min(totals) / whole.median
        return found

    def prefix_cached(self, context: int, step: dict[str, Any]) -> dict[str, Any]:
        """A step over the KV of the whole context; its question begins with one forward over everything."""
        n_bytes = context * self._cost.kv_row_bytes
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            if n_bytes > MEMORY_SHARE * free:
                return {"skipped": f"{n_bytes} bytes of KV, twice, do not fit the {free} bytes that are free"}
        kv = random_kv(self._model, context)
        steps = StaticSteps(self._model, [request_over(self._model, [kv], self._sizes)])
        steps.gaps_ms(2)
        cached, ours = [], []
        for _ in range(self._sizes.repeat):
            cached.append(self._gap(steps))
            ours.append(self._gap(self.static))
        first_ms = step["vanilla"]["ms"]["median"]
        return {
            "ms": Spread.of(cached).as_dict(),
            "floor": self._floor(1, context),
            "question_ms": first_ms + (self._block_len - 1) * Spread.of(cached).median,
            **_speed_up(cached, ours),
        }

    def batch(self, n_sequences: int) -> dict[str, Any]:
        """One step of several questions."""
        steps = self._static(n_sequences)
        steps.gaps_ms(2)
        gaps = [self._gap(steps) for _ in range(self._sizes.repeat)]
        step_ms = Spread.of(gaps)
        floor = self._floor(n_sequences, self._sizes.context_rows)
        return {
            "questions": n_sequences,
            "step_ms": step_ms.as_dict(),
            "tokens_per_s": n_sequences * 1000 / step_ms.median,
            "floor": floor,
            "over_floor": step_ms.median / floor["ms"],
        }

    def _static(self, n_sequences: int, *, steps: int | None = None) -> StaticSteps:
        """Questions over chunks of their own."""
        sizes = self._sizes
        requests = []
        for index in range(n_sequences):
            kvs = [
                random_kv(self._model, sizes.chunk_len, seed=index * sizes.selected + number)
                for number in range(sizes.selected)
            ]
            requests.append(request_over(self._model, kvs, sizes, seed=index))
        return StaticSteps(self._model, requests, steps=steps)

    @property
    def _block_len(self) -> int:
        """Tokens of an answer."""
        return self._model.spec.family.block_len

    def _gap(self, steps: StaticSteps) -> float:
        """Median milliseconds of a run's steps."""
        return median(steps.gaps_ms(FORWARDS))

    def _floor(self, n_sequences: int, context_rows: int) -> dict[str, Any]:
        return self._cost.floor(
            self._ceilings,
            n_sequences=n_sequences,
            context_rows=context_rows,
            canvas_rows=self._sizes.question_rows + self._block_len,
            answer_rows=self._block_len,
        )


def _speed_up(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Their time over ours, within a round."""
    ratio = Spread.of([a / b for a, b in zip(theirs, ours, strict=True)])
    return {"speed_up": ratio.median, "speed_up_spread": ratio.as_dict()}
