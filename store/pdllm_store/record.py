"""One KV record: the keys and values of one layer group of one chunk. The layout is in docs/store-format.md.

    0   4s   b"PDKV"
    4   u16  format
    6   u16  0
    8   16s  xxh3-128 over every byte from 24 on
    24  u32  header length
    28  u32  data start, 48 mod 64
    32  u64  length of the K block
    40  u64  length of the V block
    48  msgpack header, zeros up to the data start, K block, zeros up to a multiple of 64, V block

LMDB hands large values out at an address of 16 mod 4096, so both blocks lie on 64-byte boundaries in the map.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgpack
import torch
import xxhash

from pdllm_store.codec import Buffer, block_bytes, decode_into, encode_into
from pdllm_store.errors import RecordDamagedError
from pdllm_store.types import ID_BYTES, KV_DTYPES, RECORD_FORMAT, KVDtype

MAGIC = b"PDKV"
_PRELUDE = struct.Struct("<4sHH16sIIQQ")
_DIGESTED_FROM = 24
_ALIGNMENT = 64
_DATA_START = 48  # modulo the alignment
_MAX_HEADER_BYTES = 4096


class RecordHeader(NamedTuple):
    """What a record says of itself."""

    chunk_id: bytes  # 16 bytes
    fingerprint: bytes  # 16 bytes, digest of the model fingerprint
    layer_start: int  # first layer of the group
    n_layers: int  # layers of the group
    n_layers_all: int  # layers of the model
    n_tokens: int
    n_kv_heads: int
    head_dim: int
    kv_dtype: KVDtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[layers of the group, T, G, D]."""
        return (self.n_layers, self.n_tokens, self.n_kv_heads, self.head_dim)


