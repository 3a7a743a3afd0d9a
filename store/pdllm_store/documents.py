"""What the tables hold of documents: a row, the text, and one reference for each chunk, all under one key."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pdllm_store import chunks
from pdllm_store.counts import count_documents, count_generation
from pdllm_store.errors import (
    ChunkNotFoundError,
    DocumentConflictError,
    DocumentNotFoundError,
    RecordDamagedError,
    StoreError,
)
from pdllm_store.fingerprints import register
from pdllm_store.rows import (
    DocumentRow,
    OnDamage,
    damaged,
    document_key,
    pack_document,
    pack_ref,
    pack_text,
    ref_key,
    seal_document,
    unpack_document,
    unpack_ref,
    unpack_text,
)
from pdllm_store.tables import Tables
from pdllm_store.types import ID_BYTES, ChunkId, ChunkRef, Document, DocumentInfo, ModelFingerprint

logger = logging.getLogger(__name__)


class StoredDocument(NamedTuple):
    """The sealed rows of one document."""

    row: bytes
    text: bytes
    refs: Sequence[bytes]  # in order of their ordinals


def check_document(document: Document) -> None:
    """Raises ValueError if ids, ordinals or offsets of a document contradict each other."""
    name = f"document {document.doc_id!r}"
    if not document.doc_id:
        raise ValueError("a document id must not be empty")
    if len(document.text_id) != ID_BYTES:
        raise ValueError(f"{name}: text_id has {len(document.text_id)} bytes, expected {ID_BYTES}")
    for index, ref in enumerate(document.chunks):
        if ref.doc_id != document.doc_id or ref.ordinal != index:
            raise ValueError(f"{name}: chunk {index} is of {ref.doc_id!r} with ordinal {ref.ordinal}")
        if len(ref.chunk_id) != ID_BYTES:
            raise ValueError(f"{name}: chunk {index} has an id of {len(ref.chunk_id)} bytes, expected {ID_BYTES}")
        if not 0 <= ref.char_start <= ref.char_end <= len(document.text):
            raise ValueError(
                f"{name}: chunk {index} spans {ref.char_start}:{ref.char_end} of {len(document.text)} code points"
            )
        if ref.page is not None and not 1 <= ref.page < 1 << 32:
            raise ValueError(f"{name}: chunk {index} is on page {ref.page}, pages count from 1")


def add(tables: Tables, fingerprint: ModelFingerprint, document: Document) -> bool:
    """Write a checked document, replacing one of the same id and source; True if one was replaced.

    Raises:
        ChunkNotFoundError, DocumentConflictError, and ValueError for its metadata; nothing was changed.
    """
    key = document_key(fingerprint.digest, document.doc_id)
    old = _row_or_damaged(tables, key)
    if isinstance(old, DocumentRow) and old.source != document.source:
        raise DocumentConflictError(
            f"document id {document.doc_id!r} is held by {old.source!r}, so {document.source!r} cannot take it; "
            "give it another id or delete the other first"
        )
    new_refs = Counter(ref.chunk_id for ref in document.chunks)
    missing = chunks.missing(tables, new_refs)
    evicted = set(chunks.evicted(tables, missing))
    if absent := [chunk_id for chunk_id in missing if chunk_id not in evicted]:
        raise ChunkNotFoundError(
            f"document {document.doc_id!r} refers to {len(absent)} chunks without KV (of {len(new_refs)}), the "
            f"first is {absent[0].hex()}; put them first",
            tuple(absent),
        )
    pinned = isinstance(old, DocumentRow) and old.pinned
    refs = [pack_ref(ref_key(key, ref.ordinal), ref) for ref in document.chunks]
    row, text = pack_document(key, document, pinned=pinned), pack_text(key, document.text)
    replace(tables, key, StoredDocument(row, text, refs))
    register(tables, fingerprint)
    return old is not None


def add_all(
    tables: Tables, fingerprint: ModelFingerprint, documents: Iterable[Document]
) -> list[bool | StoreError | ValueError]:
    """As `add` for each document, once it is checked; what is wrong with one keeps no other out."""
    results: list[bool | StoreError | ValueError] = []
    for document in documents:
        try:
            check_document(document)
            results.append(add(tables, fingerprint, document))
        except (ChunkNotFoundError, DocumentConflictError, ValueError) as error:
            results.append(error)
    return results


def sizes(document: Document) -> list[int]:
    """The most bytes of the values that `add` writes."""
    try:
        row = len(pack_document(bytes(2 * ID_BYTES), document, pinned=False))
    except ValueError:
        return []  # `add` refuses it
    return [4 * len(document.text), 4096 + row, *[64] * len(document.chunks)]


def replace(tables: Tables, key: bytes, stored: StoredDocument) -> None:
    """Write the rows of a document whose chunks are there, in the place of those that it had.

    Raises RecordDamagedError if a row fails its seal; nothing was changed.
    """
    old = _row_or_damaged(tables, key)
    new_refs = referred(key, stored.refs)
    is_pinned, was_pinned = unpack_document(key, stored.row).pinned, isinstance(old, DocumentRow) and old.pinned
    old_refs = _drop_refs(tables, key)
    tables.put("documents", key, stored.row)
    tables.put("texts", key, stored.text)
    for ordinal, ref in enumerate(stored.refs):
        tables.put("refs", ref_key(key, ordinal), ref)
    for chunk_id in new_refs | old_refs:
        change = new_refs[chunk_id] - old_refs[chunk_id]
        pins = is_pinned * (chunk_id in new_refs) - was_pinned * (chunk_id in old_refs)
        if change or pins:
            chunks.refer(tables, chunk_id, change, pins=pins)
    if isinstance(old, RecordDamagedError):
        logger.warning("document %s had a damaged row; if it was pinned, pin it again", key.hex())
        chunks.recount_references(tables, new_refs | old_refs)
    count_documents(tables, key[:ID_BYTES], int(old is None))
    count_generation(tables)


def referred(key: bytes, refs: Sequence[bytes]) -> Counter[ChunkId]:
    """How often each chunk stands in a document's sealed references. Raises RecordDamagedError."""
    return Counter(unpack_ref(ref_key(key, ordinal), ref, "").chunk_id for ordinal, ref in enumerate(refs))


