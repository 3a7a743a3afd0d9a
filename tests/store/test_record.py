"""A record is read exactly as it was written, or not at all."""

from __future__ import annotations

import struct

import msgpack
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from pdllm_store import RecordDamagedError
from pdllm_store.record import Record, RecordHeader, build, parse, parse_expected

HEADER = RecordHeader(
    chunk_id=bytes(range(16)),
    fingerprint=bytes(range(16, 32)),
    layer_start=2,
    n_layers=1,
    n_layers_all=4,
    n_tokens=2,
    n_kv_heads=1,
    head_dim=2,
    kv_dtype="bfloat16",
)
K = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16).reshape(1, 2, 1, 2)
V = -K


def read(data: bytes | bytearray, *, verify: bool = True) -> Record:
    """Both ways of reading must agree."""
    try:
        quickly: Record | None = parse_expected(data, HEADER)
        if verify:
            quickly.check()
    except RecordDamagedError:
        quickly = None
    record = parse(data, chunk_id=HEADER.chunk_id, fingerprint=HEADER.fingerprint, layer_start=HEADER.layer_start)
    if verify:
        record.check()
    assert quickly == record
    return record


def resealed(data: bytearray) -> bytearray:
    """What somebody who knows the format can write: any bytes with a right checksum."""
    data[8:24] = xxhash.xxh3_128_digest(bytes(data[24:]))
    return data


def with_header(**changes: object) -> bytearray:
    fields = {**HEADER._asdict(), **changes}
    packed = msgpack.packb({name: value for name, value in fields.items() if value is not None})
    return with_packed_header(packed)


def with_packed_header(packed: bytes) -> bytearray:
    data_start = -(-(48 + len(packed) - 48) // 64) * 64 + 48
    blocks = bytes(64) + bytes(8)
    prelude = struct.pack("<4sHH16sIIQQ", b"PDKV", 1, 0, b"", len(packed), data_start, 8, 8)
    return resealed(bytearray(prelude + packed + bytes(data_start - 48 - len(packed)) + blocks))


def test_a_record_has_these_bytes() -> None:
    data = build(HEADER, K, V)
    packed = msgpack.packb(HEADER._asdict())
    data_start = struct.unpack_from("<I", data, 28)[0]
    assert data[:8].hex() == "50444b5601000000"
    assert data[8:24] == xxhash.xxh3_128_digest(bytes(data[24:]))
    assert struct.unpack_from("<IIQQ", data, 24) == (len(packed), data_start, 8, 8)
    assert data[48 : 48 + len(packed)] == packed
    assert data_start % 64 == 48
    assert not any(data[48 + len(packed) : data_start])
    assert data[data_start:].hex() == "803f004040408040" + "00" * 56 + "80bf00c040c080c0"
    assert xxhash.xxh3_128_hexdigest(bytes(data)) == "c84aaaf044e5259be3b287f1a0b7470c"


def test_a_record_comes_back() -> None:
    k, v = torch.empty(1, 2, 1, 2), torch.empty(1, 2, 1, 2)
    record = read(build(HEADER, K, V))
    record.decode_into(k, v)
    assert record.header == HEADER
    assert torch.equal(k, K.float())
    assert torch.equal(v, V.float())


def test_a_record_of_another_shape_than_its_header_is_not_built() -> None:
    with pytest.raises(ValueError, match="v has shape"):
        build(HEADER, K, V[:, :1])


def test_every_flipped_bit_is_found() -> None:
    data = build(HEADER, K, V)
    for index in range(len(data)):
        for bit in range(8):
            data[index] ^= 1 << bit
            with pytest.raises(RecordDamagedError):
                read(data)
            data[index] ^= 1 << bit
    read(data)


def test_every_length_but_its_own_is_found() -> None:
    data = build(HEADER, K, V)
    for length in range(len(data)):
        with pytest.raises(RecordDamagedError):
            read(data[:length])
    with pytest.raises(RecordDamagedError, match="length"):
        read(data + b"\0")


@pytest.mark.parametrize(
    ("offset", "patch", "message"),
    [
        (0, b"XXXX", "magic is b'XXXX', expected b'PDKV'"),
        (4, b"\x02\x00", r"format is \(2, 0\), expected \(1, 0\)"),
        (6, b"\x01\x00", "format"),
        (24, b"\xff\xff\xff\xff", "header length"),
        (28, b"\x00\x00\x00\x00", "header length and data start"),
        (32, b"\xff" * 8, "length is"),
        (40, b"\x00" * 8, "length is"),
        (32, struct.pack("<QQ", 4, 8), "block lengths"),
        (48, b"\x00", "header"),
        (48, b"\xc1", "header"),
    ],
)
def test_a_lie_under_a_right_checksum_is_found(offset: int, patch: bytes, message: str) -> None:
    data = build(HEADER, K, V)
    data[offset : offset + len(patch)] = patch
    with pytest.raises(RecordDamagedError, match=message):
        read(resealed(data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_id": bytes(16)}, "chunk, fingerprint and first layer"),
        ({"fingerprint": bytes(16)}, "chunk, fingerprint and first layer"),
        ({"layer_start": 1}, "chunk, fingerprint and first layer"),
        ({"chunk_id": b"short"}, "chunk_id"),
        ({"n_layers": 3}, "layers in all"),
        ({"n_layers": 0}, "layers in all"),
        ({"n_layers_all": 2}, "layers in all"),
        ({"n_tokens": 3}, "block lengths"),
        ({"n_tokens": -1}, "n_tokens"),
        ({"n_tokens": 2.0}, "n_tokens"),
        ({"n_tokens": True}, "n_tokens"),
        ({"n_tokens": 2**63}, "n_tokens"),
        ({"kv_dtype": "float32"}, "block lengths"),
        ({"kv_dtype": "float16"}, "kv_dtype"),
        ({"kv_dtype": ["bfloat16"]}, "kv_dtype"),
        ({"head_dim": None}, "header fields"),
        ({"extra": 1}, "header fields"),
    ],
)
def test_a_header_that_does_not_fit_is_found(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RecordDamagedError, match=message):
        read(with_header(**changes))


@pytest.mark.parametrize("packed", [b"", b"\x90", b"\xdf\xff\xff\xff\xff", b"\x80" + b"\x80", b"\x91" * 4000])
def test_a_header_that_is_no_map_of_ours_is_found(packed: bytes) -> None:
    with pytest.raises(RecordDamagedError):
        read(with_packed_header(packed))


@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_at_all_do_anything_but_raise(tail: bytes, sealed: bool) -> None:
    data = bytearray(b"PDKV\1\0\0\0" + tail)
    with pytest.raises(RecordDamagedError):
        read(resealed(data) if sealed and len(data) >= 24 else data)


def test_a_sound_record_of_another_shape_than_expected_is_refused() -> None:
    with pytest.raises(RecordDamagedError, match="header is RecordHeader"):
        parse_expected(build(HEADER, K, V), HEADER._replace(n_layers_all=5))


def test_form_is_checked_even_without_the_checksum() -> None:
    data = build(HEADER, K, V)
    data[-1] ^= 1
    read(data, verify=False)
    with pytest.raises(RecordDamagedError):
        read(data)
    with pytest.raises(RecordDamagedError):
        read(data[:-1], verify=False)
