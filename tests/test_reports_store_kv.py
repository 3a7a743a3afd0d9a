"""What users of KV caches have reported elsewhere, tried here: foreign, rounded, damaged and unfound keys and values.

Each test names the public report that it stands for. `PDLLM_LONG=1` runs the sizes of the reports.
"""

from __future__ import annotations

import logging
import random
import shutil
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import lmdb
import numpy as np
import pytest
import torch
from pdllm_store import (
    KV_DTYPES,
    ChunkKV,
    ChunkMeta,
    Fetched,
    KVDtype,
    LMDBStore,
    ModelFingerprint,
    RecordDamagedError,
)
from pdllm_store.rows import document_key, kv_key, ref_key
from pdllm_store.testing import bits, random_chunk, tiny_fingerprint
from test_reports_store import LONG, MIB, document, is_sound, large, opened
from test_reports_store_shared import in_threads

from pdllm_rag import Answer, LoadedModel, RagEngine
from pdllm_rag.pool import KVPool

# -- 12: answers from somebody else's text --------------------------------------------------------------------------


class Witness(LMDBStore):
    """A store that remembers a digest of all that was ever put under each key."""

    put_digests: defaultdict[bytes, set[bytes]]

    def put(self, fingerprint: ModelFingerprint, items: Iterable[tuple[ChunkMeta, ChunkKV]]) -> int:
        items = list(items)
        for meta, kv in items:
            self.put_digests[meta.chunk_id].add(digest(kv))
        return super().put(fingerprint, items)


def digest(kv: ChunkKV) -> bytes:
    return blake3.blake3(b"".join(bits(tensor).numpy().tobytes() for tensor in kv)).digest()


def test_askers_of_documents_that_begin_alike_never_get_the_kv_of_another(
    tmp_path: Path, tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/LMCache/LMCache/issues/4385"""
    n_docs, n_askers, n_alike, seconds = (40, 8, 200, 300.0) if LONG else (40, 8, 50, 4.0)
    alike = ("what all of these documents say in the same words, " * 9)[:n_alike]
    docs = [document(f"d{i:02}", f"{alike} and the code word of this one is W{i:02}") for i in range(n_docs)]
    n_tokens = len(docs[0].text) + 1
    size = 768 * n_tokens  # bytes of KV of one document, which is one chunk
    swapped: list[bytes] = []
    n_acquired = 0
    put_digests: defaultdict[bytes, set[bytes]] = defaultdict(set)
    acquire = KVPool.acquire

    def checked(pool: KVPool, chunk_ids: Sequence[bytes]) -> Fetched:
        nonlocal n_acquired
        fetched = acquire(pool, chunk_ids)
        for chunk_id, kv in fetched.kv.items():
            n_acquired += 1
            if digest(kv) not in put_digests[chunk_id]:
                swapped.append(chunk_id)
        return fetched

    monkeypatch.setattr(KVPool, "acquire", checked)
    store = Witness.open(tmp_path, kv_dtype="float32", max_bytes=max(MIB, n_docs * size // 2))
    assert isinstance(store, Witness)
    store.put_digests = put_digests
    with store, opened(store, tiny_model, chunk_len=256, pool_bytes=5 * size) as engine:
        assert engine.prefill(docs).added == n_docs
        assert len({info.chunk_ids for info in engine.documents()}) == n_docs
        assert {info.n_tokens for info in engine.documents()} == {n_tokens}
        until = time.monotonic() + seconds

        def ask(seed: int) -> int:
            chance, n_asked = random.Random(seed), 0
            while time.monotonic() < until:
                i = chance.randrange(n_docs)
                only = {"doc_id": f"d{i:02}"} if chance.random() < 0.8 else {}
                answer = engine.answer(f"Which is the code word W{i:02}?", k=2, filter=only, max_new_tokens=1)
                assert not only or {citation.doc_id for citation in answer.citations} == {f"d{i:02}"}
                assert all(f"W{citation.doc_id[1:]}" in citation.quote for citation in answer.citations)
                n_asked += 1
            return n_asked

        n_asked = in_threads([lambda seed=seed: ask(seed) for seed in range(n_askers)])  # type: ignore[misc]
        assert all(isinstance(n, int) and n > 0 for n in n_asked), n_asked
        stats = engine.store.stats()
        assert swapped == []
        assert min(n_acquired, stats.hits, stats.evictions, stats.recomputed) > n_askers  # memory did not do for them
        known = [found for chunk in put_digests.values() for found in chunk]
        assert len(set(known)) == len(known)  # no two keys ever had equal KV: a swap would have been seen
        assert stats.damaged == 0
        assert is_sound(engine)


def test_token_ids_that_do_not_fit_are_refused_and_never_share_a_key(tmp_path: Path) -> None:
    """https://github.com/LMCache/LMCache/issues/4385"""
    fingerprint = tiny_fingerprint()
    kv = ChunkKV(*(torch.ones(3, 2, 2, 4, dtype=torch.bfloat16) for _ in range(2)))
    with LMDBStore.open(tmp_path) as store:
        for token_ids in (np.array([0, 2**32 + 5]), np.array([0, 5.75])):
            with pytest.raises((ValueError, OverflowError)):
                store.put(fingerprint, [(ChunkMeta(fingerprint.chunk_id(token_ids), token_ids), kv)])


# -- 14: dtypes -----------------------------------------------------------------------------------------------------

ODD = [float("inf"), float("-inf"), -0.0, 0.0, float("nan"), 1e-40, -1e-40, 6e-8, 65504.0, 3.3e38, 1.0, -1.0]


def odd_kv(dtype: torch.dtype, fingerprint: ModelFingerprint, n_tokens: int) -> ChunkKV:
    """KV of all odd values, the keys as a transposed view and the values as a stride of a larger tensor."""
    shape = (fingerprint.n_layers, n_tokens, fingerprint.n_kv_heads, fingerprint.head_dim)
    n = int(np.prod(shape))
    values = torch.tensor((ODD * n)[:n]).to(dtype).reshape(shape)
    k = values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    v = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2].copy_(values)
    assert not k.is_contiguous()
    assert not v.is_contiguous()
    return ChunkKV(k, v)


