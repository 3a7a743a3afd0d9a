"""Chunks and documents that follow from numbers, so that every process knows what it must read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pdllm_store.protocol import ChunkStore
from pdllm_store.testing.campaigns.guarantee import require
from pdllm_store.testing.fakes import bits, make_document, random_chunk
from pdllm_store.types import ChunkId, ChunkKV, ChunkMeta, Document, DocumentInfo, ModelFingerprint


class Version(NamedTuple):
    """One state of one document."""

    number: int  # of the document
    revision: int
    seeds: tuple[int, ...]  # of its chunks, in order

    @property
    def doc_id(self) -> str:
        return f"d{self.number:03}"


class Catalogue:
    """The chunks 0, 1, ... of one model, and every document that can be made of them."""

    def __init__(self, fingerprint: ModelFingerprint, n_tokens: Sequence[int]) -> None:
        """Make one chunk for each entry of `n_tokens`."""
        self.fingerprint = fingerprint
        self.items: list[tuple[ChunkMeta, ChunkKV]] = [
            random_chunk(fingerprint, seed=seed, n_tokens=n) for seed, n in enumerate(n_tokens)
        ]
        self.seed_of = {meta.chunk_id: seed for seed, (meta, _) in enumerate(self.items)}

    def ids(self, seeds: Iterable[int]) -> list[ChunkId]:
        return [self.items[seed][0].chunk_id for seed in seeds]

    def put(self, store: ChunkStore, seeds: Iterable[int]) -> None:
        """Put several chunks in one transaction."""
        store.put(self.fingerprint, [self.items[seed] for seed in seeds])

    def document(self, version: Version) -> Document:
        number, revision, seeds = version
        metas = [self.items[seed][0] for seed in seeds]
        sentence = f"Document {number} in revision {revision} of the chunks {seeds}, and no other. "
        return make_document(
            version.doc_id,
            metas,
            text=sentence * (1 + revision % 7 * 20),  # some of them need overflow pages
            metadata={"number": number, "revision": revision, "seeds": list(seeds)},
        )

    def versions(self, store: ChunkStore) -> dict[int, Version]:
        """Every listed document, as its metadata says, by number."""
        infos = store.documents(self.fingerprint)
        found = {int(info.metadata["number"]): self.version(info) for info in infos}
        require(len(found) == len(infos), f"a document is listed twice among {[info.doc_id for info in infos]}")
        return found

    def version(self, info: DocumentInfo) -> Version:
        """The version that a listed document says to be. Raises BrokenGuaranteeError if it is none."""
        data = info.metadata
        version = Version(data["number"], data["revision"], tuple(data["seeds"]))
        document = self.document(version)
        got = (info.doc_id, info.source, info.chunk_ids, info.n_tokens)
        expected = (
            document.doc_id,
            document.source,
            tuple(ref.chunk_id for ref in document.chunks),
            document.n_tokens,
        )
        require(got == expected, f"document {info.doc_id} is listed with parts of two states: {got}, not {expected}")
        return version

    def check_document(self, store: ChunkStore, version: Version) -> None:
        """Raises BrokenGuaranteeError if a document does not read as this version, bit for bit."""
        got, expected = store.document(self.fingerprint, version.doc_id), self.document(version)
        require(got == expected, f"document {version.doc_id} reads {got}, expected {expected}")

    def check_chunk(self, store: ChunkStore, seed: int) -> None:
        """Raises BrokenGuaranteeError if a chunk's KV or meta is not its own, bit for bit."""
        meta, kv = self.items[seed]
        loaded = store.load(meta.chunk_id)
        for name, got, expected in (("keys", loaded.k, kv.k), ("values", loaded.v, kv.v)):
            equal = got.dtype == expected.dtype and torch.equal(bits(got), bits(expected))
            require(equal, f"the {name} of chunk {seed} ({meta.chunk_id.hex()}) are not those that were put")
        self.check_meta(store.meta(meta.chunk_id), seed)

    def check_meta(self, got: ChunkMeta, seed: int) -> None:
        """Raises BrokenGuaranteeError if a meta is not that of a chunk."""
        meta = self.items[seed][0]
        same = (
            got.chunk_id == meta.chunk_id
            and np.array_equal(got.token_ids, meta.token_ids)
            and got.sketch is not None
            and meta.sketch is not None
            and got.sketch.tobytes() == meta.sketch.tobytes()
        )
        require(same, f"the meta of chunk {seed} ({meta.chunk_id.hex()}) is not that which was put")
