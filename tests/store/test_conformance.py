"""Both stores do what every chunk store must do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pdllm_store import ChunkStore, KVDtype, LMDBStore, MemoryStore
from pdllm_store.testing import ChunkStoreConformance, MakeStore


class TestLMDBStore(ChunkStoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Iterator[MakeStore]:
        made: list[LMDBStore] = []

        def make(kv_dtype: KVDtype) -> ChunkStore:
            made.append(LMDBStore.open(tmp_path / str(len(made)), kv_dtype=kv_dtype))
            return made[-1]

        yield make
        for store in made:
            store.close()


class TestMemoryStore(ChunkStoreConformance):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda kv_dtype: MemoryStore(kv_dtype=kv_dtype)