@pytest.mark.parametrize(
    ("given", "kv_dtype"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float32"),
        (torch.bfloat16, "float32"),
        (torch.float8_e4m3fn, "bfloat16"),
        (torch.float8_e5m2, "float32"),
    ],
)
def test_keys_and_values_come_back_bit_for_bit_from_a_dtype_that_holds_them(
    tmp_path: Path, given: torch.dtype, kv_dtype: KVDtype
) -> None:
    """https://github.com/jjang-ai/vmlx/pull/17, https://github.com/vllm-project/vllm-omni/pull/5755"""
    fingerprint = tiny_fingerprint(kv_dtype=kv_dtype)
    meta, _ = random_chunk(fingerprint, seed=1, n_tokens=7)
    kv = odd_kv(given, fingerprint, 7)
    with LMDBStore.open(tmp_path, kv_dtype=kv_dtype) as store:
        store.put(fingerprint, [(meta, kv)])
    with LMDBStore.open(tmp_path) as store:
        loaded = store.load(meta.chunk_id)
        for got, sent in zip(loaded, kv, strict=True):
            wanted = getattr(torch, kv_dtype)
            assert (got.dtype, got.shape) == (wanted, sent.shape)
            assert torch.equal(bits(got), bits(sent.to(wanted)))
            back, numbers = got.to(given).to(torch.float32), sent.to(torch.float32)
            assert torch.equal(back.nan_to_num(7.0), numbers.nan_to_num(7.0))
            assert torch.equal(back.signbit(), numbers.signbit())
        assert store.verify().ok


