"""The store as LangChain's index of documents, and as the record of what is in it.

`langchain_core.indexing.index(documents, PDLLMRecordManager(index), index, ...)` keeps a store in step with a source.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.indexing import DocumentIndex, RecordManager, UpsertResponse
from langchain_core.indexing.base import DeleteResponse
from pydantic import ConfigDict, PrivateAttr

from langchain_pdllm.retrievers import PDLLMRetriever
from pdllm_rag.components.storing import held, own_documents, store_documents
from pdllm_rag.metadata import plain


class PDLLMDocumentIndex(PDLLMRetriever, DocumentIndex):
    """Documents of a chunk-KV store by their ids: upsert, delete, get; and the retriever of their chunks.

    Every document is cut as the store cuts and encoded once; one that is unchanged costs nothing. The store is made if
    there is none. A document without id gets one from its text and metadata. Metadata comes back as JSON has it: dates
    as ISO 8601 text, paths as text, sets as lists. What does not go in is named in `failed`, and why in the log.
    """

    model_config = ConfigDict(extra="forbid")  # LangChain's base would ignore a mistyped option

    _creates: bool = PrivateAttr(default=True)

    def upsert(self, items: Sequence[Document], /, **kwargs: Any) -> UpsertResponse:
        """Add documents, or replace those of the same ids.

        Raises:
            ValueError: an option; there are none. StoreError: the store itself failed.
        """
        _refuse(kwargs)
        named = [(doc.id or _id_of(doc), doc.page_content, doc.metadata) for doc in items]
        failed = store_documents(self.opened(), named)
        return {
            "succeeded": [doc_id for doc_id in dict.fromkeys(n[0] for n in named) if doc_id not in failed],
            "failed": failed,
        }

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> DeleteResponse:
        """Delete documents with their chunks, KV and index entries; ids that are not there are no failure.

        Raises:
            ValueError: without ids.
        """
        _refuse(kwargs)
        if ids is None:
            raise ValueError("delete got no ids; expected a list of document ids")
        deleted = self.opened().delete_all(dict.fromkeys(ids))
        return {"succeeded": deleted, "num_deleted": len(deleted), "failed": [], "num_failed": 0}

    def get(self, ids: Sequence[str], /, **kwargs: Any) -> list[Document]:
        """The documents of these ids that are there, whole."""
        from pdllm_store import DocumentNotFoundError

        _refuse(kwargs)
        engine = self.opened()
        found = []
        for doc_id in dict.fromkeys(ids):
            try:
                document = engine.store.document(engine.fingerprint, doc_id)
            except DocumentNotFoundError:
                continue
            found.append(Document(id=doc_id, page_content=document.text, metadata=dict(document.metadata)))
        return found


class PDLLMRecordManager(RecordManager):
    """LangChain's record of what is indexed, read from the store itself, so that the two can never differ.

    A key is recorded if its document is in the store with all its chunks. The group of a document is what its metadata
    holds under `source_id_key`. Nothing is written: times are those of this object, for which a document that it has
    not updated is older than the run. Documents that came from files are none of its records.

    Args:
        index: the index over the store.
        source_id_key: the same as for `index(...)`.
    """

    def __init__(self, index: PDLLMDocumentIndex, source_id_key: str | Callable[[Document], str] | None = None) -> None:
        super().__init__(namespace=f"pdllm/{index.model_dump()['store']}")
        self._index = index
        self._source_id_key = source_id_key
        self._times: dict[str, float] = {}  # of documents that were updated, or there when somebody asked the time
        self._last = 0.0
        self._lock = threading.Lock()

    def create_schema(self) -> None:
        """Nothing: the store is the record."""

    def get_time(self) -> float:
        """Seconds since the epoch, later than any that was given before; what is in the store now is older."""
        with self._lock:
            for info in own_documents(self._index.opened()):
                self._times.setdefault(info.doc_id, 0.0)
            return self._now()

    def update(
        self,
        keys: Sequence[str],
        *,
        group_ids: Sequence[str | None] | None = None,
        time_at_least: float | None = None,
    ) -> None:
        """Take documents for seen now.

        Raises:
            ValueError: the numbers of keys and groups differ, a document's group is not what `source_id_key` finds, or
                the clock is behind `time_at_least`.
        """
        if group_ids is not None:
            if len(group_ids) != len(keys):
                raise ValueError(f"update got {len(keys)} keys and {len(group_ids)} group ids; expected as many")
            wanted = {key: plain(group) for key, group in zip(keys, group_ids, strict=True) if group is not None}
            for doc in self._index.get(list(wanted)):
                group, given = self._group(doc), wanted[doc.id or ""]
                if group != given:
                    raise ValueError(
                        f"document {doc.id!r} came with the source {given!r} and has {group!r} by the record manager's "
                        "source_id_key; give it the same source_id_key as index()"
                    )
        with self._lock:
            now = self._now()
            if time_at_least is not None and now < time_at_least:
                raise ValueError(f"the clock says {now}, which is before {time_at_least}")
            self._times.update(dict.fromkeys(keys, now))

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each document is in the store, whole."""
        return held(self._index.opened(), keys)

    def list_keys(
        self,
        *,
        before: float | None = None,
        after: float | None = None,
        group_ids: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[str]:
        """Documents in the store that fit; one that came since, by other hands, is newer than any time."""
        keys = [info.doc_id for info in own_documents(self._index.opened())]
        if not self._last:
            self.get_time()
        times = self._times
        if before is not None:
            keys = [key for key in keys if times.get(key, float("inf")) < before]
        if after is not None:
            keys = [key for key in keys if times.get(key, float("inf")) > after]
        if group_ids is not None:
            groups = [plain(group) for group in group_ids]
            keys = [doc.id or "" for doc in self._index.get(keys) if self._group(doc) in groups]
        return keys[:limit]

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete documents, since the record of one that is there cannot go."""
        self._index.delete(list(keys))

    async def acreate_schema(self) -> None:
        """Nothing."""

    async def aget_time(self) -> float:
        """As `get_time`, in a thread."""
        return await asyncio.to_thread(self.get_time)

    async def aupdate(
        self,
        keys: Sequence[str],
        *,
        group_ids: Sequence[str | None] | None = None,
        time_at_least: float | None = None,
    ) -> None:
        """As `update`, in a thread."""
        await asyncio.to_thread(self.update, keys, group_ids=group_ids, time_at_least=time_at_least)

    async def aexists(self, keys: Sequence[str]) -> list[bool]:
        """As `exists`, in a thread."""
        return await asyncio.to_thread(self.exists, keys)

    async def alist_keys(
        self,
        *,
        before: float | None = None,
        after: float | None = None,
        group_ids: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[str]:
        """As `list_keys`, in a thread."""
        return await asyncio.to_thread(self.list_keys, before=before, after=after, group_ids=group_ids, limit=limit)

    async def adelete_keys(self, keys: Sequence[str]) -> None:
        """As `delete_keys`, in a thread."""
        await asyncio.to_thread(self.delete_keys, keys)

    def _now(self) -> float:
        self._last = max(time.time(), self._last + 1e-6)
        return self._last

    def _group(self, doc: Document) -> str | None:
        key = self._source_id_key
        return doc.metadata.get(key) if isinstance(key, str) else key and key(doc)


def _id_of(doc: Document) -> str:
    try:
        metadata = sorted(plain(doc.metadata).items(), key=repr)
    except ValueError:
        metadata = []  # it will not go in
    content = repr((doc.page_content, metadata))
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise ValueError(f"PDLLMDocumentIndex got unknown option {min(kwargs)!r}; expected none")