def stored(tables: Tables, key: bytes) -> StoredDocument | None:
    """The rows of a document as they are, None if there is none. Raises RecordDamagedError if some are lost."""
    row, text = tables.get("documents", key), tables.get("texts", key)
    if row is None:
        return None
    refs = [bytes(value) for _, value in tables.scan("refs", key)]
    if text is None or len(refs) != unpack_document(key, row).n_chunks:
        raise damaged("document", key, "its text or some of its references are absent")
    return StoredDocument(bytes(row), bytes(text), refs)


def delete(tables: Tables, fingerprint: ModelFingerprint, doc_id: str) -> bool:
    """Delete a document, damaged or not, and the chunks that only it refers to; False if there is none."""
    return delete_key(tables, document_key(fingerprint.digest, doc_id))


def delete_all(tables: Tables) -> int:
    """Delete every document of every model, damaged or not; returns how many."""
    return sum(delete_key(tables, key) for key in list(tables.keys("documents")))


def delete_key(tables: Tables, key: bytes) -> bool:
    """As `delete`, by the key of the document's row."""
    old = _row_or_damaged(tables, key)
    if old is None:
        return False
    tables.delete("documents", key)
    tables.delete("texts", key)
    pins = int(isinstance(old, DocumentRow) and old.pinned)
    old_refs = _drop_refs(tables, key)
    for chunk_id, n_refs in old_refs.items():
        chunks.refer(tables, chunk_id, -n_refs, pins=-pins)
    if isinstance(old, RecordDamagedError):
        chunks.recount_references(tables, old_refs)
    count_documents(tables, key[:ID_BYTES], -1)
    count_generation(tables)
    return True


def get(tables: Tables, fingerprint: ModelFingerprint, doc_id: str) -> Document:
    """Raises DocumentNotFoundError and RecordDamagedError."""
    key = document_key(fingerprint.digest, doc_id)
    row = _held(tables, key, doc_id)
    text = tables.get("texts", key)
    if text is None:
        raise damaged("text", key, "it is absent")
    refs = tuple(unpack_ref(ref, entry, doc_id) for ref, entry in tables.scan("refs", key))
    if len(refs) != row.n_chunks:
        raise damaged("document", key, f"{len(refs)} of its {row.n_chunks} references are there")
    return Document(
        row.doc_id, row.source, unpack_text(key, text), row.text_id, row.recipe, refs, row.n_tokens, row.metadata
    )


