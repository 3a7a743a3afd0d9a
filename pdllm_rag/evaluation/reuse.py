"""What reading reused KV costs: the same questions over the same chunks, answered in several ways.

- a question's chunks are all those of its own context, or the k best that retrieval finds; every way reads just these;
- a way is a cache policy ("dense": chunks, question and answer encoded together anew at every step), a stored dtype
  of independent KV, a placement, an order of the chunks, and whether each begins with a BOS. One way is the base; every
  other one differs from it in one factor, and is compared with it question by question;
- "document" order is the engine's. A context is a document named after its text, so that its place says nothing of
  what it holds. "rank" has the best chunk, or the first of the contexts, first, "reversed" next to the question;
- answers are never withheld.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from pdllm_store import KV_DTYPES, ChunkKV, KVDtype, codec

from pdllm_rag.attention import causal_block
from pdllm_rag.chunking import text_id
from pdllm_rag.config import AskOptions
from pdllm_rag.decoding import Canvas, DecodeRequest
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.engine import RagEngine
from pdllm_rag.errors import ContextWindowError
from pdllm_rag.evaluation.metrics import Grade, grade, proportion
from pdllm_rag.evaluation.qa import Question
from pdllm_rag.evaluation.retrieval import differences, estimates
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.placement import MODES, plan_offsets
from pdllm_rag.policies import POLICIES, encode_jointly, rows_seen
from pdllm_rag.prefill import Prefiller
from pdllm_rag.reading import Source
from pdllm_rag.transcript import Transcript

DENSE = "dense"
FACTORS: dict[str, tuple[Any, ...]] = {
    "policy": (*POLICIES, DENSE),
    "kv_dtype": KV_DTYPES,
    "placement": MODES,
    "order": ("document", "rank", "reversed"),
    "bos": (True, False),
}
TOGETHER = 8  # questions of one decode


class Way(NamedTuple):
    """One way to read the chunks of a question; see `FACTORS`."""

    policy: str = "independent"
    kv_dtype: KVDtype = "float32"
    placement: str = "sequential"
    order: str = "document"
    bos: bool = True

    def variations(self, factors: Sequence[str]) -> list[Way]:
        """This way, and every way that differs from it in one of the factors.

        Raises:
            ValueError: an unknown factor, or the stored dtype of what is not read from a store.
        """
        unknown = [name for name in factors if name not in FACTORS]
        if unknown:
            raise ValueError(f"there is no factor {unknown[0]!r} to vary; expected one of {', '.join(FACTORS)}")
        if "kv_dtype" in factors and self.policy != "independent":
            raise ValueError(
                f"kv_dtype is to be varied under policy {self.policy!r}, which reads nothing that was stored; "
                "expected policy 'independent'"
            )
        others = [self._replace(**{name: value}) for name in factors for value in FACTORS[name]]
        return list(dict.fromkeys([self, *others]))

    def name(self, base: Way) -> str:
        """What sets this way off from the base, in words; of the base itself its policy."""
        words = {"policy": self.policy, "bos": "a BOS each" if self.bos else "no BOS"}
        changed = [name for name in FACTORS if getattr(self, name) != getattr(base, name)] or ["policy"]
        return ", ".join(words.get(name, f"{name} {getattr(self, name)}") for name in changed)


class Item(NamedTuple):
    """A question and the chunks that are read for it, best first."""

    question: Question
    sources: tuple[Source, ...]


class Outcome(NamedTuple):
    """A question's answer in one way."""

    item: Item
    way: Way
    prediction: str
    grade: Grade

    def as_dict(self) -> dict[str, Any]:
        """One line of the details file."""
        question = self.item.question
        told = {"id": question.id, "question": question.text, "answers": list(question.answers)}
        return {**told, **self.way._asdict(), "prediction": self.prediction, **self.grade._asdict()}


def select(engine: RagEngine, questions: Sequence[Question], k: int, *, chunk_len: int) -> Iterator[Item]:
    """The chunks of every question: its contexts', cut to `chunk_len`, or the k best of the engine's store.

    Raises:
        EmptyDocumentError: a context without text; PdllmError: as `RagEngine.retrieve`.
    """
    prefiller = Prefiller(engine.model, engine.store, engine.fingerprint, chunk_len=chunk_len)
    for question in questions:
        if question.context is None:
            found = engine.retrieve(question.text, k)
            metas = [engine.store.meta(one.ref.chunk_id) for one in found]
            sources = [
                Source(one.ref, meta.token_ids.tolist(), one.text) for one, meta in zip(found, metas, strict=True)
            ]
        else:
            sources = []
            texts = [question.context] if isinstance(question.context, str) else question.context
            for text in dict.fromkeys(texts):
                document, chunks = prefiller.encode_text(text_id(text).hex(), text)
                sources += [Source(ref, chunks[ref.chunk_id].tolist(), text) for ref in document.chunks]
        yield Item(question, tuple(sources))


