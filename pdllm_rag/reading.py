"""What a question reads: chunks, where they stand, and their KV."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdllm_store import ChunkKV, ChunkRef, ChunkStore, DocumentNotFoundError, ModelFingerprint

from pdllm_rag.metadata import page_ends
from pdllm_rag.placement import Placement
from pdllm_rag.retrieval import Selection

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """A chunk that a question may read: where it stands, its tokens and text, and where its document's pages end."""

    ref: ChunkRef
    token_ids: Sequence[int]
    text: str
    page_ends: Sequence[int] = ()


class Found(NamedTuple):
    """What retrieval gave: sources best first, their selection, and KV that is already at hand."""

    sources: Sequence[Source]
    selection: Selection
    kv: Mapping[bytes, ChunkKV]
    note: str = ""  # why there are no sources, if the filter left none
    exact: bool = False  # exactly these were asked for: none may be left out
    alone: bool = False  # nothing was looked for: the model answers without documents


class Retrieved(NamedTuple):
    """A chunk that retrieval chose; they come best first.

    Attributes:
        ref: its document and where it stands there.
        score: mean log-likelihood s in nats per token, less what `rank_weight` takes off; higher is better. None if
            it was not scored.
        text: of the chunk.
        margin: how far the best candidate stands above their median, the same for all chunks of a question; or None.
    """

    ref: ChunkRef
    score: float | None
    text: str
    margin: float | None = None


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


def sources_of(store: ChunkStore, fingerprint: ModelFingerprint, refs: Sequence[ChunkRef]) -> list[Source]:
    """The chunks with their tokens and texts.

    Raises:
        DocumentNotFoundError: a document was deleted or replaced since; RecordDamagedError.
    """
    documents = {doc_id: store.document(fingerprint, doc_id) for doc_id in {ref.doc_id for ref in refs}}
    stale = [ref for ref in refs if ref not in documents[ref.doc_id].chunks]
    if stale:
        raise DocumentNotFoundError(f"document {stale[0].doc_id!r} was replaced while it was read; ask again")
    return [
        Source(
            ref,
            store.meta(ref.chunk_id).token_ids.tolist(),
            documents[ref.doc_id].text[ref.char_start : ref.char_end],
            page_ends(documents[ref.doc_id], ref),
        )
        for ref in refs
    ]


def told(found: Found) -> Found:
    """What was found, a warning said if a filter left nothing."""
    if found.note:
        logger.warning("%s", found.note)
    return found