def test_float16_in_a_bfloat16_store_is_rounded_once_and_float32_keeps_it(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/110285"""
    halves = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)  # every float16
    for kv_dtype in ("bfloat16", "float32"):
        fingerprint = tiny_fingerprint(kv_dtype=kv_dtype, n_layers=1)
        meta, _ = random_chunk(fingerprint, seed=1, n_tokens=1 << 13)
        kv = ChunkKV(*(halves.reshape(1, 1 << 13, 2, 4) for _ in range(2)))
        with LMDBStore.open(tmp_path / kv_dtype, kv_dtype=kv_dtype) as store:
            store.put(fingerprint, [(meta, kv)])
            got = store.load(meta.chunk_id).v.flatten()
        assert torch.equal(got.nan_to_num(7.0), halves.to(got.dtype).nan_to_num(7.0))
        exact = got.to(torch.float16).nan_to_num(7.0) == halves.nan_to_num(7.0)
        assert bool(exact.all()) == (kv_dtype == "float32")


def test_int8_stays_within_its_bound_and_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm-omni/pull/5755"""
    fingerprint = tiny_fingerprint(kv_dtype="int8")
    (meta, kv), (other, _) = (random_chunk(fingerprint, seed=seed) for seed in (1, 2))
    with LMDBStore.open(tmp_path, kv_dtype="int8") as store:
        store.put(fingerprint, [(meta, kv)])
        out = ChunkKV(*(torch.empty_like(tensor) for tensor in kv))
        store.load_into([meta.chunk_id], [out])
        for got, sent in zip(out, kv, strict=True):
            bound = sent.abs().amax(-1, keepdim=True) / 254 * 1.0001
            assert bool(((got - sent).abs() <= bound).all())
        assert store.load(meta.chunk_id).k.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="int8 cannot hold inf or NaN"):
            store.put(fingerprint, [(other, odd_kv(torch.float32, fingerprint, 5))])
        assert store.missing([other.chunk_id]) == [other.chunk_id]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_is_no_keys_and_values_is_refused_and_nothing_kept(tmp_path: Path, kv_dtype: KVDtype) -> None:
    """https://github.com/jjang-ai/vmlx/pull/17 (every write failed quietly)"""
    fingerprint = tiny_fingerprint(kv_dtype=kv_dtype)
    good, kv = random_chunk(fingerprint, seed=1)
    none = np.zeros(0, dtype=np.int32)
    with LMDBStore.open(tmp_path, kv_dtype=kv_dtype) as store:
        for meta, bad, message in (
            (ChunkMeta(fingerprint.chunk_id(none), none), ChunkKV(kv.k[:, :0], kv.v[:, :0]), "at least one token"),
            (good, ChunkKV(kv.k[:, :0], kv.v[:, :0]), "shape"),
            (good, ChunkKV(kv.k, kv.v[..., :2]), "shape"),
            (good, ChunkKV(*(tensor.to(torch.int8) for tensor in kv)), "float tensors, got torch.int8"),
            (good, ChunkKV(kv.k, kv.v.to(torch.complex64)), "float tensors, got torch.complex64"),
        ):
            with pytest.raises(ValueError, match=message):
                store.put(fingerprint, [(good, kv), (meta, bad)][meta is good :])
        assert (store.stats().chunks, store.missing([good.chunk_id])) == (0, [good.chunk_id])
    with pytest.raises(ValueError, match=r"float16.*expected one of \('bfloat16', 'float32', 'int8'\)"):
        LMDBStore.open(tmp_path / "new", kv_dtype="float16")  # type: ignore[arg-type]


# -- 15: a missing or broken entry ----------------------------------------------------------------------------------

DOORS = [document(f"d{i}", f"Paragraph {i} says that the word p{i} opens door number {i * 7}.") for i in range(6)]
DOOR = "Which word opens door number 14?"
Edit = Callable[[bytes], "bytes | None"]


class Doors(NamedTuple):
    """A closed store of six documents of one chunk, and one of those that its answer was read from."""

    path: Path
    text: str  # of the answer
    fingerprint: bytes
    doc_id: str
    chunk_id: bytes

    def edit(self, table: str, change: Edit) -> None:
        """Change what a table holds of that document, None for nothing, as a bad disk would."""
        name = document_key(self.fingerprint, self.doc_id)
        keys = {"kv": kv_key(self.chunk_id, 0), "metas": self.chunk_id, "refs": ref_key(name, 0)}
        env = lmdb.open(str(self.path), max_dbs=16)
        with env.begin(write=True) as transaction:
            database, key = env.open_db(table.encode(), txn=transaction, create=False), keys.get(table, name)
            value = transaction.get(key, db=database)
            assert value is not None
            if (changed := change(value)) is None:
                transaction.delete(key, db=database)
            else:
                transaction.put(key, changed, db=database)
        env.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, tiny_model: LoadedModel) -> Doors:
    path = tmp_path_factory.mktemp("doors") / "kb"
    with opened(path, tiny_model) as engine:
        engine.prefill(DOORS)
        answer = engine.answer(DOOR, k=3)
        doc_id = answer.citations[0].doc_id
        (chunk_id,) = next(info.chunk_ids for info in engine.documents() if info.doc_id == doc_id)
        return Doors(path, answer.text, engine.fingerprint.digest, doc_id, chunk_id)


@pytest.fixture
def doors(sound: Doors, tmp_path: Path) -> Doors:
    shutil.copytree(sound.path, tmp_path / "kb")
    return sound._replace(path=tmp_path / "kb")


def flipped(value: bytes) -> bytes:
    return value[:-7] + bytes([value[-7] ^ 1]) + value[-6:]


