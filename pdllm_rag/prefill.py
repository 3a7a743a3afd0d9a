"""Documents into the store: only what is missing is computed, and a document is visible only when it is whole.

- chunks are durable as soon as their batch is written, so a run that was killed goes on where it stopped;
- an unchanged document (same text, same recipe) costs no model work, a changed one only its changed chunks;
- a document that fails is reported with its reason; the others go in.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray
from pdllm_store import (
    ChunkId,
    ChunkKV,
    ChunkMeta,
    ChunkNotFoundError,
    ChunkRef,
    ChunkStore,
    Document,
    DocumentConflictError,
    DocumentInfo,
    ModelFingerprint,
    StoreError,
    StoreFullError,
)
from pdllm_store.held import absent, is_whole

from pdllm_rag.chunking import recipe, split, text_id
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.errors import DocumentError, EmptyDocumentError
from pdllm_rag.metadata import PAGE_ENDS, pages_of
from pdllm_rag.models.loader import LoadedModel

logger = logging.getLogger(__name__)

FLUSH_BATCHES = 4  # chunks are collected over documents up to this, so that batches are full and alike in length
FLUSH_DOCUMENTS = 256  # that may wait for each other, or more where batches are large:
FLUSH_TOKENS_EACH = 64  # one for every so many tokens that are collected
PAGE_BYTES, RECORD_BYTES = 4096, 512  # of a store's file, and at most of a record's header
ROOM = 0.4  # of the store's cap: what one document, or several that wait together, may take
MAX_ATTEMPTS = 3  # of making a document visible while other processes delete chunks that it shares


@dataclass(frozen=True)
class InputDocument:
    """A document to prefill.

    Attributes:
        doc_id: unique within the store and model.
        text: the whole of it.
        source: where it came from; another source may not take over the id.
        pages: code points [start, end) of each page, or None.
        metadata: JSON-like values, kept with the document and offered to filters.
    """

    doc_id: str
    text: str
    source: str
    pages: Sequence[tuple[int, int]] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Failure(NamedTuple):
    """A document that did not go in. `path` is its path or id."""

    path: str
    reason: str


@dataclass
class PrefillReport:
    """What a prefill did.

    Attributes:
        added, updated, unchanged: documents.
        failed: documents or files that did not go in, each with its reason.
        skipped: files in folders whose kind is not read; they are no documents.
        missing, pruned: ids of documents whose file is gone: those that stay, and those that were deleted.
        chunks_computed, chunks_reused, chunks_blank: encoded now, held already, and dropped as blank.
        tokens: that were encoded, BOS included.
        bytes_written, text_bytes: of KV records written, and of the texts given in UTF-8.
        seconds: that it took.
    """

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    failed: list[Failure] = field(default_factory=list)
    skipped: list[Failure] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    chunks_computed: int = 0
    chunks_reused: int = 0
    chunks_blank: int = 0
    tokens: int = 0
    bytes_written: int = 0
    text_bytes: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON form of `pdllm prefill --json`."""
        return {
            "documents": {
                "added": self.added,
                "updated": self.updated,
                "unchanged": self.unchanged,
                "failed": [failure._asdict() for failure in self.failed],
                "skipped": [failure._asdict() for failure in self.skipped],
                "missing": self.missing,
                "pruned": self.pruned,
            },
            "chunks": {
                "computed": self.chunks_computed,
                "reused": self.chunks_reused,
                "blank": self.chunks_blank,
            },
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else 0.0,
            "seconds": self.seconds,
            "bytes": {"written": self.bytes_written, "text": self.text_bytes},
        }


class Progress(NamedTuple):
    """How far a prefill is, after each batch and each document."""

    documents: int
    tokens: int
    doc_id: str


class _Pending(NamedTuple):
    document: Document
    chunks: dict[ChunkId, NDArray[np.int32]]
    replaces: bool


@dataclass
class _Waiting:
    """Documents by id that are to be written together, the chunks that they lack, and what these take."""

    documents: dict[str, _Pending] = field(default_factory=dict)
    chunks: dict[ChunkId, NDArray[np.int32]] = field(default_factory=dict)
    n_tokens: int = 0
    n_bytes: int = 0


