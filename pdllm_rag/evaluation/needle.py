"""Needles in haystacks: at which lengths and depths an answer is found, and what missed it where it is not.

- "chunked": the haystack is prefilled once in chunks, a needle changes one chunk of it, and the question goes through
  the engine as any other: first stage, scores, the k best chunks, decoding over their stored KV;
- "dense": haystack and question are one prompt behind one BOS, which every denoising step encodes anew;
- both are asked the same needles in the same text (that of the first chunk_len for dense);
- a hit is an answer that holds the needle's value, whole. Answers are never withheld; how many hits the engine would
  have withheld for lack of support is counted apart.

Where the chunks are encoded apart, a needle's depth moves it among the chunks that are read and nowhere else.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pdllm_rag.attention import causal_block
from pdllm_rag.config import AskOptions
from pdllm_rag.decoding import CommitRule, DecodeRequest, VanillaDecoder
from pdllm_rag.engine import RagEngine
from pdllm_rag.evaluation.haystack import Haystack, Hidden
from pdllm_rag.evaluation.haystack_store import HaystackStore
from pdllm_rag.evaluation.metrics import contained, proportion
from pdllm_rag.evaluation.needles import TASKS
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.placement import plan_offsets
from pdllm_rag.retrieval import is_near
from pdllm_rag.support import says_nothing
from pdllm_rag.transcript import Transcript

logger = logging.getLogger(__name__)

MODES = ("chunked", "dense")
# What missed a needle: its chunk was no candidate; was not among the k best; was too far below the best, or did not fit
# the window; was read, but nothing was said to be found; was read, and something else was said.
STAGES = ("first_stage", "scoring", "window", "refused", "reading")

DETAILS = ("hit", "missed", "retrieved", "support", "tokens", "n_computed", "ms")  # of a trial, for the details file


@dataclass(frozen=True)
class NeedleGrid:
    """What is asked.

    Attributes:
        tasks: kinds of needles (`needles.TASKS`).
        lengths: tokens of a haystack.
        depths: 0 (at the beginning) to 1 (at the end).
        trials: needles for each task, length and depth.
        chunk_lens: tokens of a chunk, BOS included.
        bos: whether chunks begin with a BOS; both may be measured.
        dense_max: longest haystack that is asked densely, in tokens; None takes the model's window.
        dense_trials: needles for each task, length and depth that are asked densely, the first ones; None takes all.
    """

    tasks: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float]
    trials: int
    chunk_lens: Sequence[int]
    bos: Sequence[bool] = (True,)
    modes: Sequence[str] = ("chunked",)
    dense_max: int | None = None
    dense_trials: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("tasks", TASKS), ("modes", MODES)):
            unknown = [value for value in getattr(self, name) if value not in known]
            if unknown:
                raise ValueError(f"{name} has {unknown[0]!r}; expected some of {', '.join(known)}")
        for name in ("tasks", "lengths", "depths", "chunk_lens", "bos", "modes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {list(values)}; expected one or more, each once")
        if self.trials < 1 or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(
                f"trials is {self.trials} and depths are {list(self.depths)}; expected 1 or more, and 0 to 1 each"
            )
        if min(self.lengths) < max(self.chunk_lens):
            raise ValueError(
                f"haystacks of {min(self.lengths)} tokens in chunks of {max(self.chunk_lens)}; expected each haystack "
                "to be one chunk or more"
            )

    def series(self) -> list[Series]:
        """Every way of asking: chunked for each chunk length and anchors, then dense."""
        chunked = [Series("chunked", chunk_len, bos) for chunk_len in self.chunk_lens for bos in self.bos]
        dense = [Series("dense", self.chunk_lens[0], True)]
        return (chunked if "chunked" in self.modes else []) + (dense if "dense" in self.modes else [])

    def lengths_of(self, series: Series, window: int) -> list[int]:
        """The lengths that a way of asking is asked at, ascending; `window` is the model's, in positions."""
        most = window if self.dense_max is None else self.dense_max
        return [length for length in sorted(self.lengths) if series.mode != "dense" or length <= most]

    def trials_of(self, series: Series) -> int:
        """Needles for each task, length and depth of a way of asking."""
        most = self.trials if self.dense_trials is None else self.dense_trials
        return min(self.trials, most) if series.mode == "dense" else self.trials

    def n_trials(self, window: int) -> int:
        """Questions in all."""
        n_needles = sum(len(self.lengths_of(series, window)) * self.trials_of(series) for series in self.series())
        return n_needles * len(self.tasks) * len(self.depths)


