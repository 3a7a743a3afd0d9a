"""A sealed row is read exactly as it was written, under its own key, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pdllm_store import ChunkRef, RecordDamagedError
from pdllm_store import rows as r
from pdllm_store.testing import make_document, tiny_fingerprint

FINGERPRINT = tiny_fingerprint()
KEY = bytes(range(16))
DOCUMENT_KEY = r.document_key(FINGERPRINT.digest, "d")
REF_KEY = r.ref_key(DOCUMENT_KEY, 7)
CHUNK = r.ChunkRow(3, 1, 2, 15, 4096, 1_700_000_000_000, bytes(16), bytes(8), bytes(4))
DOCUMENT = make_document("d", [], metadata={"a": [1, "ü"]})

# name -> key, packed row, what reads it, what it must give
ROWS: dict[str, tuple[bytes, bytes, Callable[[bytes, bytes], Any], Any]] = {
    "chunk": (KEY, r.pack_chunk(KEY, CHUNK), r.unpack_chunk, CHUNK),
    "chunk without a sketch": (
        KEY,
        r.pack_chunk(KEY, CHUNK._replace(sketch=None)),
        r.unpack_chunk,
        CHUNK._replace(sketch=None),
    ),
    "reference": (
        REF_KEY,
        r.pack_ref(REF_KEY, ChunkRef("d", 7, KEY, 1, 2**40, None)),
        lambda key, value: r.unpack_ref(key, value, "d"),
        ChunkRef("d", 7, KEY, 1, 2**40, None),
    ),
    "document": (
        DOCUMENT_KEY,
        r.pack_document(DOCUMENT_KEY, DOCUMENT, pinned=True),
        r.unpack_document,
        r.DocumentRow("d", "/src/d", bytes(16), "recipe-1", 0, 0, True, {"a": [1, "ü"]}),
    ),
    "fingerprint": (FINGERPRINT.digest, r.pack_fingerprint(FINGERPRINT), r.unpack_fingerprint, FINGERPRINT),
    "text": (KEY, r.pack_text(KEY, "é\ud800"), r.unpack_text, "é\ud800"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_comes_back(name: str) -> None:
    key, packed, unpack, expected = ROWS[name]
    assert unpack(key, packed) == expected
    assert unpack(key, memoryview(packed)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ROWS)
def test_a_flipped_bit_of_a_row_is_found(name: str) -> None:
    key, packed, unpack, _ = ROWS[name]
    for index in range(len(packed)):
        damaged = bytearray(packed)
        damaged[index] ^= 1 << index % 8
        with pytest.raises(RecordDamagedError):
            unpack(key, bytes(damaged))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_another_length_or_under_another_key_is_found(name: str) -> None:
    key, packed, unpack, _ = ROWS[name]
    for wrong in (packed[:-1], packed + b"\0", packed[:4], b""):
        with pytest.raises(RecordDamagedError):
            unpack(key, wrong)
    with pytest.raises(RecordDamagedError):
        unpack(bytes(len(key)), packed)


@pytest.mark.parametrize("name", ["chunk", "reference", "document", "fingerprint"])
@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", b"\x80", b"\x92\x01\x80", bytes(80), b"\xff" * 80])
def test_a_forged_row_of_another_form_is_found(name: str, payload: bytes) -> None:
    key, _, unpack, _ = ROWS[name]
    with pytest.raises(RecordDamagedError):
        unpack(key, r.seal(key, payload))


def test_a_document_row_in_the_place_of_a_text_is_found() -> None:
    with pytest.raises(RecordDamagedError):
        r.unpack_text(DOCUMENT_KEY, r.pack_document(DOCUMENT_KEY, DOCUMENT, pinned=False))


def test_references_sort_by_ordinal() -> None:
    keys = [r.ref_key(DOCUMENT_KEY, ordinal) for ordinal in (0, 1, 255, 256, 65536)]
    assert keys == sorted(keys)
