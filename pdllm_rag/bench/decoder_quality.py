"""What decoders answer, at how many forward passes and how fast, over the same chunks of the same questions.

- each question is retrieved for once; every setting then reads the same chunks, in turns, and never abstains;
- differences are paired with the baseline, question by question, with a bootstrap interval. The baseline is plain
  denoising over the stored chunks, one token a pass;
- tokens count up to the first end of the answer, which is not counted itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from pdllm_rag.answer import Answer
from pdllm_rag.bench.machine import Spread, describe
from pdllm_rag.config import AskOptions
from pdllm_rag.decoding.kinds import KINDS
from pdllm_rag.engine import RagEngine
from pdllm_rag.evaluation.metrics import Grade, grade, mean, proportion
from pdllm_rag.evaluation.qa import Question

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """A decoder and how it is used: options of a question (`AskOptions`) and of the decoder itself."""

    decoder: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    decoder_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The setting in words, as the command line takes it."""
        pairs = {**self.changes, **self.decoder_options}.items()
        return " ".join([self.decoder, *(f"{name}={value}" for name, value in pairs)])

    def options(self, options: AskOptions) -> AskOptions:
        """Options of a question that ask for it.

        Raises:
            ValueError: no such decoder or option, a bad value, or a clash.
        """
        own = {"decoder": self.decoder, "decoder_options": self.decoder_options, "abstain": False}
        return options.with_changes({**own, **self.changes})


BASELINE = Setting("static_kv", {"threshold": 1.0})
CHOSEN: dict[str, tuple[Setting, ...]] = {
    "static_kv": (Setting("static_kv"),),
    "vanilla": (Setting("vanilla", {"threshold": 1.0}), Setting("vanilla")),
    "fast_dllm": (
        Setting("fast_dllm", {}, {"cache": "prefix"}),
        Setting("fast_dllm", {}, {"cache": "dual"}),
        Setting("fast_dllm", {}, {"cache": "dual", "factor": 1.0}),
        Setting("fast_dllm", {}, {"cache": "dual", "context": "dense"}),
    ),
}


def default_settings(engine: RagEngine) -> list[Setting]:
    """Of every decoder that runs on the engine's model, those in `CHOSEN` or else its defaults."""
    found: list[Setting] = []
    for name, kind in KINDS.items():
        if reason := kind.why_not(engine.model):
            logger.warning("decoder %r is left out: %s", name, reason)
        else:
            found += CHOSEN.get(name, (Setting(name),))
    return found


def bench_quality(
    engine: RagEngine,
    questions: Sequence[Question],
    settings: Sequence[Setting],
    options: AskOptions,
    *,
    on_question: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Ask every answerable question by the baseline and by every setting.

    Args:
        options: of the questions; a setting's changes win.
        on_question: called after each question.

    Raises:
        ValueError: no answerable question, a bad setting; PdllmError: as `RagEngine.answer`.
    """
    asked = [question for question in questions if question.answers]
    if not asked:
        raise ValueError(f"none of the {len(questions)} questions has an answer; expected at least one that has")
    ways = {setting.label: setting.options(options) for setting in (BASELINE, *settings)}
    answers: dict[str, list[Answer]] = {label: [] for label in ways}
    for number, question in enumerate(asked):
        read = _read(engine, question, options)
        if not number:
            for chosen in ways.values():
                engine.answer(question.text, options=chosen, **read)  # what comes first pays for what all share
        for label, chosen in ways.items():
            answers[label].append(engine.answer(question.text, options=chosen, **read))
        on_question()
    base = answers[BASELINE.label]
    return {
        "machine": describe(engine.model)._asdict(),
        "model": engine.model.spec.name,
        "repeat": 1,
        "baseline": BASELINE.label,
        "n": len(asked),
        "quality": [{"setting": label, **_figures(asked, found, base)} for label, found in answers.items()],
    }


def _read(engine: RagEngine, question: Question, options: AskOptions) -> dict[str, Any]:
    """What every setting reads for a question."""
    if question.context is not None:
        return {"context": question.context}
    found = engine.retrieve(
        question.text,
        options.k,
        candidates=options.candidates,
        first_stage=options.first_stage,
        score_window=options.score_window,
    )
    return {"chunk_ids": [chunk.ref.chunk_id for chunk in found]}


def _figures(asked: Sequence[Question], found: Sequence[Answer], base: Sequence[Answer]) -> dict[str, Any]:
    def graded(answers: Sequence[Answer]) -> list[Grade]:
        return [
            grade(answer.text if answer.stats.supported else "", question.answers)
            for question, answer in zip(asked, answers, strict=True)
        ]

    def step_ms(answers: Sequence[Answer]) -> float:
        return sum(a.stats.ms["decode"] for a in answers) / sum(a.stats.nfe for a in answers)

    grades, before = graded(found), graded(base)
    pairs = list(zip(grades, before, strict=True))
    differences = {
        "accuracy": mean([float(a.correct) - float(b.correct) for a, b in pairs]),
        "f1": mean([a.f1 - b.f1 for a, b in pairs]),
    }
    accuracy, f1 = proportion([one.correct for one in grades]), mean([one.f1 for one in grades])
    assert accuracy
    assert f1
    n_passes = sum(answer.stats.nfe for answer in found)
    policy_ratio, step_ratio = sum(a.stats.nfe for a in base) / n_passes, step_ms(base) / step_ms(found)
    return {
        "accuracy": accuracy.as_dict(),
        "f1": f1.as_dict(),
        "against_baseline": {name: one.as_dict() for name, one in differences.items() if one},
        "same_answers": fmean(float(a.text == b.text) for a, b in zip(found, base, strict=True)),
        "nfe": Spread.of([float(answer.stats.nfe) for answer in found]).as_dict(),
        "tokens_per_nfe": sum(answer.stats.tokens for answer in found) / n_passes,
        "ms": Spread.of([answer.stats.ms["total"] for answer in found]).as_dict(),
        "step_ms": step_ms(found),
        "policy_ratio": policy_ratio,
        "step_ratio": step_ratio,
        "speed_up": policy_ratio * step_ratio,
    }
