"""A component that retrieves, and what it finds in the frameworks' terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import StrictInt, model_validator

from pdllm_rag.components.fields import Number, StoreComponent
from pdllm_rag.metadata import page_ends, pages_of, shown

if TYPE_CHECKING:
    from pdllm_store import ChunkRef, Document

RETRIEVAL_OPTIONS = ("k", "candidates", "first_stage", "filter", "score_window")


class Hit(NamedTuple):
    """A retrieved chunk. `chunk_id` is hex; the metadata is the document's own and the chunk's."""

    chunk_id: str
    text: str
    score: float | None
    char_end: int
    metadata: dict[str, Any]


class SearchComponent(StoreComponent):
    """A component that retrieves.

    Attributes:
        k: most chunks to return.
        candidates: chunks that are scored.
        first_stage: what proposes them: a name, or one's own (`pdllm_rag.foreign`).
        filter: metadata that documents must have.
        score_window: chunks that score this far below the best one are left out; None leaves none out. (0.5 is what the
            bundled model answers with when it retrieves by itself.)
    """

    k: StrictInt = 4
    candidates: StrictInt | None = None
    first_stage: Any = None
    filter: dict[str, Any] | None = None
    score_window: Number | None = None

    @model_validator(mode="after")
    def _check_search_options(self) -> SearchComponent:
        from pdllm_rag.config import AskOptions

        AskOptions().with_changes(self.options(RETRIEVAL_OPTIONS, {}))
        return self

    def search(self, question: str, given: Mapping[str, Any]) -> list[Hit]:
        """The best chunks, best first; options given here win."""
        engine = self.opened()
        found = engine.retrieve(question, **self.options(RETRIEVAL_OPTIONS, given))
        documents = {
            doc_id: engine.store.document(engine.fingerprint, doc_id) for doc_id in {hit.ref.doc_id for hit in found}
        }
        hits = []
        for hit in found:
            metadata = chunk_metadata(documents[hit.ref.doc_id], hit.ref, score=hit.score)
            if hit.margin is not None:
                metadata["margin"] = hit.margin
            hits.append(Hit(hit.ref.chunk_id.hex(), hit.text, hit.score, hit.ref.char_end, metadata))
        return hits


def chunk_metadata(document: Document, ref: ChunkRef, **more: Any) -> dict[str, Any]:
    """What frameworks are told of a chunk: the document's own metadata, and where the chunk stands in it."""
    place = {
        "doc_id": ref.doc_id,
        "chunk_id": ref.chunk_id.hex(),
        "ordinal": ref.ordinal,
        "start_index": ref.char_start,
    }
    text = document.text[ref.char_start : ref.char_end]
    page, page_end = pages_of(page_ends(document, ref), ref.char_start, text)
    pages = {name: number for name, number in (("page", page), ("page_end", page_end)) if number is not None}
    return {"source": document.source, **shown(document.metadata), **place, **pages, **more}