class Prefiller:
    """Cuts, encodes and stores documents of one model.

    Args:
        chunk_len: tokens of a chunk, BOS included.
        encoder: None takes one of its own.
        check_held: whether the store can still give what it lists of a document; None is `is_whole`.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: ChunkStore,
        fingerprint: ModelFingerprint,
        *,
        chunk_len: int,
        encoder: ChunkEncoder | None = None,
        check_held: Callable[[DocumentInfo], bool] | None = None,
    ) -> None:
        limit = model.spec.family.max_chunk_len
        if chunk_len > limit:
            logger.warning(
                "chunk_len %d is beyond the %d tokens that %s was trained on", chunk_len, limit, model.spec.family.name
            )
        self._model = model
        self._store = store
        self._fingerprint = fingerprint
        self._chunk_len = chunk_len
        self._recipe = recipe(chunk_len)
        self._encoder = encoder or ChunkEncoder(model, fingerprint)
        self._check_held = check_held or partial(is_whole, store, fingerprint)
        self._flush_tokens = FLUSH_BATCHES * self._encoder.batch_tokens
        self._flush_documents = max(FLUSH_DOCUMENTS, self._flush_tokens // FLUSH_TOKENS_EACH)

    def run(
        self, documents: Iterable[InputDocument | Failure], on_progress: Callable[[Progress], None] | None = None
    ) -> PrefillReport:
        """Bring documents into the store; a `Failure` among them is passed on to the report.

        Raises:
            StoreError: the store itself failed (full, closed, damaged); what was written before stays.
        """
        report = PrefillReport()
        started = time.perf_counter()
        held = {info.doc_id: info for info in self._store.documents(self._fingerprint)}
        self._store.register(self._fingerprint)
        waiting = _Waiting()
        cap = self._store.max_bytes
        room = math.inf if cap is None else ROOM * cap  # what waits to be written together must fit at once

        def tell(doc_id: str) -> None:
            if on_progress is not None:
                done = report.added + report.updated + report.unchanged + len(report.failed)
                on_progress(Progress(done, report.tokens, doc_id))

        for document in documents:
            if isinstance(document, Failure):
                report.failed.append(document)
                tell(document.path)
                continue
            report.text_bytes += len(document.text.encode("utf-8", "surrogatepass"))
            if document.doc_id in waiting.documents:  # the last one wins
                waiting = self._flush(waiting, report, tell)
                held = {info.doc_id: info for info in self._store.documents(self._fingerprint)}
            info = held.get(document.doc_id)
            identity = text_id(document.text)
            if info and self._is_held(info, document, identity):
                report.unchanged += 1
                report.chunks_reused += len(info.chunk_ids)
                tell(document.doc_id)
                continue
            try:
                entry = self._cut(document, identity, report, replaces=info is not None)
            except (DocumentError, ValueError) as error:
                report.failed.append(Failure(document.doc_id, str(error)))
                tell(document.doc_id)
                continue
            new = [chunk_id for chunk_id in absent(self._store, list(entry.chunks)) if chunk_id not in waiting.chunks]
            lens = [len(entry.chunks[chunk_id]) for chunk_id in new]
            n_new = sum(map(self._bytes_taken, lens))
            if n_new > room:
                reason = (
                    f"its {sum(lens)} tokens take {n_new} bytes of KV, more than {ROOM:.0%} of the store's cap of "
                    f"{cap}; raise the cap (`pdllm store limit`, max_bytes) or split the document"
                )
                report.failed.append(Failure(document.doc_id, reason))
                tell(document.doc_id)
                continue
            if waiting.n_bytes + n_new > room:
                waiting = self._flush(waiting, report, tell)
            waiting.documents[document.doc_id] = entry
            waiting.chunks |= {chunk_id: entry.chunks[chunk_id] for chunk_id in new}
            waiting.n_tokens += sum(lens)
            waiting.n_bytes += n_new
            if waiting.n_tokens >= self._flush_tokens or len(waiting.documents) >= self._flush_documents:
                waiting = self._flush(waiting, report, tell)
        self._flush(waiting, report, tell)
        report.seconds = time.perf_counter() - started
        return report

    def _is_held(self, info: DocumentInfo, document: InputDocument, identity: bytes) -> bool:
        """Whether the store has this document already; a text that differs in spelling only counts as the same."""
        same = (info.text_id, info.recipe, info.source) == (identity, self._recipe, document.source)
        return same and dict(info.metadata) == as_stored(document) and self._check_held(info)

    def _bytes_taken(self, n_tokens: int) -> int:
        """What the KV of a chunk takes of a store's file: a record fills whole pages."""
        n_bytes = n_tokens * self._fingerprint.bytes_per_token + RECORD_BYTES
        return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES

    def recompute(self, metas: Sequence[ChunkMeta]) -> Iterator[list[tuple[ChunkMeta, ChunkKV]]]:
        """KV of chunks again from their token ids, batch by batch."""
        return self._encoder.batches([meta.token_ids for meta in metas])

    def mend(self, refs: Iterable[ChunkRef]) -> bool:
        """Write chunks again whose rows are damaged, from the texts of their documents; True if any was mended."""
        mended = False
        for ref in refs:
            document = self._store.document(self._fingerprint, ref.doc_id)
            _, chunks = self.encode_text(ref.doc_id, document.text)
            if ref.chunk_id in chunks:  # else it was cut by another recipe
                logger.warning("chunk %s of %r is written again from its text", ref.chunk_id.hex(), ref.doc_id)
                for batch in self._encoder.batches([chunks[ref.chunk_id]]):
                    self._store.put(self._fingerprint, batch)
                mended = True
        return mended

    def encode_text(self, doc_id: str, text: str) -> tuple[Document, dict[ChunkId, NDArray[np.int32]]]:
        """Cut a text as `run` does, without storing anything: a document and its chunks' token ids."""
        entry = self._cut(InputDocument(doc_id, text, doc_id), text_id(text), PrefillReport(), replaces=False)
        return entry.document, entry.chunks

    @property
    def encoder(self) -> ChunkEncoder:
        """The encoder in use."""
        return self._encoder

    def _cut(self, document: InputDocument, identity: bytes, report: PrefillReport, *, replaces: bool) -> _Pending:
        tokenizer = self._model.tokenizer
        result = split(document.text, tokenizer.encode_with_offsets, chunk_len=self._chunk_len)
        report.chunks_blank += result.n_blank
        if not result.spans:
            raise EmptyDocumentError(f"{document.doc_id!r} holds no text; expected at least one visible character")
        bos = np.array([self._model.spec.bos_id], dtype=np.int32)
        ends = [end for _, end in document.pages or ()]
        chunks: dict[ChunkId, NDArray[np.int32]] = {}
        refs = []
        for ordinal, span in enumerate(result.spans):
            token_ids = np.concatenate((bos, span.token_ids))
            chunk_id = self._fingerprint.chunk_id(token_ids)
            chunks[chunk_id] = token_ids
            page, _ = pages_of(ends, span.char_start, document.text[span.char_start : span.char_end])
            refs.append(ChunkRef(document.doc_id, ordinal, chunk_id, span.char_start, span.char_end, page))
        stored = Document(
            doc_id=document.doc_id,
            source=document.source,
            text=document.text,
            text_id=identity,
            recipe=self._recipe,
            chunks=tuple(refs),
            n_tokens=sum(len(span.token_ids) + 1 for span in result.spans),
            metadata=_with_pages(document),
        )
        return _Pending(stored, chunks, replaces)

    def _flush(self, waiting: _Waiting, report: PrefillReport, tell: Callable[[str], None]) -> _Waiting:
        """Write what waits, after which nothing does; if the store is full, no orphan of it stays."""
        try:
            self._write(waiting, report, tell)
        except StoreFullError:
            self._store.drop_orphans(waiting.chunks)
            raise
        return _Waiting()

    def _write(self, waiting: _Waiting, report: PrefillReport, tell: Callable[[str], None]) -> None:
        name = next(iter(waiting.documents), "")
        for batch in self._encoder.batches(list(waiting.chunks.values())):
            report.bytes_written += self._store.put(self._fingerprint, batch)
            report.chunks_computed += len(batch)
            report.tokens += sum(len(meta.token_ids) for meta, _ in batch)
            tell(name)
        computed = set(waiting.chunks)
        entries = list(waiting.documents.values())
        for entry, result in zip(entries, self._added(entries), strict=True):
            report.chunks_reused += len(set(entry.chunks) - computed)
            computed -= set(entry.chunks)
            try:
                self._make_sure(entry, result)
            except (StoreError, ValueError) as error:
                if isinstance(error, StoreError) and not isinstance(error, (DocumentConflictError, ChunkNotFoundError)):
                    raise  # it is not about one document
                report.failed.append(Failure(entry.document.doc_id, str(error)))
            else:
                report.updated += entry.replaces
                report.added += not entry.replaces
            tell(entry.document.doc_id)

    def _added(self, entries: Sequence[_Pending]) -> list[bool | StoreError | ValueError]:
        """Make documents visible, together if they fit together; what came of each."""
        if not entries:
            return []  # a store that may only be read is left alone
        try:
            return self._store.add_documents(self._fingerprint, [entry.document for entry in entries])
        except StoreFullError:
            if len(entries) < 2:
                raise
            return [self._added([entry])[0] for entry in entries]

    def _make_sure(self, entry: _Pending, result: bool | StoreError | ValueError) -> None:
        """Raise what kept a document out, but compute chunks again that another process deleted meanwhile."""
        for _ in range(MAX_ATTEMPTS):
            if not isinstance(result, ChunkNotFoundError):
                break
            lost = result.chunk_ids or tuple(self._store.missing(list(entry.chunks)))
            for batch in self._encoder.batches([entry.chunks[chunk_id] for chunk_id in lost]):
                self._store.put(self._fingerprint, batch)
            (result,) = self._added([entry])
        if isinstance(result, Exception):
            raise result


def as_stored(document: InputDocument) -> object:
    """A document's metadata as it comes back from a store (tuples as lists); None for what no store takes."""
    try:
        return msgpack.unpackb(msgpack.packb(_with_pages(document)))
    except (TypeError, ValueError, OverflowError):
        return None


def _with_pages(document: InputDocument) -> dict[str, Any]:
    pages = {PAGE_ENDS: [end for _, end in document.pages]} if document.pages else {}
    return {**document.metadata, **pages}
