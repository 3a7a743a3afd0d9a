"""The engine: one store, one model, and every way in: prefill, retrieve, answer, stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import torch
from pdllm_store import (
    ChunkId,
    ChunkKV,
    ChunkRef,
    ChunkStore,
    DocumentInfo,
    DocumentNotFoundError,
    KVDtype,
    LMDBStore,
    StoreMismatchError,
)

from pdllm_rag import registry
from pdllm_rag.answer import Answer
from pdllm_rag.asking import Asking, Final, Found, Messages, Source, StreamEvent
from pdllm_rag.clock import Clock
from pdllm_rag.config import AskOptions
from pdllm_rag.errors import RequestError
from pdllm_rag.first_stage import BM25Index
from pdllm_rag.ingest import ingest
from pdllm_rag.models.loader import LoadedModel, read_spec
from pdllm_rag.pool import KVPool
from pdllm_rag.prefill import InputDocument, Prefiller, PrefillReport, Progress
from pdllm_rag.retrieval import Retriever, Selection
from pdllm_rag.scoring import ScoringOptions

PASTED = "<context>"  # doc_id of chunks that came with the question


class Retrieved(NamedTuple):
    """A chunk that retrieval chose, best first. `score` is the mean log-likelihood s (0.0 when nothing was scored)."""

    ref: ChunkRef
    score: float
    text: str


class RagEngine:
    """Retrieval-augmented generation over one store with one model.

    Use `RagEngine.open`; close it, or use it in a `with`.
    """

    def __init__(
        self,
        store: ChunkStore,
        model: LoadedModel,
        *,
        options: AskOptions | None = None,
        scoring: ScoringOptions | None = None,
        chunk_len: int | None = None,
        pool_bytes: int = 1 << 30,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self.model = model
        self.options = options or AskOptions()
        self.fingerprint = model.fingerprint(store.kv_dtype)
        self._release = release
        self._prefiller = Prefiller(model, store, self.fingerprint, chunk_len=chunk_len or model.spec.family.chunk_len)
        self._pool = KVPool(store, self._recompute, budget_bytes=pool_bytes)
        self._index = BM25Index(store, self.fingerprint)
        self._retriever = Retriever(model, store, self._index, self._pool, scoring or ScoringOptions())
        self._asking = Asking(model, self._pool, model.spec.name)

    @classmethod
    def open(
        cls,
        store: str | PathLike[str] | ChunkStore,
        model: str | LoadedModel = "demo",
        *,
        kv_dtype: KVDtype | None = None,
        create: bool = True,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        options: AskOptions | None = None,
        scoring: ScoringOptions | None = None,
        chunk_len: int | None = None,
        pool_bytes: int = 1 << 30,
    ) -> RagEngine:
        """Open a store and load a model; weights already loaded in this process are shared.

        Args:
            store: folder of a store, or a `ChunkStore`.
            model: "demo", a checkpoint folder, or a loaded model.
            kv_dtype: stored dtype of a new store (default bfloat16); for an existing one it must fit.
            create: make the store if there is none.
            dtype: compute dtype; None takes the faster one.
            chunk_len: tokens of a chunk, BOS included; None takes the family's.
            pool_bytes: most bytes of chunk KV kept in memory between questions.

        Raises:
            StoreError, ModelError.
        """
        if isinstance(model, str):
            read_spec(model)  # cheap, and before a mistyped model leaves an empty store behind
        if isinstance(store, (str, PathLike)):
            opened: ChunkStore = LMDBStore.open(store, kv_dtype=kv_dtype, create=create)
        else:
            opened = store
            if kv_dtype is not None and kv_dtype != store.kv_dtype:
                raise StoreMismatchError(f"the store keeps {store.kv_dtype}, asked for {kv_dtype}; open it without")
        try:
            loaded = registry.shared_model(model, device, dtype) if isinstance(model, str) else model
            return cls(
                opened,
                loaded,
                options=options,
                scoring=scoring,
                chunk_len=chunk_len,
                pool_bytes=pool_bytes,
                release=opened.close if opened is not store else None,
            )
        except BaseException:
            if opened is not store:
                opened.close()
            raise

    def close(self) -> None:
        """Close the store if this engine opened it."""
        self._index.close()
        if self._release is not None:
            self._release()
            self._release = None

    def __enter__(self) -> RagEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- documents ---------------------------------------------------------------------------------------------

    def prefill(
        self,
        documents: Iterable[InputDocument | str | PathLike[str]],
        *,
        on_progress: Callable[[Progress], None] | None = None,
        **path_options: Any,
    ) -> PrefillReport:
        """Bring documents, or files, folders and patterns, into the store; unchanged ones cost nothing.

        Args:
            path_options: for paths: id_prefix, prune, shard, on_start (see `ingest.ingest`).

        Raises:
            StoreError; a document that fails is in the report instead.
        """
        given = [documents] if isinstance(documents, (str, PathLike, InputDocument)) else list(documents)
        paths = [entry for entry in given if not isinstance(entry, InputDocument)]
        if paths and len(paths) < len(given):
            raise ValueError("prefill got documents and paths together; expected one kind per call")
        if paths:
            return ingest(self._prefiller, self.store, self.fingerprint, paths, on_progress=on_progress, **path_options)
        if path_options:
            raise ValueError(f"options {sorted(path_options)} are for paths; got documents")
        return self._prefiller.run([d for d in given if isinstance(d, InputDocument)], on_progress)

    def documents(self) -> list[DocumentInfo]:
        """Documents of this model in the store, by doc_id."""
        return self.store.documents(self.fingerprint)

    def delete(self, doc_id: str) -> bool:
        """Delete a document: its chunks, KV, index entries and cached copies; False if there is none."""
        held = [info for info in self.documents() if info.doc_id == doc_id]
        deleted = self.store.delete_document(self.fingerprint, doc_id)
        for info in held:
            self._pool.forget(info.chunk_ids)
        return deleted

    # -- questions ---------------------------------------------------------------------------------------------

    def retrieve(self, question: str, k: int | None = None, **changes: Any) -> list[Retrieved]:
        """The k best chunks for a question, best first.

        Raises:
            DocumentNotFoundError: the store is empty; StoreMismatchError: it holds another model's documents only.
            ValueError: a bad option.
        """
        if not question.strip():
            raise RequestError("the question is empty; expected some words")
        options = self.options.with_changes({**changes, **({} if k is None else {"k": k})})
        found = self._find(question, options, options.k, Clock())
        return [
            Retrieved(source.ref, score, source.text)
            for source, score in zip(found.sources, found.selection.scores, strict=True)
        ]

    def answer(
        self,
        question: str | Messages,
        *,
        chunk_ids: Sequence[ChunkId | str] | None = None,
        context: str | Sequence[str] | None = None,
        options: AskOptions | None = None,
        **changes: Any,
    ) -> Answer:
        """Answer a question with citations.

        Args:
            question: text, or messages {"role", "content"} that end with the user's question.
            chunk_ids: read exactly these stored chunks (bytes or hex) instead of retrieving.
            context: read this text, encoded now and not stored, instead of the store.
            options, changes: options of this call; `changes` win.

        Raises:
            RequestError, StoreError, NumericsError, ValueError.
        """
        for event in self.stream(question, chunk_ids=chunk_ids, context=context, options=options, **changes):
            if isinstance(event, Final):
                return event.answer
        raise AssertionError("a stream ends with its Final event")

    def stream(
        self,
        question: str | Messages,
        *,
        chunk_ids: Sequence[ChunkId | str] | None = None,
        context: str | Sequence[str] | None = None,
        options: AskOptions | None = None,
        **changes: Any,
    ) -> Iterator[StreamEvent]:
        """As `answer`, as events: text that is final, denoising steps, and the answer last."""
        chosen = (options or self.options).with_changes(changes)
        if chunk_ids is not None and context is not None:
            raise ValueError("chunk_ids and context were both given; expected at most one of them")

        def find(text: str, k: int, clock: Clock) -> Found:
            if context is not None:
                return self._pasted([context] if isinstance(context, str) else context, text, k, clock)
            if chunk_ids is not None:
                return self._given(chunk_ids)
            return self._find(text, chosen, k, clock)

        return self._asking.events(question, chosen, find)

    async def aanswer(self, question: str | Messages, **arguments: Any) -> Answer:
        """`answer` in a thread; cancelling the task stops the decoding at its next step."""
        async for event in self.astream(question, **arguments):
            if isinstance(event, Final):
                return event.answer
        raise AssertionError("a stream ends with its Final event")

    async def astream(self, question: str | Messages, **arguments: Any) -> AsyncGenerator[StreamEvent, None]:
        """`stream` in a thread; leaving the loop or cancelling the task stops the decoding at its next step."""
        cancel = arguments.pop("cancel", None) or threading.Event()
        events = self.stream(question, cancel=cancel, **arguments)
        try:
            while (event := await asyncio.to_thread(next, events, None)) is not None:
                yield event
        finally:
            cancel.set()

    # -- finding -----------------------------------------------------------------------------------------------

    def _find(self, text: str, options: AskOptions, k: int, clock: Clock) -> Found:
        with clock.phase("first_stage"):
            doc_ids = self._filtered(options.filter)
            if not self._index.size():
                self._explain_empty()
        selection = self._retriever.select(text, k, options.candidates, clock, doc_ids=doc_ids)
        return Found(self._sources(selection.refs), selection, {})

    def _filtered(self, wanted: Mapping[str, Any]) -> set[str] | None:
        if not wanted:
            return None
        return {
            info.doc_id
            for info in self.documents()
            if all(
                str({**info.metadata, "doc_id": info.doc_id, "source": info.source}.get(key)) == str(value)
                for key, value in wanted.items()
            )
        }

    def _given(self, chunk_ids: Sequence[ChunkId | str]) -> Found:
        wanted = [_chunk_id(c) for c in chunk_ids]
        by_id = {ref.chunk_id: ref for ref in reversed(self.store.refs(self.fingerprint))}
        unknown = [c.hex() for c in wanted if c not in by_id]
        if unknown:
            raise DocumentNotFoundError(
                f"chunk {unknown[0]} belongs to no document of this model in {self.store.path}; "
                "expected ids from retrieve() or `pdllm store list --json`"
            )
        refs = tuple(by_id[c] for c in dict.fromkeys(wanted))
        selection = Selection(refs, (0.0,) * len(refs), None, len(refs), frozenset())
        return Found(self._sources(refs), selection, {})

    def _pasted(self, texts: Sequence[str], question: str, k: int, clock: Clock) -> Found:
        sources: list[Source] = []
        kv: dict[ChunkId, ChunkKV] = {}
        with clock.phase("load"):
            for text in texts:
                document, chunks = self._prefiller.encode_text(PASTED, text)
                for batch in self._prefiller.encoder.batches(list(chunks.values())):
                    kv |= {meta.chunk_id: chunk for meta, chunk in batch}
                for ref in document.chunks:
                    quote = text[ref.char_start : ref.char_end]
                    sources.append(Source(ref._replace(ordinal=len(sources)), chunks[ref.chunk_id].tolist(), quote))
        refs = [source.ref for source in sources]
        if self._retriever.needs_scores(len(refs), k):
            kvs = [kv[ref.chunk_id] for ref in refs]
            selection = self._retriever.rank_kv(question, refs, kvs, k, clock)
        else:
            selection = Selection(tuple(refs), (0.0,) * len(refs), None, len(refs), frozenset())
        computed = frozenset(ref.chunk_id for ref in selection.refs)
        by_ref = {source.ref: source for source in sources}
        return Found([by_ref[ref] for ref in selection.refs], selection._replace(recomputed=computed), kv)

    def _sources(self, refs: Sequence[ChunkRef]) -> list[Source]:
        documents = {doc_id: self.store.document(self.fingerprint, doc_id) for doc_id in {r.doc_id for r in refs}}
        return [
            Source(
                ref,
                self.store.meta(ref.chunk_id).token_ids.tolist(),
                documents[ref.doc_id].text[ref.char_start : ref.char_end],
            )
            for ref in refs
        ]

    def _explain_empty(self) -> None:
        others = [f for f in self.store.fingerprints() if f.digest != self.fingerprint.digest]
        counts = {f.digest: len(self.store.documents(f)) for f in others}
        if any(counts.values()):
            other = max(others, key=lambda f: counts[f.digest])
            raise StoreMismatchError(
                f"store {self.store.path} holds {counts[other.digest]} documents encoded by another model "
                f"({other.family}, weights {other.weights_digest[:12]}) and none by {self.model.spec.name} "
                f"({self.fingerprint.family}, weights {self.fingerprint.weights_digest[:12]}); "
                "ask with that model, or prefill the documents with this one"
            )
        raise DocumentNotFoundError(
            f"store {self.store.path} holds no documents; add some with `pdllm prefill PATH --store {self.store.path}`"
        )

    def _recompute(self, chunk_id: ChunkId) -> ChunkKV:
        """Encode a chunk again from its kept token ids and write it back."""
        meta = self.store.meta(chunk_id)
        (batch,) = self._prefiller.encoder.batches([meta.token_ids])
        self.store.discard([chunk_id])
        self.store.put(self.fingerprint, batch)
        return self.store.load(chunk_id)


def _chunk_id(given: ChunkId | str) -> ChunkId:
    try:
        return bytes.fromhex(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"chunk id {given!r} is no hexadecimal text; expected 32 hex digits or 16 bytes") from error
