"""Options of a question, checked once, up front."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pdllm_rag.decoding import CommitRule, Decoder, Sampling, kinds
from pdllm_rag.models.families import Family
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.placement import MODES
from pdllm_rag.policies import POLICIES
from pdllm_rag.stages import Choice, check_choice


@dataclass(frozen=True)
class AskOptions:
    """Options of one question.

    Attributes:
        k: most chunks that the model reads.
        candidates: chunks of the first stage that are scored.
        first_stage: what proposes them: "bm25"; "sketch", mean keys (`sketches`); "fusion" of both; or one's own: an
            object with `search` as `first_stage.FirstStage` has it, or a function (text, n) -> hits (`foreign`); or a
            list of such, of which the ranks are fused (`fusion`), as ["bm25", from_langchain(retriever)].
        rank_weight: how much the first stage's order counts: a candidate's score is s - rank_weight * ln(its rank), in
            nats per question token. 0 leaves only s; about 0.5 suits a first stage that is better than BM25.
        score_window: chunks whose score lies more than this below the best one's are not read (nats per question
            token); infinity reads all k, None takes the family's.
        policy: where their KV comes from (`policies`).
        chunk_rows: most rows of a chunk that are read, those that the question attends to most (`sparsity`); None
            reads all.
        placement: where they stand (`placement`).
        decoder: what fills the answer (`decoding.kinds`): "static_kv"; "vanilla" encodes the chunks anew at each step.
        decoder_options: that decoder's own options.
        max_new_tokens: most answer tokens.
        threshold: confidence above which a proposal is committed at once.
        steps: most denoising steps per block, or None.
        temperature, top_p, seed: sampling; temperature 0 is deterministic.
        stop: strings that end the answer.
        filter: metadata that a document must have (`doc_id` and `source` count as metadata).
        abstain: withhold an answer that the documents do not support.
        min_support: least `AnswerStats.support` of an answer that is not withheld, a probability from 0 (none is
            withheld) to 1 (all but certain ones are); None is 0.5 where the family is calibrated, and withholds
            nothing where it is not. What a choice costs: docs/quality.md.
        cancel: set it from another thread to stop.
    """

    k: int = 4
    candidates: int = 8
    first_stage: Choice = "bm25"
    rank_weight: float = 0.0
    score_window: float | None = None
    policy: str = "independent"
    chunk_rows: int | None = None
    placement: str = "sequential"
    decoder: str = "static_kv"
    decoder_options: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 32
    threshold: float = 0.9
    steps: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    filter: Mapping[str, Any] = field(default_factory=dict)
    abstain: bool = True
    min_support: float | None = None
    cancel: threading.Event | None = None

    def __post_init__(self) -> None:
        for name in ("k", "candidates", "max_new_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number of 1 or more")
        for name, known in (("policy", POLICIES), ("placement", MODES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        check_choice(self.first_stage)
        rows = self.chunk_rows
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ValueError(f"chunk_rows is {rows!r}; expected a whole number of 1 or more, or None")
        kinds.check(self.decoder, self.decoder_options, self)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop is {self.stop!r}; expected non-empty strings")
        if not 0 <= self.rank_weight < math.inf:
            raise ValueError(f"rank_weight is {self.rank_weight!r}; expected a finite number of 0 or more")
        if self.score_window is not None and not self.score_window >= 0:
            raise ValueError(f"score_window is {self.score_window!r}; expected a number of 0 or more, or None")
        if self.min_support is not None and not 0 <= self.min_support <= 1:
            raise ValueError(f"min_support is {self.min_support!r}; expected a number from 0 to 1, or None")
        CommitRule(self.threshold, self.steps)
        self.sampling  # noqa: B018  (checks them)

    def with_changes(self, changes: Mapping[str, Any]) -> AskOptions:
        """A copy with some options changed.

        Raises:
            ValueError: an unknown option or a bad value.
        """
        known = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; expected one of {', '.join(sorted(known))}")
        return replace(self, **changes)

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(self.temperature, self.seed, self.top_p)

    @property
    def policy_name(self) -> str:
        """The cache policy in words for statistics: what it is, and of how many rows a chunk."""
        return self.policy if self.chunk_rows is None else f"{self.policy}, {self.chunk_rows} rows a chunk"

    def window_for(self, family: Family) -> float | None:
        """The score window in force: the one asked for, else the family's."""
        return family.score_window if self.score_window is None else self.score_window

    @property
    def decoder_key(self) -> tuple[object, ...]:
        """All that `make_decoder` goes by: questions with equal ones may share a decoder."""
        return self.decoder, tuple(sorted(self.decoder_options.items())), self.threshold, self.steps

    def make_decoder(self, model: LoadedModel) -> Decoder:
        """The decoder that these options name.

        Raises:
            ValueError: it does not run on this model.
        """
        return kinds.make_decoder(self.decoder, model, CommitRule(self.threshold, self.steps), self.decoder_options)