def infos(tables: Tables, fingerprint: ModelFingerprint, on_damage: OnDamage) -> list[DocumentInfo]:
    """Every whole document of a model in order of doc_id."""
    found = []
    for row, refs in _documents(tables, fingerprint, on_damage):
        chunk_ids = tuple(ref.chunk_id for ref in refs)
        n_bytes = sum(chunks.stored_bytes(tables, chunk_id) for chunk_id in set(chunk_ids))
        found.append(
            DocumentInfo(
                row.doc_id,
                row.source,
                row.text_id,
                row.recipe,
                chunk_ids,
                row.n_tokens,
                n_bytes,
                row.pinned,
                row.metadata,
            )
        )
    return sorted(found, key=lambda info: info.doc_id)


def refs(tables: Tables, fingerprint: ModelFingerprint, on_damage: OnDamage) -> list[ChunkRef]:
    """Every reference of every whole document of a model, in order of (doc_id, ordinal)."""
    found = sorted(_documents(tables, fingerprint, on_damage), key=lambda entry: entry[0].doc_id)
    return [ref for _, document_refs in found for ref in document_refs]


def set_pinned(tables: Tables, fingerprint: ModelFingerprint, doc_id: str, *, pinned: bool) -> bool:
    """True if that changed anything. Raises DocumentNotFoundError and RecordDamagedError."""
    key = document_key(fingerprint.digest, doc_id)
    row = _held(tables, key, doc_id)
    if row.pinned == pinned:
        return False
    chunk_ids = {unpack_ref(ref, entry, doc_id).chunk_id for ref, entry in tables.scan("refs", key)}
    tables.put("documents", key, seal_document(key, row._replace(pinned=pinned)))
    for chunk_id in chunk_ids:
        chunks.refer(tables, chunk_id, 0, pins=1 if pinned else -1)
    count_generation(tables)
    return True


def _documents(
    tables: Tables, fingerprint: ModelFingerprint, on_damage: OnDamage
) -> Iterator[tuple[DocumentRow, list[ChunkRef]]]:
    """Documents with their references, in order of key: both tables sort alike, so one pass reads both."""
    entries = tables.scan("refs", fingerprint.digest)
    entry = next(entries, None)
    for key, value in tables.scan("documents", fingerprint.digest):
        while entry is not None and entry[0][: len(key)] < key:
            entry = next(entries, None)  # a reference without its document; `verify` names it
        found = []
        try:
            row = unpack_document(key, value)
            while entry is not None and entry[0].startswith(key):
                found.append(unpack_ref(*entry, row.doc_id))
                entry = next(entries, None)
            if len(found) != row.n_chunks:
                raise damaged("document", key, f"{len(found)} of its {row.n_chunks} references are there")
        except RecordDamagedError as error:
            on_damage(error)
            continue
        yield row, found


def _held(tables: Tables, key: bytes, doc_id: str) -> DocumentRow:
    """Raises DocumentNotFoundError and RecordDamagedError."""
    value = tables.get("documents", key)
    if value is None:
        raise DocumentNotFoundError(f"the store holds no document {doc_id!r} under fingerprint {key[:16].hex()}")
    return unpack_document(key, value)


def _row_or_damaged(tables: Tables, key: bytes) -> DocumentRow | RecordDamagedError | None:
    value = tables.get("documents", key)
    if value is None:
        return None
    try:
        return unpack_document(key, value)
    except RecordDamagedError as error:
        return error


def _drop_refs(tables: Tables, key: bytes) -> Counter[ChunkId]:
    """Delete a document's references; how often each chunk was referred to."""
    counted: Counter[ChunkId] = Counter()
    keys = []
    for ref, value in tables.scan("refs", key):
        keys.append(ref)
        try:
            counted[unpack_ref(ref, value, "").chunk_id] += 1
        except RecordDamagedError:
            continue  # the chunk keeps one reference too many until `compact` counts them anew
    for ref in keys:
        tables.delete("refs", ref)
    return counted
