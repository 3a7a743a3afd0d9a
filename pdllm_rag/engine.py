"""The engine: one store, one model, and every way in: prefill, retrieve, answer, stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from pdllm_store import (
    ChunkId,
    ChunkNotFoundError,
    ChunkStore,
    DocumentInfo,
    DocumentNotFoundError,
    KVDtype,
    StoreMismatchError,
    open_store,
)

from pdllm_rag import registry
from pdllm_rag.answer import Answer
from pdllm_rag.asking import Asking
from pdllm_rag.cheaper import CheaperFetch
from pdllm_rag.clock import Clock
from pdllm_rag.config import AskOptions
from pdllm_rag.copies import Copies
from pdllm_rag.events import EitherEvent, Final, Messages, StreamEvent
from pdllm_rag.first_stage import BM25Index
from pdllm_rag.given import Chosen, Given
from pdllm_rag.ingest import ingest, read_documents
from pdllm_rag.mending import Mender
from pdllm_rag.metadata import admitted
from pdllm_rag.models.loader import LoadedModel, check_seen, one_device, read_spec
from pdllm_rag.pool import KVPool
from pdllm_rag.prefill import InputDocument, Prefiller, PrefillReport, Progress
from pdllm_rag.reading import Found, Retrieved, sources_of, told
from pdllm_rag.resolving import AskedIn, Resolver
from pdllm_rag.retrieval import Retriever, Selection, is_near
from pdllm_rag.scoring import ScoringOptions
from pdllm_rag.stages import FirstStages
from pdllm_rag.teams import passing_team
from pdllm_rag.together import Asked

MAX_ATTEMPTS = 5  # of retrieving from a store that changes meanwhile
LOADS = ("store", "auto")  # where KV comes from that is not in memory


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
        pool_bytes: int | None = None,
        load: str = "store",
        release: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self.model = model
        self.options = options or AskOptions()
        self.fingerprint = model.fingerprint(store.kv_dtype)
        self._release = release
        chunk_len = model.spec.family.chunk_len if chunk_len is None else chunk_len
        self._prefiller = Prefiller(model, store, self.fingerprint, chunk_len=chunk_len)
        store.recompute_with(self.fingerprint, self._prefiller.recompute)
        if load not in LOADS:
            raise ValueError(f"load is {load!r}; expected one of {', '.join(LOADS)}")
        fetch = CheaperFetch(store, self._prefiller.recompute) if load == "auto" else None
        self._pool = KVPool.beside(model.backbone, store, fetch=fetch, budget_bytes=pool_bytes)
        self._index = BM25Index(store, self.fingerprint)
        self._mender = Mender(store, self.fingerprint, self._prefiller, self._index)
        stages = FirstStages(model, store, self.fingerprint, self._index)
        self._retriever = Retriever(model, stages, self._pool, scoring or ScoringOptions())
        self._asking = Asking(model, self._pool, chunk_len)
        self._given = Given(store, self.fingerprint, self._index, self._prefiller, self._retriever)
        asked: AskedIn = "question" if model.spec.family.bare_questions else "prompt"
        self.resolver = Resolver(Copies(store, self.fingerprint, self._index), asked)

    @classmethod
    def open(
        cls,
        store: str | PathLike[str] | ChunkStore,
        model: str | LoadedModel = "demo",
        *,
        kv_dtype: KVDtype | None = None,
        create: bool = True,
        store_options: Mapping[str, Any] | None = None,
        device: str = "auto",
        dtype: torch.dtype | None = None,
        options: AskOptions | None = None,
        scoring: ScoringOptions | None = None,
        chunk_len: int | None = None,
        pool_bytes: int | None = None,
        load: str = "store",
        adapter: str | None = None,
        canvas_adapter: str | None = None,
    ) -> RagEngine:
        """Open a store and load a model; weights already loaded in this process are shared.

        Args:
            store: folder or URL of a store, or a `ChunkStore`.
            model: "demo", a checkpoint folder, or a loaded model.
            kv_dtype: stored dtype of a new store (default bfloat16); for an existing one it must fit.
            create: make the store if there is none.
            store_options: of a store opened here, such as `max_bytes`, `cache` and `read_only` (see `open_store`).
            device: of a model given by name; "auto" is the first GPU where torch sees one, else the CPU.
            dtype: compute dtype; None takes the faster one.
            options: of every question, unless a call changes them.
            scoring: how candidates are scored.
            chunk_len: tokens of a chunk, BOS included; None takes the family's.
            pool_bytes: most bytes of chunk KV kept between questions, in a GPU's memory if the model is there; None
                takes 1 GiB, or, if it is more, a fifth of what is free on the GPU.
            load: "store" reads KV from the store, "auto" computes it again where that is faster (`cheaper`).
            adapter, canvas_adapter: of a model given by name, see `load_model`.

        Raises:
            StoreError, ModelError; ValueError for `store_options` beside a `ChunkStore`, or bad ones, and for adapters
            beside a loaded model.
        """
        if not isinstance(model, str) and (adapter, canvas_adapter) != (None, None):
            raise ValueError("an adapter was given beside a loaded model; load the model with it")
        if isinstance(model, str):
            read_spec(model)  # cheap, and before a mistyped model or device leaves an empty store behind
            check_seen(one_device(device, None))
        if isinstance(store, (str, PathLike)):
            opened: ChunkStore = open_store(store, kv_dtype=kv_dtype, create=create, **store_options or {})
        else:
            opened = store
            if store_options is not None:
                raise ValueError("store_options were given beside an open store; open it with them instead")
            if kv_dtype is not None and kv_dtype != store.kv_dtype:
                raise StoreMismatchError(f"the store keeps {store.kv_dtype}, asked for {kv_dtype}; open it without")
        try:
            if isinstance(model, str):
                model = registry.shared_model(model, device, dtype, adapter, canvas_adapter)
            return cls(
                opened,
                model,
                options=options,
                scoring=scoring,
                chunk_len=chunk_len,
                pool_bytes=pool_bytes,
                load=load,
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
            documents: `InputDocument`s, or paths; one kind per call.
            on_progress: told after each batch of chunks and each document.
            path_options: for paths: id_prefix, prune, shard, on_start (see `ingest.ingest`).

        Raises:
            StoreError: of the store; a document that fails is in the report instead.
            ValueError: both kinds in one call, or an option that does not apply.
        """
        given = [documents] if isinstance(documents, (str, PathLike, InputDocument)) else list(documents)
        paths = [entry for entry in given if not isinstance(entry, InputDocument)]
        if paths and len(paths) < len(given):
            raise ValueError("prefill got documents and paths together; expected one kind per call")
        if paths:
            run = self._prefiller.run
            return ingest(
                lambda files, tell: run(read_documents(files), tell),
                self.store,
                self.fingerprint,
                paths,
                on_progress=on_progress,
                **path_options,
            )
        if path_options:
            raise ValueError(f"options {sorted(path_options)} are for paths; got documents")
        return self._prefiller.run([d for d in given if isinstance(d, InputDocument)], on_progress)

    def documents(self) -> list[DocumentInfo]:
        """Documents of this model in the store, by doc_id."""
        return self.store.documents(self.fingerprint)

    def delete(self, doc_id: str) -> bool:
        """Delete a document: its chunks, KV, index entries and cached copies; False if there is none."""
        return bool(self.delete_all([doc_id]))

    def delete_all(self, doc_ids: Iterable[str]) -> list[str]:
        """Delete these documents as `delete` does, at the cost of one change of the index; those that there were."""
        deleted = [doc_id for doc_id in doc_ids if self.store.delete_document(self.fingerprint, doc_id)]
        self._pool.retain(self._index.chunk_ids())
        return deleted

    # -- questions ---------------------------------------------------------------------------------------------

    @passing_team()
    def retrieve(self, question: str, k: int | None = None, **changes: Any) -> list[Retrieved]:
        """The k best chunks for a question, best first; with `score_window` (None: the family's) only those within it.

        Raises:
            DocumentNotFoundError: the store is empty.
            StoreMismatchError: it holds another model's documents only.
            RequestError, ValueError: no question, or a bad option.
        """
        options = self.options.with_changes({**changes, **({} if k is None else {"k": k})})
        self._asking.prompt(question, options)
        found = told(self._find(question, options, Clock()))
        scores = found.selection.scores
        window = options.window_for(self.model.spec.family) if "score_window" in changes else None
        return [
            Retrieved(source.ref, score, source.text, found.selection.margin)
            for source, score in zip(found.sources, scores, strict=True)
            if is_near(score, scores[0], window)
        ]

    def answer(
        self,
        question: str | Messages,
        *,
        chunk_ids: Sequence[ChunkId | str | Chosen] | None = None,
        context: str | Sequence[str] | None = None,
        options: AskOptions | None = None,
        **changes: Any,
    ) -> Answer:
        """Answer a question with citations.

        Args:
            question: text, or messages {"role", "content"} that end with the user's question.
            chunk_ids: read exactly these stored chunks (bytes, hex or `given.Chosen`) instead of retrieving.
            context: read these texts, encoded now and not stored, instead of the store, or beside `chunk_ids`.
            options, changes: options of this call; `changes` win.

        Raises:
            RequestError: no question, it does not fit the model's window, or it was cancelled.
            StoreError, NumericsError, ValueError: of the store, logits that are not finite, a bad option.
            EmptyDocumentError: a `context` without text.
        """
        *_, last = self.stream(question, chunk_ids=chunk_ids, context=context, options=options, **changes)
        assert isinstance(last, Final)
        return last.answer

    def stream(
        self,
        question: str | Messages,
        *,
        chunk_ids: Sequence[ChunkId | str | Chosen] | None = None,
        context: str | Sequence[str] | None = None,
        options: AskOptions | None = None,
        **changes: Any,
    ) -> Iterator[StreamEvent]:
        """As `answer`, as events: text that is final, denoising steps, and the answer last. Raises what it raises."""
        return self.asked(question, chunk_ids=chunk_ids, context=context, options=options, **changes).events()

    def asked(
        self,
        question: str | Messages,
        *,
        chunk_ids: Sequence[ChunkId | str | Chosen] | None = None,
        context: str | Sequence[str] | None = None,
        alone: bool = False,
        options: AskOptions | None = None,
        **changes: Any,
    ) -> Asked:
        """A question as for `answer`, not begun: `together.stream_together` answers several in one batch.

        Args:
            alone: ask the model without any document.
        """
        chosen = (options or self.options).with_changes(changes)
        if alone and (chunk_ids is not None or context is not None):
            raise ValueError("alone was given beside chunk_ids or context; it asks the model without any of them")
        if chosen.filter and (chunk_ids is not None or context is not None):
            raise ValueError("filter was given beside chunk_ids or context; it applies to retrieval only")

        def find(text: str, clock: Clock) -> Found:
            if alone:
                return Found((), Selection.unscored(()), {}, alone=True)
            stored = pasted = None
            if chunk_ids is not None:
                stored = self._mender.run(lambda: self._given.stored(chunk_ids))
            if context is not None:
                window = chosen.window_for(self.model.spec.family)
                pasted = self._given.pasted(context, text, chosen.k, clock, score_window=window)
            if stored and pasted:
                return self._given.together(stored, pasted)
            return stored or pasted or self._find(text, chosen, clock)

        return Asked(self._asking, question, chosen, find)

    async def aanswer(self, question: str | Messages, **arguments: Any) -> Answer:
        """`answer` in a thread; cancelling the task stops the decoding at its next step."""
        *_, last = [event async for event in self.astream(question, **arguments)]
        assert isinstance(last, Final)
        return last.answer

    async def astream(self, question: str | Messages, **arguments: Any) -> AsyncGenerator[StreamEvent, None]:
        """`stream` in a thread; leaving the loop or cancelling the task stops the decoding at its next step."""
        options: AskOptions = arguments.pop("options", None) or self.options
        cancel = EitherEvent(arguments.pop("cancel", None) or options.cancel)
        events = self.stream(question, options=options, cancel=cancel, **arguments)
        step = passing_team()(next)  # each may be in another thread
        try:
            while (event := await asyncio.to_thread(step, events, None)) is not None:
                yield event
        finally:
            cancel.set()

    # -- finding -----------------------------------------------------------------------------------------------

    def _find(self, text: str, options: AskOptions, clock: Clock) -> Found:
        """Retrieve; if documents change meanwhile, again, so that text, offsets and KV belong together."""
        for attempt in range(MAX_ATTEMPTS):
            generation = self.store.generation
            try:
                return self._mender.run(lambda: self._find_once(text, options, clock))
            except (DocumentNotFoundError, ChunkNotFoundError):
                is_as_before = self.store.generation == generation
                if attempt == MAX_ATTEMPTS - 1 or (is_as_before and not self._mender.leave_out()):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _find_once(self, text: str, options: AskOptions, clock: Clock) -> Found:
        with clock.phase("first_stage"):
            before = self._index.generation
            if not self._index.size():
                self._explain_empty()
            if self._index.generation != before:
                self._pool.retain(self._index.chunk_ids())
                self._mender.left_out.clear()
            doc_ids, note = admitted(self.documents(), options.filter) if options.filter else (None, "")
            if self._mender.left_out:
                doc_ids = (self._index.doc_ids() if doc_ids is None else doc_ids) - self._mender.left_out
        window = options.window_for(self.model.spec.family)
        selection = self._retriever.select(
            text,
            options.k,
            options.candidates,
            clock,
            score_window=window,
            doc_ids=doc_ids,
            first_stage=options.first_stage,
            rank_weight=options.rank_weight,
        )
        sources = sources_of(self.store, self.fingerprint, selection.refs)
        with clock.phase("load"):
            acquired = self._pool.acquire([ref.chunk_id for ref in selection.refs])
        selection = selection._replace(recomputed=selection.recomputed | acquired.recomputed)
        return Found(sources, selection, acquired.kv, note)

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