@dataclass(frozen=True)
class Series:
    """One way of asking. `chunk_len` of "dense" is that of the text only."""

    mode: str
    chunk_len: int
    bos: bool


@dataclass(frozen=True)
class Trial:
    """One needle and what became of it.

    Attributes:
        depth: as asked for; `hidden.depth` is where it came to lie.
        hit: the answer holds the needle's value.
        missed: the stage of `STAGES` that missed it, or None.
        retrieved: its chunk was read; None where everything is read ("dense").
        support: probability that the documents hold an answer, by the engine's account, or None.
        tokens: of the haystack.
        n_computed: chunks that were encoded for it.
        ms: of the question, encoding of the needle's chunk left out.
    """

    series: Series
    task: str
    length: int
    depth: float
    hidden: Hidden
    answer: str
    hit: bool
    missed: str | None
    retrieved: bool | None
    support: float | None
    tokens: int
    n_computed: int
    ms: float

    @property
    def withheld(self) -> bool:
        """Whether the engine would have withheld the answer."""
        return self.support is not None and self.support < 0.5

    def as_dict(self) -> dict[str, Any]:
        """One line of the details file."""
        needle = self.hidden.needle
        found = {name: getattr(self, name) for name in DETAILS}
        place = {"task": self.task, "length": self.length, "depth": self.depth, "actual_depth": self.hidden.depth}
        return {**vars(self.series), **place, **needle._asdict(), "answer": self.answer, **found}


def run_trials(model: LoadedModel, grid: NeedleGrid, options: AskOptions) -> Iterator[Trial]:
    """Ask every needle of a grid; `options` are those of chunked questions, of which dense ones take the decoding.

    Raises:
        ValueError: a haystack cannot be made; PdllmError: as `RagEngine.answer`.
    """
    options = options.with_changes({"abstain": False})
    window = model.spec.family.window
    for series in grid.series():
        lengths = grid.lengths_of(series, window)
        if skipped := sorted(set(grid.lengths) - set(lengths)):
            logger.warning("haystacks of %s tokens are longer than is asked densely; they are left out", skipped)
        run = _dense if series.mode == "dense" else _chunked
        yield from run(model, grid, series, lengths, options)


def _haystacks(model: LoadedModel, grid: NeedleGrid, series: Series, lengths: Sequence[int]) -> Iterator[Haystack]:
    """Those of one filler after another, short ones first: each can keep what it shares with the one before."""

    def count(text: str) -> int:
        return len(model.tokenizer.encode(text))

    for filler in dict.fromkeys(TASKS[task].filler for task in grid.tasks):
        for length in lengths:
            for task in grid.tasks:
                if TASKS[task].filler is filler:
                    yield Haystack(task, length, series.chunk_len, count, seed=grid.seed)


def _hidden(haystack: Haystack, grid: NeedleGrid, series: Series) -> Iterator[tuple[float, Hidden]]:
    for depth in grid.depths:
        for trial in range(grid.trials_of(series)):
            yield depth, haystack.hide(depth, trial)


def _chunked(
    model: LoadedModel, grid: NeedleGrid, series: Series, lengths: Sequence[int], options: AskOptions
) -> Iterator[Trial]:
    with (
        tempfile.TemporaryDirectory(prefix="pdllm-needle-") as folder,
        RagEngine.open(folder, model, chunk_len=series.chunk_len, options=options) as engine,
    ):
        stored = HaystackStore(engine, bos=series.bos)
        for haystack in _haystacks(model, grid, series, lengths):
            stored.fill(haystack)
            for depth, hidden in _hidden(haystack, grid, series):
                n_computed = stored.hide(hidden.part)
                yield ask(engine, haystack, hidden, series=series, depth=depth, n_computed=n_computed)


def ask(
    engine: RagEngine,
    haystack: Haystack,
    hidden: Hidden,
    *,
    series: Series,
    depth: float,
    n_computed: int,
) -> Trial:
    """Ask for a needle that is in the engine's store, with the engine's options."""
    needle, wanted = hidden.needle, HaystackStore.doc_id(hidden.part)
    answer = engine.answer(needle.question)
    hit = contained(answer.text, needle.value)
    read = {citation.doc_id for citation in answer.citations}
    missed = None if wanted in read else _unread(engine, needle.question, wanted, answered=bool(read))
    retrieved = missed is None
    if retrieved and not hit:
        missed = "reading" if answer.stats.supported else "refused"
    return Trial(
        series=series,
        task=haystack.task,
        length=haystack.n_tokens,
        depth=depth,
        hidden=hidden,
        answer=answer.text,
        hit=hit,
        missed=None if hit else missed,
        retrieved=retrieved,
        support=answer.stats.support,
        tokens=sum(info.n_tokens for info in engine.documents()),
        n_computed=n_computed,
        ms=answer.stats.ms["total"],
    )


