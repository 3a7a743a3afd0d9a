"""What a question does about damaged rows: mend what can be made again, and do without the rest.

- a chunk whose row is damaged is cut and encoded again from its document's text;
- a document that cannot be read or mended is left out, with a warning, until documents change: one damaged document
  must not keep all others from answering.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from pdllm_store import (
    ChunkNotFoundError,
    ChunkStore,
    DocumentNotFoundError,
    ModelFingerprint,
    RecordDamagedError,
    StoreError,
)

from pdllm_rag.first_stage import BM25Index
from pdllm_rag.prefill import Prefiller

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Mender:
    """Over one store and model.

    Attributes:
        left_out: ids of documents that are not to be read.
    """

    def __init__(
        self, store: ChunkStore, fingerprint: ModelFingerprint, prefiller: Prefiller, index: BM25Index
    ) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._prefiller = prefiller
        self._index = index
        self.left_out: set[str] = set()

    def run(self, find: Callable[[], T]) -> T:
        """What `find` gives, after mending or leaving out what it finds damaged.

        Raises:
            RecordDamagedError: something is damaged that is no document's.
        """
        while True:  # each pass mends a chunk or leaves a document out
            try:
                return find()
            except RecordDamagedError as error:
                if not self._mend(error) and not self.leave_out():
                    raise

    def leave_out(self) -> bool:
        """Leave out every document that cannot be read now; True if there are new ones."""
        found = set()
        for doc_id in self._index.doc_ids() - self.left_out:
            try:
                for ref in self._store.document(self._fingerprint, doc_id).chunks:
                    self._store.meta(ref.chunk_id)
            except (RecordDamagedError, ChunkNotFoundError, DocumentNotFoundError) as error:
                logger.warning("document %r is left out until it is prefilled again: %s", doc_id, error)
                found.add(doc_id)
        self.left_out |= found
        return bool(found)

    def _mend(self, error: RecordDamagedError) -> bool:
        try:
            return self._prefiller.mend(self._index.refs_of(error.chunk_ids))
        except StoreError as failure:
            logger.warning("not mended: %s", failure)
            return False
