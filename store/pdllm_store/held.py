"""What a store holds well enough not to be given again; asked by whoever fills one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pdllm_store.errors import StoreError
from pdllm_store.protocol import ChunkStore
from pdllm_store.types import ChunkId, DocumentInfo, ModelFingerprint

logger = logging.getLogger(__name__)


def absent(store: ChunkStore, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
    """The distinct chunks to bring. Evicted ones are not: bringing them would evict others, and so on every night."""
    missing = store.missing(chunk_ids)
    evicted = set(store.evicted(missing))
    return [chunk_id for chunk_id in missing if chunk_id not in evicted]


def is_whole(store: ChunkStore, fingerprint: ModelFingerprint, info: DocumentInfo) -> bool:
    """Whether a store can still give what it lists of a document; what it cannot is written again."""
    try:
        store.document(fingerprint, info.doc_id)
        for chunk_id in info.chunk_ids:
            store.meta(chunk_id)
    except StoreError as error:
        logger.warning("document %r is written again: %s", info.doc_id, error)
        return False
    return not absent(store, info.chunk_ids)
