"""A first stage of the user's: any function from a question to passages of documents that the store holds.

The function is called with the question's text and the number of chunks wanted. It gives hits, best first, each a pair
(doc_id, where): `where` is a passage's text, its code points (start, end), or the id of a chunk (bytes). A passage
stands for the chunks that it covers at least half of, or that hold at least half of it.

    engine.answer(question, first_stage=lambda text, n: [(hit.doc, hit.text) for hit in mine.search(text, limit=n)])
    engine.answer(question, first_stage=from_langchain(retriever))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from pdllm_store import ChunkRef, ChunkStore, Document, DocumentNotFoundError, ModelFingerprint

from pdllm_rag.errors import FirstStageError
from pdllm_rag.first_stage import Candidate

Where = str | tuple[int, int] | bytes
Search = Callable[[str, int], Iterable[tuple[str, Where]]]


class ForeignStage:
    """A function's hits as stored chunks; a chunk's score is 1 / rank."""

    def __init__(self, search: Search, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        self._search = search
        self._store = store
        self._fingerprint = fingerprint

    def search(self, text: str, n: int, /, *, doc_ids: Collection[str] | None = None) -> list[Candidate]:
        """At most n chunks, in the order of the hits; hits in other documents than `doc_ids` are left out.

        Raises:
            FirstStageError: a hit is malformed, or is in no document of this store.
        """
        documents: dict[str, Document] = {}
        found: dict[bytes, ChunkRef] = {}
        for number, hit in enumerate(self._search(text, n), start=1):
            doc_id, where = _checked(hit, number)
            if doc_id not in documents:
                documents[doc_id] = self._document(doc_id, number)
            for ref in _chunks_at(documents[doc_id], where, number):
                if doc_ids is None or doc_id in doc_ids:
                    found.setdefault(ref.chunk_id, ref)
            if len(found) >= n:
                break
        return [Candidate(ref, 1 / rank) for rank, ref in enumerate(list(found.values())[:n], start=1)]

    def _document(self, doc_id: str, number: int) -> Document:
        try:
            return self._store.document(self._fingerprint, doc_id)
        except DocumentNotFoundError as error:
            raise FirstStageError(
                f"hit {number} of the first stage is in document {doc_id!r}, which the store {self._store.path} does "
                "not hold for this model; expected an id as `pdllm store list` shows it. Prefill the document, or "
                "give the ids that it was prefilled under"
            ) from error


def from_langchain(retriever: Any, *, doc_id_key: str | None = None) -> Search:
    """The search of a LangChain retriever (`invoke`).

    Args:
        doc_id_key: metadata that holds the document's id in the store; None takes the hit's own id, else "source".
    """

    def search(text: str, n: int) -> Iterator[tuple[str, Where]]:
        del n  # the retriever's own `k` decides
        for document in retriever.invoke(text):
            names = (
                [document.metadata.get(doc_id_key)] if doc_id_key else [document.id, document.metadata.get("source")]
            )
            yield _named(names, doc_id_key), document.page_content

    return search


def from_llama_index(retriever: Any, *, doc_id_key: str | None = None) -> Search:
    """The search of a LlamaIndex retriever (`retrieve`).

    Args:
        doc_id_key: metadata that holds the document's id in the store; None takes the node's `ref_doc_id`.
    """

    def search(text: str, n: int) -> Iterator[tuple[str, Where]]:
        del n  # the retriever's own `similarity_top_k` decides
        for hit in retriever.retrieve(text):
            names = [hit.node.metadata.get(doc_id_key)] if doc_id_key else [hit.node.ref_doc_id]
            yield _named(names, doc_id_key), hit.node.get_content()

    return search


def _named(names: Sequence[object], doc_id_key: str | None) -> str:
    found = next((name for name in names if isinstance(name, str)), None)
    if found is None:
        raise FirstStageError(
            "a hit of the first stage does not say which document it is of "
            f"({'its id' if doc_id_key is None else f'metadata {doc_id_key!r}'} is none); give doc_id_key, the name of "
            "the metadata that holds the document's id in the store"
        )
    return found


def _checked(hit: object, number: int) -> tuple[str, Where]:
    expected = "expected a pair (doc_id, passage text | (start, end) | chunk id as bytes)"
    if not isinstance(hit, tuple) or len(hit) != 2 or not isinstance(hit[0], str):
        raise FirstStageError(f"hit {number} of the first stage is a {type(hit).__name__}; {expected}")
    doc_id, where = hit
    is_span = isinstance(where, (tuple, list)) and len(where) == 2 and all(type(end) is int for end in where)
    if is_span:
        return doc_id, (where[0], where[1])
    if (isinstance(where, str) and where.strip()) or (isinstance(where, bytes) and where):
        return doc_id, where
    raise FirstStageError(f"hit {number} of the first stage is at {type(where).__name__} of {doc_id!r}; {expected}")


def _chunks_at(document: Document, where: Where, number: int) -> list[ChunkRef]:
    if isinstance(where, bytes):
        found = [ref for ref in document.chunks if ref.chunk_id == where]
        if not found:
            raise FirstStageError(
                f"hit {number} of the first stage is chunk {where.hex()} of document {document.doc_id!r}, which has no "
                "such chunk; expected an id as `pdllm store list --json` shows it"
            )
        return found[:1]
    start, end = _span(document, where, number) if isinstance(where, str) else where
    if not 0 <= start < end <= len(document.text):
        raise FirstStageError(
            f"hit {number} of the first stage is at {start}:{end} of document {document.doc_id!r}, which has "
            f"{len(document.text)} code points; expected 0 <= start < end <= {len(document.text)}"
        )
    shared = [(min(end, ref.char_end) - max(start, ref.char_start), ref) for ref in document.chunks]
    enough = [
        (length, ref)
        for length, ref in shared
        if length > 0 and 2 * length >= min(end - start, ref.char_end - ref.char_start)
    ]
    best = sorted(enough or shared, key=lambda entry: (-entry[0], entry[1]))
    return [ref for _, ref in (best if enough else best[:1])]


def _span(document: Document, passage: str, number: int) -> tuple[int, int]:
    """Code points of a passage; white space may differ."""
    start = document.text.find(passage)
    if start >= 0:
        return start, start + len(passage)
    found = re.search(r"\s+".join(map(re.escape, passage.split())), document.text)
    if found is None:
        raise FirstStageError(
            f"hit {number} of the first stage is a passage of {len(passage)} code points that document "
            f"{document.doc_id!r} does not hold; expected a part of its text as it was prefilled, white space aside. "
            "Give code points (start, end) where the passage was changed"
        )
    return found.start(), found.end()
