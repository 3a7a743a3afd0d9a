"""What a question reads: chunks, where they stand, and their KV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pdllm_store import ChunkKV, ChunkRef, DocumentInfo

from pdllm_rag.placement import Placement
from pdllm_rag.retrieval import Selection


class Source(NamedTuple):
    """A chunk that a question may read: where it stands, its tokens and its text."""

    ref: ChunkRef
    token_ids: Sequence[int]
    text: str


class Found(NamedTuple):
    """What retrieval gave: sources best first, their selection, and KV that is already at hand."""

    sources: Sequence[Source]
    selection: Selection
    kv: Mapping[bytes, ChunkKV]
    exact: bool = False  # exactly these were asked for: none may be left out


class Reading(NamedTuple):
    """What the model reads: sources in document order, where they stand, and their KV if the decoder needs it.

    fresh: sources that were encoded for this question instead of served from the store.
    """

    sources: Sequence[Source]
    placement: Placement
    kv: Sequence[ChunkKV]
    fresh: Sequence[Source]

    def n_tokens(self) -> int:
        """Context tokens."""
        return sum(len(source.token_ids) for source in self.sources)

    def n_cached(self) -> int:
        """Those served from the store."""
        return self.n_tokens() - sum(len(source.token_ids) for source in self.fresh)


def matching(documents: Iterable[DocumentInfo], wanted: Mapping[str, Any]) -> set[str]:
    """Ids of documents with this metadata; doc_id and source count as metadata, values compare as text."""
    return {
        info.doc_id
        for info in documents
        if all(
            str({**info.metadata, "doc_id": info.doc_id, "source": info.source}.get(key)) == str(value)
            for key, value in wanted.items()
        )
    }
