"""The one process that writes: an actor beside the store, and what a worker sees of the store through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pdllm_store import ChunkId, ChunkKV, ChunkMeta, ChunkStore, Document, DocumentInfo, ModelFingerprint, StoreError
from pdllm_store.held import is_whole

from pdllm_rag.errors import ClusterError

SentKV = tuple[ChunkMeta, NDArray[Any], NDArray[Any]]


class Place(NamedTuple):
    """Where a worker runs: its node's address and its process."""

    node: str
    pid: int


@dataclass
class WorkerTally:
    """What one worker process did; one that was killed counts by itself, and so does the one that took its place.

    Attributes:
        begun: chunks that it began to encode.
        chunks, tokens: that it brought and the store did not have.
        seconds: from its first chunk to its last.
    """

    place: Place
    first: float
    begun: int = 0
    chunks: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON form."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        counts = {"begun": self.begun, "chunks": self.chunks, "tokens": self.tokens}
        return {**self.place._asdict(), **counts, "seconds": self.seconds, "tokens_per_s": rate}


class Tally(NamedTuple):
    """What all workers did. `replaced` has each document that went in, and whether it replaced an earlier one."""

    workers: list[WorkerTally]
    replaced: dict[str, bool]
    bytes_written: int


class Writer:
    """An actor that holds the store open. Whatever it was sent is durable when it answers."""

    def __init__(self, open_store: Callable[[], ChunkStore], fingerprint: ModelFingerprint) -> None:
        self._store = open_store()
        self._fingerprint = fingerprint
        self._store.register(fingerprint)
        self._held = {info.doc_id: info for info in self._store.documents(fingerprint)}
        self._workers: dict[Place, WorkerTally] = {}
        self._replaced: dict[str, bool] = {}
        self._bytes_written = 0

    def max_bytes(self) -> int | None:
        return self._store.max_bytes

    def documents(self, doc_ids: Sequence[str]) -> list[DocumentInfo]:
        """Those of these ids that the store holds, as they were when the run began or went in since."""
        return [self._held[doc_id] for doc_id in doc_ids if doc_id in self._held]

    def is_whole(self, info: DocumentInfo) -> bool:
        return is_whole(self._store, self._fingerprint, info)

    def missing(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
        return self._store.missing(chunk_ids)

    def evicted(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
        return self._store.evicted(chunk_ids)

    def begin(self, place: Place, n_chunks: int) -> None:
        """A worker is about to encode so many chunks."""
        now = time.perf_counter()
        self._workers.setdefault(place, WorkerTally(place, now)).begun += n_chunks

    def put(self, place: Place, sent: Sequence[SentKV]) -> int:
        new = set(self._store.missing([meta.chunk_id for meta, _, _ in sent]))
        n_bytes = self._store.put(self._fingerprint, [(m, ChunkKV(_tensor(k), _tensor(v))) for m, k, v in sent])
        tally = self._workers[place]
        tally.chunks += len(new)
        tally.tokens += sum(len(meta.token_ids) for meta, _, _ in sent if meta.chunk_id in new)
        tally.seconds = time.perf_counter() - tally.first
        self._bytes_written += n_bytes
        return n_bytes

    def add_documents(self, added: Sequence[Document]) -> list[bool | StoreError | ValueError]:
        results = self._store.add_documents(self._fingerprint, added)
        for document, replaced in zip(added, results, strict=True):
            if isinstance(replaced, bool):
                self._replaced.setdefault(document.doc_id, replaced)
                self._held[document.doc_id] = DocumentInfo(
                    document.doc_id,
                    document.source,
                    document.text_id,
                    document.recipe,
                    tuple(ref.chunk_id for ref in document.chunks),
                    document.n_tokens,
                    n_bytes=0,
                    pinned=False,
                    metadata=document.metadata,
                )
        return results

    def drop_orphans(self, chunk_ids: Sequence[ChunkId]) -> None:
        self._store.drop_orphans(chunk_ids)

    def tally(self) -> Tally:
        """What was done up to now."""
        return Tally(list(self._workers.values()), self._replaced, self._bytes_written)

    def close(self) -> None:
        self._store.close()


class RemoteStore:
    """As much of a `ChunkStore` as a prefill of some documents needs, each call one question to the writer.

    Args:
        share: of the store's cap that these documents may take for granted.
    """

    def __init__(self, writer: Any, place: Place, doc_ids: Sequence[str], *, share: float) -> None:
        self._writer = writer
        self._place = place
        self._doc_ids = doc_ids
        self._share = share

    @property
    def max_bytes(self) -> int | None:
        cap: int | None = self._ask("max_bytes")
        return None if cap is None else int(cap * self._share)

    def register(self, _: ModelFingerprint) -> None:
        """The writer has done it."""

    def documents(self, _: ModelFingerprint) -> list[DocumentInfo]:
        found: list[DocumentInfo] = self._ask("documents", self._doc_ids)
        return found

    def is_whole(self, info: DocumentInfo) -> bool:
        return bool(self._ask("is_whole", info))

    def missing(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
        found: list[ChunkId] = self._ask("missing", list(chunk_ids))
        return found

    def evicted(self, chunk_ids: Sequence[ChunkId]) -> list[ChunkId]:
        found: list[ChunkId] = self._ask("evicted", list(chunk_ids)) if chunk_ids else []
        return found

    def begin(self, n_chunks: int) -> None:
        """So many chunks are about to be encoded here."""
        self._ask("begin", self._place, n_chunks)

    def put(self, _: ModelFingerprint, items: Iterable[tuple[ChunkMeta, ChunkKV]]) -> int:
        return int(self._ask("put", self._place, [(meta, _array(kv.k), _array(kv.v)) for meta, kv in items]))

    def add_documents(self, _: ModelFingerprint, added: Sequence[Document]) -> list[bool | StoreError | ValueError]:
        found: list[bool | StoreError | ValueError] = self._ask("add_documents", list(added))
        return found

    def drop_orphans(self, chunk_ids: Iterable[ChunkId]) -> None:
        self._ask("drop_orphans", list(chunk_ids))

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The writer's answer, or the error that it met, as if it had been met here."""
        import ray

        try:
            return ray.get(getattr(self._writer, method).remote(*arguments))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayActorError as error:
            raise ClusterError(
                "the process that writes the store was killed or has run out of memory; what is written stays, and the "
                "same command goes on from there"
            ) from error


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """What travels without being copied: numpy's arrays do, and it knows no bfloat16."""
    whole = tensor.contiguous()
    return (whole.view(torch.int16) if whole.dtype == torch.bfloat16 else whole).numpy()


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """The tensor again, in memory of its own: what has travelled lies where nobody may write."""
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == np.int16 else tensor
