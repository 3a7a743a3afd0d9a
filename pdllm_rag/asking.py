"""Questions, from text to cited answer, as streams of events.

- a question is prepared by itself (found, fitted, read), then denoised, alone or in one batch with others;
- question and answer room are reserved first; chunks are added by rank until the model's window is full;
- the sources listed are the chunks that the model read, and none when the documents do not hold the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pdllm_rag.answer import Answer, AnswerStats, ChunkCounts, Citation, best_passage, holds
from pdllm_rag.attention import causal_block
from pdllm_rag.clock import Clock
from pdllm_rag.config import AskOptions
from pdllm_rag.decoding import Canvas, Decoder, DecodeRequest, DecodeStep
from pdllm_rag.errors import ContextWindowError, GenerationCancelled, RequestError
from pdllm_rag.events import CanvasUpdate, Final, Messages, StreamEvent, TextDelta
from pdllm_rag.metadata import pages_of
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.placement import Placement, plan_offsets
from pdllm_rag.policies import check_policy, encode_jointly, rows_seen
from pdllm_rag.pool import KVPool
from pdllm_rag.reading import Found, Reading, Source
from pdllm_rag.retrieval import Selection, is_near
from pdllm_rag.sparsity import attention_received, kept_rows, sparse
from pdllm_rag.support import MIN_SUPPORT, is_too_low, says_nothing, support_probability
from pdllm_rag.transcript import Transcript

logger = logging.getLogger(__name__)

NO_SUPPORT = "The documents do not hold an answer."


@dataclass
class Prepared:
    """A question whose chunks are at hand, and how its decode goes.

    Attributes:
        request: what is to be decoded, None if there is nothing to read.
        min_support: support below which the answer is withheld; None withholds nothing.
        support: probability that the documents hold the answer, or None.
        withheld: the answer is withheld for lack of support.
    """

    text: str
    prompt: Prompt
    options: AskOptions
    decoder: Decoder
    found: Found
    ranked: Sequence[Source]
    reading: Reading
    request: DecodeRequest | None
    transcript: Transcript
    clock: Clock
    min_support: float | None
    steps: list[DecodeStep] = field(default_factory=list)
    support: float | None = None
    withheld: bool = False


def check_wanted(options: AskOptions) -> None:
    """Raises GenerationCancelled if the caller has cancelled the question before its first step."""
    if options.cancel is not None and options.cancel.is_set():
        raise cancelled(0)


def cancelled(n_steps: int) -> GenerationCancelled:
    """The error of a question that its caller stopped."""
    return GenerationCancelled(f"the answer was cancelled after {n_steps} denoising steps")


@dataclass(frozen=True)
class Asking:
    """Answers questions over chunks that `find` selects."""

    model: LoadedModel
    pool: KVPool
    chunk_len: int

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.spec.name

    def _min_support(self, options: AskOptions) -> float | None:
        """Raises RequestError if one was given, and the family has no calibration that tells support."""
        family = self.model.spec.family
        if family.support is not None:
            return (MIN_SUPPORT if options.min_support is None else options.min_support) if options.abstain else None
        if options.min_support is not None:
            raise RequestError(
                f"min_support is {options.min_support}, but family {family.name} has no calibration that tells an "
                "answer's support; leave it out, or give the family one (`Family.support`)"
            )
        return None

    def prepare(self, question: str | Messages, options: AskOptions, find: Callable[[str, Clock], Found]) -> Prepared:
        """Everything up to the first denoising step.

        Args:
            find: from the question's text to what was found.

        Raises:
            RequestError: no question, or `min_support` for a family without calibration.
            ContextWindowError: it does not fit.
            GenerationCancelled: `options.cancel` was set.
            UnfitModelError: the decoder cannot run here, or the policy means nothing for this model.
        """
        check_policy(options.policy, self.model.spec)
        clock = Clock()
        check_wanted(options)
        decoder = options.make_decoder(self.model)
        text, prompt = self.prompt(question, options)
        min_support = self._min_support(options)  # refused before anything is computed
        found = find(text, clock)
        check_wanted(options)
        ranked = self._fitting(found, prompt, options)
        reading = self._thinned(self._read(ranked, found, prompt, decoder, options, clock), prompt, options, clock)
        no_answer = self.model.spec.family.no_answer
        request = DecodeRequest(
            prompt_ids=prompt.ids,
            placement=reading.placement,
            max_new_tokens=options.max_new_tokens,
            chunk_ids=[source.token_ids for source in reading.sources],
            chunk_kv=reading.kv,
            sampling=options.sampling,
            probe_ids=self.model.tokenizer.encode(no_answer) if no_answer else (),
        )
        return Prepared(
            text=text,
            prompt=prompt,
            options=options,
            decoder=decoder,
            found=found,
            ranked=ranked,
            reading=reading,
            request=request if ranked or found.alone else None,
            transcript=Transcript(
                self.model.tokenizer,
                self.model.spec.eos_ids,
                max_new_tokens=options.max_new_tokens,
                stop=options.stop,
            ),
            clock=clock,
            min_support=min_support,
        )

    def take(self, asked: Prepared, step: DecodeStep) -> Iterator[StreamEvent]:
        """What one denoising step tells; once nothing more can come, the question's request is cancelled."""
        assert asked.request is not None
        if not asked.steps and not asked.found.alone:
            asked.support = support_probability(
                self.model.spec.family.support, step.probe, asked.found.selection.margin
            )
            asked.withheld = is_too_low(asked.support, asked.min_support)
        asked.steps.append(step)
        if asked.withheld:
            asked.transcript.nfe = step.nfe
            asked.request.cancel.set()
            return
        delta = asked.transcript.add(step)
        yield CanvasUpdate(step)
        if delta:
            yield TextDelta(delta)
        if asked.transcript.stopped:
            asked.request.cancel.set()

    def conclude(self, asked: Prepared) -> Iterator[StreamEvent]:
        """The last events, when there is nothing more to decode."""
        no_answer = self.model.spec.family.no_answer
        transcript, reading, selection = asked.transcript, asked.reading, asked.found.selection
        said = transcript.text
        supported = bool(asked.ranked) and not asked.withheld and not says_nothing(said, no_answer)
        is_empty = not said and not transcript.stopped_by_string and not asked.found.alone
        if asked.withheld or is_empty:
            said = no_answer or NO_SUPPORT
            yield TextDelta(said)
        stats = AnswerStats(
            nfe=transcript.nfe,
            tokens=len(transcript.token_ids()),
            prompt_tokens=len(asked.prompt.ids),
            context_tokens=reading.n_tokens(),
            cached_tokens=reading.n_cached(),
            ms=asked.clock.ms(),
            chunks=ChunkCounts(
                hit=len(reading.sources) - len(reading.fresh),
                recomputed=len(reading.fresh),
                candidates=selection.n_candidates,
            ),
            policy=asked.options.policy_name if asked.decoder.needs_kv else "dense",
            decoder=asked.options.decoder,
            model=self.name,
            finish_reason=transcript.finish_reason or "stop",
            supported=supported,
            support=asked.support,
            backend=asked.decoder.backend,
            min_support=asked.min_support,
            note=asked.found.note,
        )
        citations = self._cite(asked.ranked, selection, said, asked.text) if supported else ()
        yield Final(Answer(said, citations, stats, tuple(asked.steps)))

    def prompt(self, question: str | Messages, options: AskOptions) -> tuple[str, Prompt]:
        """The question's text and its templated ids.

        Raises:
            RequestError: no question; ContextWindowError: it does not fit with its answer.
        """
        if isinstance(question, bytes) or not isinstance(question, (str, Sequence)):
            raise RequestError(f"the question is a {type(question).__name__}; expected text or a list of messages")
        messages: Messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        if not messages or messages[-1].get("role") != "user":
            raise RequestError(
                f"the conversation has {len(messages)} messages and does not end with one of role 'user'; "
                "expected the question there"
            )
        if any(not isinstance(m.get("content"), str) or not isinstance(m.get("role"), str) for m in messages):
            raise RequestError(
                "a message lacks text in 'role' or 'content'; expected {'role': ..., 'content': ...} each"
            )
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"].strip()}]
        text = messages[-1]["content"]
        prompt = self.model.tokenizer.render(self.model.spec.family.template, messages)
        if not text or not prompt.content:
            raise RequestError("the question is empty; expected some words")
        window = self.model.spec.family.window
        need = self._room(prompt, options)
        if need > window:
            raise ContextWindowError(
                f"the question takes {len(prompt.ids)} tokens and its answer up to {need - len(prompt.ids)}, together "
                f"{need}; {self.name} has a window of {window}. Shorten the question or lower max_new_tokens"
            )
        return text, prompt

    def _room(self, prompt: Prompt, options: AskOptions) -> int:
        return Canvas.room(len(prompt.ids), options.max_new_tokens, self.model.spec.family)

    def _near_best(self, found: Found, options: AskOptions) -> list[Source]:
        """Sources whose score lies within the window below the best one's; rivals far below it only distract."""
        window = options.window_for(self.model.spec.family)
        scores = found.selection.scores
        if found.exact:
            return list(found.sources)
        return [s for s, score in zip(found.sources, scores, strict=True) if is_near(score, scores[0], window)]

    def _fitting(self, found: Found, prompt: Prompt, options: AskOptions) -> list[Source]:
        """Sources near the best, by rank until the window is full.

        Raises:
            ContextWindowError: not even one fits, or one of those that were asked for by id does not.
        """
        sources = self._near_best(found, options)
        family = self.model.spec.family
        room = family.window - self._room(prompt, options)
        kept: list[Source] = []
        for source in sources:
            lens = [len(s.token_ids) for s in [*kept, source]]
            if self._plan(lens, options).canvas_start > room:
                if found.exact or not kept:
                    raise ContextWindowError(
                        f"{len(kept)} of {len(sources)} chunks fit beside question and answer: {room} of "
                        f"{family.window} tokens are left for chunks, the next one has {len(source.token_ids)}. "
                        "Shorten the question, lower max_new_tokens, or give fewer chunks"
                    )
                logger.warning(
                    "%d of %d selected chunks fit the window of %d tokens; the others are left out",
                    len(kept),
                    len(sources),
                    family.window,
                )
                break
            kept.append(source)
        lens = [len(source.token_ids) for source in kept]
        n_positions = max(sum(lens), self._plan(lens, options).canvas_start)  # those of a gap count as well
        if n_positions > family.context_len:
            logger.warning(
                "%d context positions are more than the %d tokens that %s was trained on",
                n_positions,
                family.context_len,
                family.name,
            )
        return kept

    def _plan(self, lens: Sequence[int], options: AskOptions) -> Placement:
        block = causal_block(self.model.spec.family) or 1
        return plan_offsets(lens, options.placement, chunk_len=max(self.chunk_len, *lens, 1), multiple=block)

    def _read(
        self,
        ranked: Sequence[Source],
        found: Found,
        prompt: Prompt,
        decoder: Decoder,
        options: AskOptions,
        clock: Clock,
    ) -> Reading:
        """Put the sources in document order and get their KV, under the policy asked for and no other."""
        ordered = sorted(ranked, key=lambda source: source.ref)
        lens = [len(source.token_ids) for source in ordered]
        placement = self._plan(lens, options)
        if not decoder.needs_kv:
            return Reading(ordered, placement, (), ordered)
        with clock.phase("load"):
            if options.policy != "independent":
                seen = rows_seen(options.policy, self.model.spec, prompt.ids)
                ids = [source.token_ids for source in ordered]
                kv, placement = encode_jointly(self.model, ids, placement, seen)
                return Reading(ordered, placement, kv, ordered)
            absent = [s.ref.chunk_id for s in ordered if s.ref.chunk_id not in found.kv]
            acquired = self.pool.acquire(absent)
            at_hand = {**found.kv, **acquired.kv}
            computed = acquired.recomputed | found.selection.recomputed
            fresh = [source for source in ordered if source.ref.chunk_id in computed]
            return Reading(ordered, placement, [at_hand[s.ref.chunk_id] for s in ordered], fresh)

    def _thinned(self, reading: Reading, prompt: Prompt, options: AskOptions, clock: Clock) -> Reading:
        """The reading with the rows of each chunk that the question attends to, if only some are to be read."""
        if options.chunk_rows is None or not reading.kv:
            return reading
        with clock.phase("load"):
            received = attention_received(self.model, prompt.ids, reading.kv, reading.placement)
            rows = [kept_rows(one, options.chunk_rows) for one in received]
            return reading._replace(kv=[sparse(kv, kept) for kv, kept in zip(reading.kv, rows, strict=True)])

    def _cite(self, ranked: Sequence[Source], selection: Selection, answer: str, question: str) -> tuple[Citation, ...]:
        """One citation per chunk read; those whose quote holds the answer first, then by score."""
        scores = dict(zip(selection.refs, selection.scores, strict=True))
        citations = []
        for source in ranked:
            start, end = best_passage(source.text, answer, question)
            page, page_end = pages_of(source.page_ends, source.ref.char_start + start, source.text[start:end])
            citations.append(
                Citation(
                    doc_id=source.ref.doc_id,
                    ordinal=source.ref.ordinal,
                    char_start=source.ref.char_start + start,
                    char_end=source.ref.char_start + end,
                    score=scores[source.ref],
                    quote=source.text[start:end],
                    page=page,
                    page_end=page_end,
                )
            )
        return tuple(sorted(citations, key=lambda citation: not holds(citation.quote, answer)))