def _unread(engine: RagEngine, question: str, wanted: str, *, answered: bool) -> str | None:
    """What left a chunk out, or None if it was read: an answer that says nothing does not list what it read."""
    options = engine.options
    found = engine.retrieve(question)
    window = options.window_for(engine.model.spec.family)
    for chunk in found:
        if chunk.ref.doc_id == wanted:
            near = is_near(chunk.score, found[0].score, window)
            return "window" if answered or not near else None
    candidates = engine.retrieve(question, k=max(options.k, options.candidates))
    return "scoring" if any(chunk.ref.doc_id == wanted for chunk in candidates) else "first_stage"


def _dense(
    model: LoadedModel, grid: NeedleGrid, series: Series, lengths: Sequence[int], options: AskOptions
) -> Iterator[Trial]:
    for haystack in _haystacks(model, grid, series, lengths):
        for depth, hidden in _hidden(haystack, grid, series):
            text = haystack.text_with(hidden.part)
            started = time.perf_counter()
            ids = [model.spec.bos_id, *model.tokenizer.encode(text)]
            answer = dense_answer(model, ids, hidden.needle.question, options)
            ms = (time.perf_counter() - started) * 1000
            hit = contained(answer, hidden.needle.value)
            refused = says_nothing(answer, model.spec.family.no_answer)
            yield Trial(
                series=series,
                task=haystack.task,
                length=haystack.n_tokens,
                depth=depth,
                hidden=hidden,
                answer=answer,
                hit=hit,
                missed=None if hit else "refused" if refused else "reading",
                retrieved=None,
                support=None,
                tokens=len(ids),
                n_computed=0,
                ms=ms,
            )


def dense_answer(model: LoadedModel, context_ids: Sequence[int], question: str, options: AskOptions) -> str:
    """Answer a question over a dense prompt: context, question and answer in one sequence, encoded at every step.

    Raises:
        NumericsError: the model's logits are not finite.
    """
    prompt = model.tokenizer.render(model.spec.family.template, [{"role": "user", "content": question}])
    block = causal_block(model.spec.family) or 1
    request = DecodeRequest(
        prompt.ids,
        plan_offsets([len(context_ids)], "sequential", chunk_len=0, multiple=block),
        options.max_new_tokens,
        chunk_ids=[context_ids],
        sampling=options.sampling,
    )
    transcript = Transcript(
        model.tokenizer, model.spec.eos_ids, max_new_tokens=options.max_new_tokens, stop=options.stop
    )
    for step in VanillaDecoder(model, CommitRule(options.threshold, options.steps)).steps([request]):
        transcript.add(step)
    return transcript.text


def summary(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Figures over trials, a part for each series: of each task, of each length of it, and of each depth of that.

    `accuracy` is the share of hits with its Wilson interval, `missed` counts the other trials by stage, and `withheld`
    the hits that the engine would not have shown.

    Raises:
        ValueError: no trials.
    """
    if not trials:
        raise ValueError("no trials to summarise; expected at least one")
    parts = []
    for series in dict.fromkeys(trial.series for trial in trials):
        own = [trial for trial in trials if trial.series == series]
        part = {"tasks": _grouped(own, "task"), "lengths": _grouped(own, "task", "length")}
        parts.append({**vars(series), **part, "cells": _grouped(own, "task", "length", "depth")})
    return parts


def _grouped(trials: Sequence[Trial], *names: str) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault(tuple(getattr(trial, name) for name in names), []).append(trial)
    return [{**dict(zip(names, key, strict=True)), **_figures(some)} for key, some in groups.items()]


def _figures(trials: Sequence[Trial]) -> dict[str, Any]:
    accuracy = proportion([trial.hit for trial in trials])
    assert accuracy is not None
    missed = Counter(trial.missed for trial in trials if trial.missed is not None)
    has_retrieval = trials[0].retrieved is not None
    return {
        "n": len(trials),
        "hits": sum(trial.hit for trial in trials),
        "accuracy": accuracy.as_dict(),
        "retrieved": sum(bool(trial.retrieved) for trial in trials) if has_retrieval else None,
        "missed": {stage: missed[stage] for stage in STAGES if missed[stage]},
        "withheld": sum(trial.hit and trial.withheld for trial in trials),
        "tokens": round(statistics.median(trial.tokens for trial in trials)),
        "chunks_computed": sum(trial.n_computed for trial in trials),
        "ms": statistics.median(trial.ms for trial in trials),
    }