HARM: dict[str, Edit] = {
    "deleted": lambda _: None,
    "a flipped byte": flipped,
    "cut in half": lambda value: value[: len(value) // 2],
    "empty": lambda _: b"",
    "wrong magic": lambda value: b"XXXX" + value[4:],
    "of a later format": lambda value: value[:4] + struct.pack("<H", 2) + value[6:],
    "zeros": lambda value: bytes(len(value)),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_broken_record_is_computed_again_told_once_counted_and_repaired(
    doors: Doors, tiny_model: LoadedModel, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """https://github.com/LMCache/LMCache/issues/2420"""
    doors.edit("kv", HARM[harm])
    with opened(doors.path, tiny_model, pool_bytes=0) as engine:
        for n_again in (1, 0, 0):
            answer = engine.answer(DOOR, k=3)
            assert (answer.text, answer.stats.chunks) == (doors.text, (3 - n_again, n_again, 6))
        stats = engine.store.stats()
        assert (stats.damaged, stats.recomputed) == (1, 1)
        (warning,) = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
        assert doors.chunk_id.hex() in warning.getMessage()
        assert is_sound(engine)
    with opened(doors.path, tiny_model, pool_bytes=0) as engine:
        assert engine.answer(DOOR, k=3).stats.chunks == (3, 0, 6)
        assert engine.prefill(DOORS).unchanged == 6


def answer_or_error(engine: RagEngine) -> Answer | RecordDamagedError:
    try:
        return engine.answer(DOOR, k=3)
    except RecordDamagedError as error:
        return error


@pytest.mark.parametrize("table", ["metas", "documents", "refs", "texts"])
def test_a_broken_row_gives_nothing_wrong_and_prefill_repairs_it(
    doors: Doors, tiny_model: LoadedModel, table: str
) -> None:
    """https://github.com/LMCache/LMCache/issues/2420"""
    doors.edit(table, flipped)
    with opened(doors.path, tiny_model, pool_bytes=0) as engine:
        got = answer_or_error(engine)
        if isinstance(got, RecordDamagedError):
            assert "run `verify`, then write it again" in str(got)
        else:
            assert got.text == doors.text or doors.doc_id not in {one.doc_id for one in got.citations}
        report = engine.prefill(DOORS)
        assert report.failed == []
        assert report.chunks_computed <= 1
        answer = engine.answer(DOOR, k=3)
        assert (answer.text, answer.stats.chunks) == (doors.text, (3, 0, 6))
        assert is_sound(engine) or table == "refs"  # whose counts `compact` puts right


@pytest.mark.parametrize("table", ["metas", "documents", "refs", "texts"])
def test_a_broken_row_does_not_stop_questions(
    doors: Doors, tiny_model: LoadedModel, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    """https://github.com/LMCache/LMCache/issues/2420"""
    doors.edit(table, flipped)
    with opened(doors.path, tiny_model, pool_bytes=0) as engine:
        answer = engine.answer(DOOR, k=3)
        assert answer.text == doors.text or doors.doc_id not in {one.doc_id for one in answer.citations}
        assert engine.store.stats().damaged > 0
        assert "is damaged" in caplog.text


NOT_WRITTEN: dict[str, tuple[Edit, dict[str, Any]]] = {  # how the row is broken, and how the store is opened then
    "of a store that is only read": (flipped, {"store_options": {"read_only": True}}),
    "of a text that was cut otherwise": (flipped, {"chunk_len": 48}),
    "that is not there": (lambda _: None, {}),
}


@pytest.mark.parametrize("row", NOT_WRITTEN)
def test_a_broken_chunk_row_that_cannot_be_made_again_does_not_stop_questions(
    doors: Doors, tiny_model: LoadedModel, row: str
) -> None:
    """https://github.com/LMCache/LMCache/issues/2420"""
    harm, options = NOT_WRITTEN[row]
    doors.edit("metas", harm)
    with opened(doors.path, tiny_model, pool_bytes=0, **options) as engine:
        answer = engine.answer(DOOR, k=3)
        assert answer.text == doors.text or doors.doc_id not in {one.doc_id for one in answer.citations}


def test_many_broken_chunk_rows_do_not_stop_a_question(doors: Doors, tiny_model: LoadedModel) -> None:
    """https://github.com/LMCache/LMCache/issues/2420"""
    with opened(doors.path, tiny_model) as engine:
        engine.prefill([document("many", large(30))])
        chunk_ids = {ref.chunk_id for ref in engine.store.refs(engine.fingerprint)}
    for chunk_id in chunk_ids:
        doors._replace(chunk_id=chunk_id).edit("metas", flipped)
    with opened(doors.path, tiny_model, pool_bytes=0) as engine:
        assert len(engine.answer(DOOR, k=3, candidates=30).citations) == 3
