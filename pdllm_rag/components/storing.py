"""Documents of a framework into the store, and out of it again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdllm_rag.metadata import plain

if TYPE_CHECKING:
    from pdllm_store import DocumentInfo

    from pdllm_rag.engine import RagEngine

logger = logging.getLogger(__name__)


def store_documents(engine: RagEngine, documents: Iterable[tuple[str, str, Mapping[str, Any]]]) -> list[str]:
    """Prefill documents (id, text, metadata); unchanged ones cost nothing.

    Returns the ids of those that did not go in, and logs why.

    Raises:
        StoreError: the store itself failed.
    """
    from pdllm_rag.prefill import InputDocument

    failed: dict[str, str] = {}
    inputs = []
    for doc_id, text, metadata in documents:
        try:
            inputs.append(InputDocument(doc_id, text, doc_id, metadata=plain(metadata)))
        except ValueError as error:
            failed[doc_id] = str(error)
    failed |= {failure.path: failure.reason for failure in engine.prefill(inputs).failed}
    for doc_id, reason in failed.items():
        logger.warning("document %r was not stored: %s", doc_id, reason)
    return list(failed)


def own_documents(engine: RagEngine) -> list[DocumentInfo]:
    """Documents that came from a framework, not from files."""
    return [info for info in engine.documents() if info.source == info.doc_id]


def held(engine: RagEngine, doc_ids: Sequence[str]) -> list[bool]:
    """Whether each document is there with all its chunks, or with chunks that can be computed again."""
    from pdllm_store import DocumentNotFoundError, RecordDamagedError

    found = []
    for doc_id in doc_ids:
        try:
            chunk_ids = [ref.chunk_id for ref in engine.store.document(engine.fingerprint, doc_id).chunks]
        except (DocumentNotFoundError, RecordDamagedError):
            found.append(False)
            continue
        missing = engine.store.missing(chunk_ids)
        found.append(len(engine.store.evicted(missing)) == len(missing))
    return found
