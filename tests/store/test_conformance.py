"""All stores do what every chunk store must do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from far import Moto
from pdllm_store import ChunkStore, KVDtype, LMDBStore, MemoryStore, ObjectChunkStore, TieredChunkStore
from pdllm_store.testing import ChunkStoreConformance, MakeStore


def closing(make: Callable[[KVDtype], ChunkStore]) -> Iterator[MakeStore]:
    """Makes stores and closes them at the end."""
    made: list[ChunkStore] = []

    def make_one(kv_dtype: KVDtype) -> ChunkStore:
        made.append(make(kv_dtype))
        return made[-1]

    yield make_one
    for store in made:
        store.close()


class TestLMDBStore(ChunkStoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Iterator[MakeStore]:
        numbers = count()
        yield from closing(lambda kv_dtype: LMDBStore.open(tmp_path / str(next(numbers)), kv_dtype=kv_dtype))


class TestMemoryStore(ChunkStoreConformance):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda kv_dtype: MemoryStore(kv_dtype=kv_dtype)


class TestObjectsInMemory(ChunkStoreConformance):
    @pytest.fixture
    def make_store(self) -> Iterator[MakeStore]:
        yield from closing(lambda kv_dtype: ObjectChunkStore.open("memory://", kv_dtype=kv_dtype))


class TestObjectsOnS3(ChunkStoreConformance):
    @pytest.fixture
    def make_store(self, s3: Moto) -> Iterator[MakeStore]:
        yield from closing(lambda kv_dtype: ObjectChunkStore.open(s3.new_url(), kv_dtype=kv_dtype))


class TestTieredOverAFolder(ChunkStoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Iterator[MakeStore]:
        numbers = count()

        def make(kv_dtype: KVDtype) -> ChunkStore:
            folder = tmp_path / str(next(numbers))
            return TieredChunkStore.open((folder / "far").as_uri(), cache=folder / "near", kv_dtype=kv_dtype)

        yield from closing(make)


class TestTieredOnS3(ChunkStoreConformance):
    @pytest.fixture
    def make_store(self, s3: Moto, tmp_path: Path) -> Iterator[MakeStore]:
        numbers = count()
        yield from closing(
            lambda kv_dtype: TieredChunkStore.open(s3.new_url(), cache=tmp_path / str(next(numbers)), kv_dtype=kv_dtype)
        )
