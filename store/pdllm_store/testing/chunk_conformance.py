"""What every chunk store must do with chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pdllm_store.errors import (
    ChunkNotFoundError,
)
from pdllm_store.protocol import ChunkStore
from pdllm_store.testing.fakes import MakeStore, bits, random_chunk, tiny_fingerprint
from pdllm_store.types import ChunkKV, KVDtype, ModelFingerprint


class ChunkConformance:
    """Needs the fixtures `make_store`, `store` and `fingerprint`."""

    def test_a_store_satisfies_the_protocol(self, store: ChunkStore) -> None:
        assert isinstance(store, ChunkStore)

    @pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32"])
    def test_kv_comes_back_bit_for_bit(self, make_store: MakeStore, kv_dtype: KVDtype) -> None:
        store, fingerprint = make_store(kv_dtype), tiny_fingerprint(kv_dtype=kv_dtype)
        meta, kv = random_chunk(fingerprint, seed=1)
        kv.k.view(-1)[:5] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-40])
        assert store.put(fingerprint, [(meta, kv)]) > 0
        loaded = store.load(meta.chunk_id)
        assert loaded.k.dtype == kv.k.dtype
        assert torch.equal(bits(loaded.k), bits(kv.k))
        assert torch.equal(bits(loaded.v), bits(kv.v))

    def test_int8_comes_back_as_bfloat16_within_its_bound(self, make_store: MakeStore) -> None:
        store, fingerprint = make_store("int8"), tiny_fingerprint(kv_dtype="int8")
        meta, kv = random_chunk(fingerprint, seed=1)
        store.put(fingerprint, [(meta, kv)])
        loaded = store.load(meta.chunk_id)
        assert loaded.k.dtype == torch.bfloat16
        exact = ChunkKV(torch.empty_like(kv.k), torch.empty_like(kv.v))
        store.load_into([meta.chunk_id], [exact])
        bound = kv.k.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)
        assert bool(((exact.k - kv.k).abs() <= bound).all())
        assert torch.equal(loaded.k, exact.k.to(torch.bfloat16))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
    def test_load_into_converts_into_any_stride(
        self, store: ChunkStore, fingerprint: ModelFingerprint, dtype: torch.dtype
    ) -> None:
        meta, kv = random_chunk(fingerprint, seed=2)
        store.put(fingerprint, [(meta, kv)])
        pool = torch.zeros(2, 4, 2, 9, 3, dtype=dtype)  # D, G, T, Y behind one another
        k, v = (pool[i].permute(3, 2, 1, 0)[:, 2:7] for i in range(2))
        store.load_into([meta.chunk_id], [ChunkKV(k, v)])
        assert torch.equal(k, kv.k.to(dtype))
        assert torch.equal(v, kv.v.to(dtype))
        assert not pool[:, :, :, :2].any()
        assert not pool[:, :, :, 7:].any()

    def test_load_into_refuses_another_shape(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        meta, kv = random_chunk(fingerprint, seed=2)
        store.put(fingerprint, [(meta, kv)])
        with pytest.raises(ValueError, match=r"k is a .* tensor"):
            store.load_into([meta.chunk_id], [ChunkKV(torch.zeros(3, 4, 2, 4), kv.v)])

    def test_loaded_kv_stays_as_it_is_while_the_store_changes(
        self, store: ChunkStore, fingerprint: ModelFingerprint
    ) -> None:
        meta, kv = random_chunk(fingerprint, seed=3)
        store.put(fingerprint, [(meta, kv)])
        loaded = store.load(meta.chunk_id)
        store.discard([meta.chunk_id])
        for seed in range(10, 30):
            store.put(fingerprint, [random_chunk(fingerprint, seed=seed)])
        store.close()
        assert torch.equal(loaded.k, kv.k)
        loaded.k.zero_()  # writing must not crash either

    def test_an_unknown_chunk_is_missing_and_says_so(self, store: ChunkStore) -> None:
        with pytest.raises(ChunkNotFoundError) as caught:
            store.load(b"x" * 16)
        assert caught.value.chunk_ids == (b"x" * 16,)
        with pytest.raises(ChunkNotFoundError):
            store.meta(b"x" * 16)

    def test_missing_keeps_the_order_and_names_each_id_once(
        self, store: ChunkStore, fingerprint: ModelFingerprint
    ) -> None:
        items = [random_chunk(fingerprint, seed=seed) for seed in range(4)]
        ids = [meta.chunk_id for meta, _ in items]
        store.put(fingerprint, items[1:2])
        assert store.missing([ids[3], ids[1], ids[0], ids[3]]) == [ids[3], ids[0]]

    def test_meta_comes_back(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        for seed, sketch in ((1, True), (2, False)):
            meta, kv = random_chunk(fingerprint, seed=seed, sketch=sketch)
            store.put(fingerprint, [(meta, kv)])
            got = store.meta(meta.chunk_id)
            assert got.token_ids.dtype == np.int32
            np.testing.assert_array_equal(got.token_ids, meta.token_ids)
            if meta.sketch is None:
                assert got.sketch is None
            else:
                assert got.sketch is not None
                assert got.sketch.dtype == np.float16
                np.testing.assert_array_equal(got.sketch, meta.sketch)

    def test_a_chunk_that_is_held_is_left_as_it_is(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        meta, kv = random_chunk(fingerprint, seed=1)
        store.put(fingerprint, [(meta, kv)])
        assert store.put(fingerprint, [(meta, ChunkKV(kv.v, kv.k))]) == 0
        assert torch.equal(store.load(meta.chunk_id).k, kv.k)

    def test_a_chunk_under_the_id_of_other_tokens_is_refused(
        self, store: ChunkStore, fingerprint: ModelFingerprint
    ) -> None:
        meta, kv = random_chunk(fingerprint, seed=1)
        with pytest.raises(ValueError, match="not that of its tokens"):
            store.put(fingerprint, [(replace(meta, chunk_id=bytes(16)), kv)])

    def test_one_bad_chunk_keeps_the_whole_call_out(self, store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        good, bad = random_chunk(fingerprint, seed=1), random_chunk(fingerprint, seed=2)
        with pytest.raises(ValueError, match="shape"):
            store.put(fingerprint, [good, (bad[0], ChunkKV(bad[1].k[:2], bad[1].v))])
        assert store.missing([good[0].chunk_id]) == [good[0].chunk_id]