class Record(NamedTuple):
    """A parsed record; the blocks are views into the bytes that it was parsed from."""

    header: RecordHeader
    k_block: memoryview
    v_block: memoryview
    digest: bytes  # that the record gives of `digested`
    digested: memoryview

    def check(self) -> None:
        """Raises RecordDamagedError unless the checksum is right."""
        if (got := xxhash.xxh3_128_digest(self.digested)) != self.digest:
            name = _name(self.header.chunk_id, self.header.layer_start)
            raise _damaged(name, "checksum", got.hex(), self.digest.hex())

    def decode_into(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy the group into two tensors [layers of the group, T, G, D] of any float dtype and stride."""
        decode_into(self.k_block, self.header.kv_dtype, k)
        decode_into(self.v_block, self.header.kv_dtype, v)


def size(header: RecordHeader) -> int:
    """Bytes of the record that says this of itself."""
    n_block = block_bytes(header.shape, header.kv_dtype)
    return _data_start(len(_pack_header(header))) + _padded(n_block) + n_block


def build(header: RecordHeader, k: torch.Tensor, v: torch.Tensor) -> bytearray:
    """The bytes of one record.

    Args:
        k, v: [layers of the group, T, G, D], any float dtype and stride.

    Raises:
        ValueError: a tensor has another shape than the header says, or cannot be stored in its dtype.
    """
    for name, tensor in (("k", k), ("v", v)):
        if tuple(tensor.shape) != header.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, its record header says {header.shape}")
    packed = _pack_header(header)
    n_block = block_bytes(header.shape, header.kv_dtype)
    data_start = _data_start(len(packed))
    v_start = data_start + _padded(n_block)
    data = bytearray(v_start + n_block)
    view = memoryview(data)
    view[_PRELUDE.size : _PRELUDE.size + len(packed)] = packed
    encode_into(k, header.kv_dtype, view[data_start : data_start + n_block])
    encode_into(v, header.kv_dtype, view[v_start:])
    _PRELUDE.pack_into(data, 0, MAGIC, RECORD_FORMAT, 0, b"", len(packed), data_start, n_block, n_block)
    view[8:_DIGESTED_FROM] = xxhash.xxh3_128_digest(view[_DIGESTED_FROM:])
    return data


def parse(data: Buffer, *, chunk_id: bytes, fingerprint: bytes, layer_start: int) -> Record:
    """Read one record, and check its form and that it is the one that its key promises, but not its checksum.

    Args:
        chunk_id, fingerprint, layer_start: what the record must say of itself.

    Raises:
        RecordDamagedError: anything at all is wrong; the message says what, what was got and what was expected.
    """
    name = _name(chunk_id, layer_start)
    view = memoryview(data)
    if len(view) < _PRELUDE.size:
        raise _damaged(name, "length", len(view), f"at least {_PRELUDE.size}")
    magic, format_, reserved, digest, n_header, data_start, n_k, n_v = _PRELUDE.unpack_from(view)
    if magic != MAGIC:
        raise _damaged(name, "magic", magic, MAGIC)
    if format_ != RECORD_FORMAT or reserved != 0:
        raise _damaged(name, "format", (format_, reserved), (RECORD_FORMAT, 0))
    if n_header > _MAX_HEADER_BYTES or data_start != _data_start(n_header):
        raise _damaged(name, "header length and data start", (n_header, data_start), "a consistent pair")
    n_expected = data_start + _padded(n_k) + n_v
    if len(view) != n_expected:
        raise _damaged(name, "length", len(view), n_expected)
    header = _parse_header(name, bytes(view[_PRELUDE.size : _PRELUDE.size + n_header]))
    got_key = (header.chunk_id.hex(), header.fingerprint.hex(), header.layer_start)
    expected_key = (chunk_id.hex(), fingerprint.hex(), layer_start)
    if got_key != expected_key:
        raise _damaged(name, "chunk, fingerprint and first layer", got_key, expected_key)
    n_block = block_bytes(header.shape, header.kv_dtype)
    if n_k != n_block or n_v != n_block:
        raise _damaged(name, "block lengths", (n_k, n_v), (n_block, n_block))
    v_start = data_start + _padded(n_k)
    return Record(header, view[data_start : data_start + n_k], view[v_start:], digest, view[_DIGESTED_FROM:])


def parse_expected(data: Buffer, expected: RecordHeader) -> Record:
    """Read the record that says exactly this of itself; as `parse`, and quicker because nothing is unpacked.

    Raises:
        RecordDamagedError: the form is wrong, or the header is another.
    """
    view = memoryview(data)
    packed = _pack_header(expected)
    n_block = block_bytes(expected.shape, expected.kv_dtype)
    data_start = _data_start(len(packed))
    v_start = data_start + _padded(n_block)
    digest = bytes(view[8:_DIGESTED_FROM])
    if len(view) == v_start + n_block and digest:
        prelude = _PRELUDE.pack(MAGIC, RECORD_FORMAT, 0, digest, len(packed), data_start, n_block, n_block)
        if view[: _PRELUDE.size + len(packed)] == prelude + packed:
            k_block, v_block = view[data_start : data_start + n_block], view[v_start:]
            return Record(expected, k_block, v_block, digest, view[_DIGESTED_FROM:])
    key = (expected.chunk_id, expected.fingerprint, expected.layer_start)
    found = parse(data, chunk_id=key[0], fingerprint=key[1], layer_start=key[2])
    raise _damaged(_name(expected.chunk_id, expected.layer_start), "header", found.header, expected)


def _pack_header(header: RecordHeader) -> bytes:
    packed: bytes = msgpack.packb(header._asdict(), use_bin_type=True)
    return packed


def _parse_header(name: str, packed: bytes) -> RecordHeader:
    try:
        fields: Any = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise _damaged(name, "header", repr(error), "a msgpack map") from error
    if not isinstance(fields, dict) or tuple(fields) != RecordHeader._fields:
        raise _damaged(name, "header fields", fields, RecordHeader._fields)
    for key in ("chunk_id", "fingerprint"):
        if not isinstance(fields[key], bytes) or len(fields[key]) != ID_BYTES:
            raise _damaged(name, key, fields[key], f"{ID_BYTES} bytes")
    for key in RecordHeader._fields[2:8]:
        if type(fields[key]) is not int or not 0 <= fields[key] < 2**31:
            raise _damaged(name, key, fields[key], "an integer in [0, 2**31)")
    if fields["kv_dtype"] not in KV_DTYPES:
        raise _damaged(name, "kv_dtype", fields["kv_dtype"], KV_DTYPES)
    header = RecordHeader(**fields)
    if header.n_layers < 1 or header.layer_start + header.n_layers > header.n_layers_all:
        got = (header.layer_start, header.n_layers, header.n_layers_all)
        raise _damaged(name, "first layer, layers of the group, layers in all", got, "a group within the model")
    return header


def _data_start(n_header: int) -> int:
    """The first offset of 48 mod 64 that lies behind the header."""
    return _padded(_PRELUDE.size + n_header - _DATA_START) + _DATA_START


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _name(chunk_id: bytes, layer_start: int) -> str:
    return f"record of chunk {chunk_id.hex()}, layers from {layer_start}"


def _damaged(name: str, what: str, got: object, expected: object) -> RecordDamagedError:
    return RecordDamagedError(f"{name}: {what} is {got!r}, expected {expected!r}; discard it and prefill again")
