"""One question, from text to cited answer, as a stream of events.

- question and answer room are reserved first; chunks are added by rank until the model's window is full;
- the sources listed are the chunks that the model read, and none when the documents do not hold the answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdllm_store import ChunkKV, ChunkRef

from pdllm_rag.answer import Answer, AnswerStats, ChunkCounts, Citation, best_passage
from pdllm_rag.clock import Clock
from pdllm_rag.config import AskOptions
from pdllm_rag.decoding import Canvas, DecodeRequest, DecodeStep, Sampling
from pdllm_rag.errors import ContextWindowError, GenerationCancelled, RequestError
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.placement import Placement, plan_offsets
from pdllm_rag.policies import encode_jointly
from pdllm_rag.pool import KVPool
from pdllm_rag.retrieval import Selection
from pdllm_rag.support import support_probability
from pdllm_rag.transcript import Transcript

logger = logging.getLogger(__name__)

NO_SUPPORT = "The documents do not hold an answer."

Messages = Sequence[Mapping[str, str]]


class TextDelta(NamedTuple):
    """Text that is final. Joined deltas are the answer."""

    text: str


class CanvasUpdate(NamedTuple):
    """One denoising step, for a live view; later text may stand before earlier text."""

    step: DecodeStep


class Final(NamedTuple):
    """The last event."""

    answer: Answer


StreamEvent = TextDelta | CanvasUpdate | Final


class Source(NamedTuple):
    """A chunk that a question may read: where it stands, its tokens, its KV (loaded when needed) and its text."""

    ref: ChunkRef
    token_ids: Sequence[int]
    text: str


class Found(NamedTuple):
    """What retrieval gave: sources best first, their selection, and KV that is already at hand."""

    sources: Sequence[Source]
    selection: Selection
    kv: Mapping[bytes, ChunkKV]


@dataclass(frozen=True)
class Asking:
    """Answers one question over chunks that `find` selects."""

    model: LoadedModel
    pool: KVPool
    name: str

    def events(
        self,
        question: str | Messages,
        options: AskOptions,
        find: Callable[[str, int, Clock], Found],
    ) -> Iterator[StreamEvent]:
        """Answer a question.

        Args:
            find: from the question's text and k to what was found.

        Raises:
            RequestError: no question; ContextWindowError: it does not fit.
            GenerationCancelled: `options.cancel` was set.
            NumericsError: the model's logits are not finite.
        """
        clock = Clock()
        text, prompt = self._prompt(question, options)
        found = find(text, options.k, clock)
        if not found.sources:
            yield from self._nothing(options, prompt, clock)
            return
        kept = self._fitting(found.sources, prompt, options)
        ordered = sorted(kept, key=lambda source: source.ref)
        lens = [len(source.token_ids) for source in ordered]
        placement = plan_offsets(lens, options.placement, chunk_len=max(lens, default=1))
        decoder = options.make_decoder(self.model)
        kv: list[ChunkKV] = []
        recomputed = set(found.selection.recomputed)
        if decoder.needs_kv:
            with clock.phase("load"):
                kv, placement, again = self._kv(ordered, found, placement, options.policy)
                recomputed.update(again)
        cancel = options.cancel or threading.Event()
        stop_decoding = threading.Event()
        no_answer = self.model.spec.family.no_answer
        request = DecodeRequest(
            prompt_ids=prompt.ids,
            placement=placement,
            max_new_tokens=options.max_new_tokens,
            chunk_ids=[source.token_ids for source in ordered],
            chunk_kv=kv,
            sampling=Sampling(options.temperature, options.seed),
            probe_ids=self.model.tokenizer.encode(no_answer) if no_answer else (),
            cancel=stop_decoding,
        )
        transcript = Transcript(
            self.model.tokenizer,
            self.model.spec.eos_ids,
            max_new_tokens=options.max_new_tokens,
            stop=options.stop,
        )
        support: float | None = None
        withheld = False
        steps: list[DecodeStep] = []
        stream = decoder.steps([request])
        while True:
            with clock.phase("decode"):
                step = next(stream, None)
            if step is None or step.finished == "cancelled":
                break
            if cancel.is_set():
                raise GenerationCancelled(f"the answer was cancelled after {step.nfe} denoising steps")
            if not steps:
                support = support_probability(self.model.spec.family.support, step.probe, found.selection.margin)
                withheld = options.abstain and support is not None and support < 0.5 and bool(kept)
            steps.append(step)
            if withheld:
                transcript.nfe = step.nfe
                break
            delta = transcript.add(step)
            yield CanvasUpdate(step)
            if delta:
                yield TextDelta(delta)
            if transcript.stopped:
                stop_decoding.set()
        said = transcript.text
        supported = bool(kept) and not withheld and bool(said) and said != no_answer
        if withheld or (not supported and not said):
            said = no_answer or NO_SUPPORT
            yield TextDelta(said)
        stats = AnswerStats(
            nfe=transcript.nfe,
            tokens=len(transcript.token_ids()),
            prompt_tokens=len(prompt.ids),
            context_tokens=sum(lens),
            ms=clock.ms(),
            chunks=ChunkCounts(
                hit=len({s.ref.chunk_id for s in ordered} - recomputed),
                recomputed=len({s.ref.chunk_id for s in ordered} & recomputed),
                candidates=found.selection.n_candidates,
            ),
            policy=options.policy,
            decoder=options.decoder,
            model=self.name,
            finish_reason=transcript.finish_reason or "stop",
            supported=supported,
            support=support,
        )
        citations = self._cite(kept, found.selection, said, text) if supported else ()
        yield Final(Answer(said, citations, stats, tuple(steps)))

    def _nothing(self, options: AskOptions, prompt: Prompt, clock: Clock) -> Iterator[StreamEvent]:
        """The answer when there is nothing to read: the filter left no document. No model work is done."""
        said = self.model.spec.family.no_answer or NO_SUPPORT
        yield TextDelta(said)
        stats = AnswerStats(
            nfe=0,
            tokens=0,
            prompt_tokens=len(prompt.ids),
            context_tokens=0,
            ms=clock.ms(),
            chunks=ChunkCounts(0, 0, 0),
            policy=options.policy,
            decoder=options.decoder,
            model=self.name,
            finish_reason="stop",
            supported=False,
            support=None,
        )
        yield Final(Answer(said, (), stats))

    def _prompt(self, question: str | Messages, options: AskOptions) -> tuple[str, Prompt]:
        messages: Messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        if not messages or messages[-1].get("role") != "user":
            raise RequestError(
                f"the conversation has {len(messages)} messages and does not end with one of role 'user'; "
                "expected the question there"
            )
        text = messages[-1].get("content", "")
        prompt = self.model.tokenizer.render(self.model.spec.family.template, messages)
        if not text.strip() or not prompt.content:
            raise RequestError("the question is empty; expected some words")
        family = self.model.spec.family
        need = Canvas.room(len(prompt.ids), options.max_new_tokens, family.block_len)
        if need > family.window:
            raise ContextWindowError(
                f"the question takes {len(prompt.ids)} tokens and its answer up to {need - len(prompt.ids)}, together "
                f"{need}; {self.name} has a window of {family.window}. Shorten the question or lower max_new_tokens"
            )
        return text, prompt

    def _fitting(self, sources: Sequence[Source], prompt: Prompt, options: AskOptions) -> list[Source]:
        """Sources by rank until the window is full."""
        family = self.model.spec.family
        room = family.window - Canvas.room(len(prompt.ids), options.max_new_tokens, family.block_len)
        kept: list[Source] = []
        for source in sources:
            lens = [len(s.token_ids) for s in [*kept, source]]
            if plan_offsets(lens, options.placement, chunk_len=max(lens)).canvas_start > room:
                logger.warning(
                    "%d of %d selected chunks fit the window of %d tokens; the others are left out",
                    len(kept),
                    len(sources),
                    family.window,
                )
                break
            kept.append(source)
        n_tokens = sum(len(source.token_ids) for source in kept)
        if n_tokens > family.context_len:
            logger.warning(
                "%d context tokens are more than the %d that %s was trained on",
                n_tokens,
                family.context_len,
                family.name,
            )
        return kept

    def _kv(
        self, ordered: Sequence[Source], found: Found, placement: Placement, policy: str
    ) -> tuple[list[ChunkKV], Placement, Collection[bytes]]:
        if policy == "joint":
            kv, placement = encode_jointly(self.model, [source.token_ids for source in ordered], placement)
            return kv, placement, ()
        absent = [s.ref.chunk_id for s in ordered if s.ref.chunk_id not in found.kv]
        acquired = self.pool.acquire(absent)
        at_hand = {**found.kv, **acquired.kv}
        return [at_hand[s.ref.chunk_id] for s in ordered], placement, acquired.recomputed

    def _cite(self, kept: Sequence[Source], selection: Selection, answer: str, question: str) -> tuple[Citation, ...]:
        scores = dict(zip(selection.refs, selection.scores, strict=True))
        citations = []
        for source in kept:
            start, end = best_passage(source.text, answer, question)
            citations.append(
                Citation(
                    doc_id=source.ref.doc_id,
                    ordinal=source.ref.ordinal,
                    char_start=source.ref.char_start + start,
                    char_end=source.ref.char_start + end,
                    score=scores[source.ref],
                    quote=source.text[start:end],
                    page=source.ref.page,
                )
            )
        needle = answer.casefold().strip()
        return tuple(sorted(citations, key=lambda citation: needle not in citation.quote.casefold()))
