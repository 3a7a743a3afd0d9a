"""What every chunk store must do when KV is loaded in numbers, or has to be computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from pdllm_store.errors import ChunkNotFoundError, StoreMismatchError
from pdllm_store.protocol import ChunkStore
from pdllm_store.testing.fakes import MakeStore, add_chunks, random_chunk, tiny_fingerprint
from pdllm_store.types import KV_DTYPES, ChunkKV, ChunkMeta, KVDtype, ModelFingerprint


class FetchConformance:
    """Needs the fixtures `make_store`, `store` and `fingerprint`."""

    def test_many_chunks_load_into_given_tensors(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        items = [random_chunk(fingerprint, seed=seed, n_tokens=3 + seed) for seed in range(6)]
        store.put(fingerprint, items)
        out = [ChunkKV(torch.zeros_like(kv.k), torch.zeros_like(kv.v)) for _, kv in items]
        store.load_into([meta.chunk_id for meta, _ in items], out)
        for (_, kv), loaded in zip(items, out, strict=True):
            assert torch.equal(loaded.k, kv.k)
            assert torch.equal(loaded.v, kv.v)
        store.load_into([], [])
        assert store.stats().hits == 6

    @pytest.mark.parametrize("layers", [range(1), range(1, 2), range(1, 3), range(3)])
    def test_some_layers_load_alone(self, store: ChunkStore, fingerprint: ModelFingerprint, layers: range) -> None:
        meta, kv = random_chunk(fingerprint, seed=1)
        store.put(fingerprint, [(meta, kv)])
        out = ChunkKV(*(torch.zeros(len(layers), 5, 2, 4) for _ in range(2)))
        store.load_into([meta.chunk_id], [out], layers=layers)
        assert torch.equal(out.k, kv.k[layers.start : layers.stop].float())
        assert torch.equal(out.v, kv.v[layers.start : layers.stop].float())

    def test_wrong_places_are_refused(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        (meta,) = add_chunks(store, fingerprint, "d", [1])
        kv = ChunkKV(torch.zeros(3, 5, 2, 4), torch.zeros(3, 5, 2, 4))
        for chunk_ids, out in (([meta.chunk_id], []), ([meta.chunk_id] * 2, [kv, kv])):
            with pytest.raises(ValueError, match="places"):
                store.load_into(chunk_ids, out)
        for layers in (range(4), range(2, 2), range(-1, 1), range(0, 3, 2)):
            with pytest.raises(ValueError, match="layers are range"):
                store.load_into([meta.chunk_id], [kv], layers=layers)
        with pytest.raises(ChunkNotFoundError):
            store.load_into([bytes(16)], [kv])

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_what_is_lost_is_computed_again_and_written_back(self, make_store: MakeStore, kv_dtype: KVDtype) -> None:
        store, fingerprint = make_store(kv_dtype), tiny_fingerprint(kv_dtype=kv_dtype)
        items = {meta.chunk_id: (meta, kv) for meta, kv in (random_chunk(fingerprint, seed=s) for s in range(4))}
        asked: list[bytes] = []

        def recompute(metas: Sequence[ChunkMeta]) -> Iterator[list[tuple[ChunkMeta, ChunkKV]]]:
            asked.extend(meta.chunk_id for meta in metas)
            yield from ([items[meta.chunk_id]] for meta in metas)

        metas = add_chunks(store, fingerprint, "d", range(4))
        ids = [meta.chunk_id for meta in metas]
        before = {chunk_id: store.load(chunk_id) for chunk_id in ids}
        lost = ids[1:3]
        store.discard(lost)
        with pytest.raises(ChunkNotFoundError):
            store.fetch(ids)
        store.recompute_with(fingerprint, recompute)
        fetched = store.fetch([*ids, ids[0]])
        assert list(fetched.kv) == ids
        assert fetched.recomputed == set(lost) == set(asked)
        for chunk_id in ids:
            assert torch.equal(fetched.kv[chunk_id].k, before[chunk_id].k)
            assert torch.equal(fetched.kv[chunk_id].v, before[chunk_id].v)
        assert store.missing(ids) == []
        assert store.fetch(ids).recomputed == frozenset()
        assert store.stats().recomputed == 2
        store.recompute_with(fingerprint, None)
        store.discard(lost)
        with pytest.raises(ChunkNotFoundError):
            store.fetch(lost)

    def test_a_chunk_that_nobody_put_cannot_be_computed(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        store.recompute_with(fingerprint, lambda _metas: iter(()))
        with pytest.raises(ChunkNotFoundError):
            store.fetch([bytes(16)])
        (meta,) = add_chunks(store, fingerprint, "d", [1])
        store.discard([meta.chunk_id])
        with pytest.raises(ChunkNotFoundError):  # the function gave nothing
            store.fetch([meta.chunk_id])
        with pytest.raises(StoreMismatchError):
            store.recompute_with(tiny_fingerprint(kv_dtype="int8"), None)

    def test_prefetching_and_touching_change_nothing(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        metas = add_chunks(store, fingerprint, "d", range(3))
        before = store.stats()
        store.prefetch([meta.chunk_id for meta in metas] + [bytes(16)])
        store.touch([metas[0].chunk_id, bytes(16)])
        assert store.fetch([meta.chunk_id for meta in metas]).recomputed == frozenset()
        assert store.stats()._replace(hits=0, fetched=0) == before