class Reader:
    """Answers questions over chunks that are given by their tokens.

    Args:
        options: of decoding; the ways say the rest.
        chunk_len: width of a slot in placement "gap".

    Attributes:
        rounding: per stored dtype float64 [2, 2], squared errors and squared norms of all keys and all values read.
    """

    def __init__(self, model: LoadedModel, options: AskOptions, *, chunk_len: int) -> None:
        self._model = model
        self._options = options
        self._chunk_len = chunk_len
        self._encoder = ChunkEncoder(model, model.fingerprint("float32"))
        self.rounding: dict[KVDtype, torch.Tensor] = {}

    def answers(self, items: Sequence[Item], ways: Sequence[Way]) -> Iterator[tuple[Way, list[str]]]:
        """Every item's answer, in one way after another.

        Raises:
            ContextWindowError: chunks, question and answer do not fit the model's window.
            NumericsError: the model's logits are not finite.
        """
        stored: dict[bool, dict[tuple[int, ...], ChunkKV]] = {}
        for way in ways:
            if way.policy == "independent" and way.bos not in stored:
                stored[way.bos] = self._encode(ids for item in items for ids in _token_ids(item, way))
            requests = [self._request(item, way, stored.get(way.bos, {})) for item in items]
            yield way, self._decode(requests, "vanilla" if way.policy == DENSE else "static_kv")

    def _encode(self, chunks: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], ChunkKV]:
        rows = [np.array(ids, dtype=np.int32) for ids in dict.fromkeys(chunks)]
        return {tuple(meta.token_ids.tolist()): kv for meta, kv in chain.from_iterable(self._encoder.batches(rows))}

    def _request(self, item: Item, way: Way, stored: dict[tuple[int, ...], ChunkKV]) -> DecodeRequest:
        spec, chunk_ids = self._model.spec, _token_ids(item, way)
        family = spec.family
        prompt = self._model.tokenizer.render(
            family.template, [{"role": "user", "content": item.question.text.strip()}]
        )
        lens = [len(ids) for ids in chunk_ids]
        block = causal_block(family) or 1
        placement = plan_offsets(lens, way.placement, chunk_len=max(self._chunk_len, *lens, 1), multiple=block)
        end = placement.canvas_start + Canvas.room(len(prompt.ids), self._options.max_new_tokens, family)
        if end > family.window:
            raise ContextWindowError(
                f"question {item.question.id} takes {end} positions with its {len(lens)} chunks, {spec.name} has a "
                f"window of {family.window}; give fewer or shorter contexts, or a smaller k"
            )
        kv: Sequence[ChunkKV] = ()
        if way.policy == "independent":
            kv = [self._stored(stored[ids], way.kv_dtype) for ids in chunk_ids]
        elif way.policy != DENSE:
            kv, placement = encode_jointly(self._model, chunk_ids, placement, rows_seen(way.policy, spec, prompt.ids))
        return DecodeRequest(prompt.ids, placement, self._options.max_new_tokens, chunk_ids, kv)

    def _stored(self, kv: ChunkKV, dtype: KVDtype) -> ChunkKV:
        """The KV as a store of that dtype gives it back."""
        if dtype == "float32":
            return kv
        got = ChunkKV(*(codec.decode(codec.encode(part, dtype), dtype, part.shape) for part in kv))
        pairs = list(zip(got, kv, strict=True))
        errors = torch.stack([(one.double() - other).square().sum() for one, other in pairs])
        norms = torch.stack([other.double().square().sum() for _, other in pairs])
        self.rounding[dtype] = self.rounding.get(dtype, 0) + torch.stack([errors, norms])
        return got

    def _decode(self, requests: Sequence[DecodeRequest], decoder: str) -> list[str]:
        options, spec = self._options.with_changes({"decoder": decoder}), self._model.spec
        transcripts = [
            Transcript(self._model.tokenizer, spec.eos_ids, max_new_tokens=options.max_new_tokens) for _ in requests
        ]
        for step in options.make_decoder(self._model).steps(requests):
            transcripts[step.sequence].add(step)
        return [transcript.text for transcript in transcripts]


def compare(
    reader: Reader,
    items: Sequence[Item],
    ways: Sequence[Way],
    *,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Every item answered in every way; see `Reader.answers`."""
    outcomes = []
    for start in range(0, len(items), TOGETHER):
        some = items[start : start + TOGETHER]
        for way, texts in reader.answers(some, ways):
            for item, text in zip(some, texts, strict=True):
                outcomes.append(Outcome(item, way, text, grade(text, item.question.answers)))
                on_outcome(outcomes[-1])
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of each way: exact match and F1, and against the first way their difference and the same answers.

    Raises:
        ValueError: no outcomes.
    """
    if not outcomes:
        raise ValueError("no outcomes to summarise; expected at least one")
    by_way: dict[Way, list[Outcome]] = {}
    for outcome in outcomes:
        by_way.setdefault(outcome.way, []).append(outcome)
    first, base = next(iter(by_way.items()))
    lens = [[len(source.token_ids) for source in outcome.item.sources] for outcome in base]
    return {
        "n": len(base),
        "chunks": sum(map(len, lens)) / len(base),
        "tokens": sum(map(sum, lens)) / len(base),
        "ways": [{"name": way.name(first), **way._asdict(), **_figures(own, base)} for way, own in by_way.items()],
    }


def _figures(own: Sequence[Outcome], base: Sequence[Outcome]) -> dict[str, Any]:
    found: dict[str, Any] = {**estimates(_measures(own)), "agreement": None, "difference": None}
    if own is not base:
        same = proportion([one.prediction == other.prediction for one, other in zip(own, base, strict=True)])
        assert same is not None
        found |= {"agreement": same.as_dict(), "difference": differences(_measures(own), _measures(base))}
    return found


def _measures(outcomes: Sequence[Outcome]) -> list[dict[str, float]]:
    return [{"exact": float(one.grade.exact), "f1": one.grade.f1} for one in outcomes]


def _token_ids(item: Item, way: Way) -> list[tuple[int, ...]]:
    """Tokens of each chunk, in the way's order."""
    sources = list(item.sources)
    if way.order == "document":
        sources.sort(key=lambda source: source.ref)
    elif way.order == "reversed":
        sources.reverse()
    return [tuple(source.token_ids if way.bos else source.token_ids[1:]) for source in sources]
