"""The small rows of a store. Each is sealed: xxh3-64 over key and payload, then the payload (little-endian).

A row that does not match its seal, or was written under another key, raises RecordDamagedError and is never believed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import blake3
import msgpack
import numpy as np
import xxhash

from pdllm_store.codec import Buffer
from pdllm_store.errors import RecordDamagedError
from pdllm_store.types import ID_BYTES, ChunkMeta, ChunkRef, Document, ModelFingerprint

OnDamage = Callable[[RecordDamagedError], None]  # told of each row that a listing has to leave out

_SEAL_BYTES = 8
_CHUNK = struct.Struct("<IIHHQQ16sIi")
_USED = struct.Struct(">Q")
_REF = struct.Struct("<16sQQI")
_MAX_DEPTH = 64


class ChunkRow(NamedTuple):
    """A chunk without its KV. `n_groups` is 0 while no whole KV is held."""

    refcount: int  # references by visible documents
    pins: int  # pinned documents among those
    n_groups: int
    group_layers: int  # layers of each group but the last, which may have fewer
    kv_bytes: int  # still known after an eviction, 0 after KV was discarded
    used_ms: int  # when the KV was written or last read, milliseconds since 1970
    fingerprint: bytes  # 16 bytes
    token_ids: bytes  # little-endian int32 [T]
    sketch: bytes | None  # little-endian float16

    @property
    def is_evicted(self) -> bool:
        """KV was dropped for lack of room, and can be computed again from the token ids."""
        return not self.n_groups and bool(self.kv_bytes)

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids) // 4

    def meta(self, chunk_id: bytes) -> ChunkMeta:
        tokens = np.frombuffer(self.token_ids, "<i4").astype(np.int32)
        sketch = None if self.sketch is None else np.frombuffer(self.sketch, "<f2").astype(np.float16)
        return ChunkMeta(chunk_id, tokens, sketch)


class DocumentRow(NamedTuple):
    """A document without its text and references."""

    doc_id: str
    source: str
    text_id: bytes
    recipe: str
    n_chunks: int
    n_tokens: int
    pinned: bool
    metadata: Mapping[str, Any]


def document_key(fingerprint: bytes, doc_id: str) -> bytes:
    """32 bytes: the fingerprint digest and a BLAKE3 of the id, because LMDB keys end at 511 bytes and ids do not."""
    return fingerprint + blake3.blake3(doc_id.encode("utf-8", "surrogatepass")).digest(ID_BYTES)


def ref_key(document: bytes, ordinal: int) -> bytes:
    """Big-endian, so that references sort by ordinal."""
    return document + struct.pack(">I", ordinal)


def kv_key(chunk_id: bytes, group: int) -> bytes:
    return chunk_id + struct.pack(">H", group)


def lru_key(used_ms: int, chunk_id: bytes) -> bytes:
    """Big-endian, so that chunks sort by their last use."""
    return _USED.pack(used_ms) + chunk_id


def parse_lru_key(key: bytes) -> tuple[int, bytes]:
    """When a chunk was last used, and its id."""
    return _USED.unpack_from(key)[0], key[_USED.size :]


def seal(key: bytes, payload: bytes) -> bytes:
    return bytes(xxhash.xxh3_64_digest(key + payload)) + payload


def unseal(what: str, key: bytes, value: Buffer) -> bytes:
    """The payload of a sealed row, copied.

    Raises:
        RecordDamagedError: the seal does not match.
    """
    payload = bytes(value[_SEAL_BYTES:])
    if bytes(value[:_SEAL_BYTES]) != xxhash.xxh3_64_digest(key + payload):
        raise damaged(what, key, f"its seal does not match its {len(payload)} bytes")
    return payload


def damaged(what: str, key: bytes, reason: str) -> RecordDamagedError:
    message = f"{what} {key.hex()} is damaged: {reason}; run `verify`, then write it again"
    return RecordDamagedError(message, (key,) if what == "chunk" else ())


def pack_chunk(key: bytes, row: ChunkRow) -> bytes:
    n_sketch = -1 if row.sketch is None else len(row.sketch)
    head = _CHUNK.pack(*row[:6], row.fingerprint, len(row.token_ids), n_sketch)
    return seal(key, head + row.token_ids + (row.sketch or b""))


def unpack_chunk(key: bytes, value: Buffer) -> ChunkRow:
    payload = unseal("chunk", key, value)
    try:
        *counts, n_tokens, n_sketch = _CHUNK.unpack_from(payload)
    except struct.error as error:
        raise damaged("chunk", key, str(error)) from error
    if len(payload) != _CHUNK.size + n_tokens + max(n_sketch, 0) or n_tokens % 4 or n_sketch < -1:
        raise damaged("chunk", key, f"{len(payload)} bytes for {n_tokens} of tokens and {n_sketch} of sketch")
    tokens_end = _CHUNK.size + n_tokens
    sketch = None if n_sketch == -1 else payload[tokens_end:]
    return ChunkRow._make((*counts, payload[_CHUNK.size : tokens_end], sketch))


def pack_ref(key: bytes, ref: ChunkRef) -> bytes:
    return seal(key, _REF.pack(ref.chunk_id, ref.char_start, ref.char_end, ref.page or 0))


def unpack_ref(key: bytes, value: Buffer, doc_id: str) -> ChunkRef:
    payload = unseal("reference", key, value)
    if len(payload) != _REF.size:
        raise damaged("reference", key, f"{len(payload)} bytes instead of {_REF.size}")
    chunk_id, start, end, page = _REF.unpack(payload)
    return ChunkRef(doc_id, int.from_bytes(key[-4:], "big"), chunk_id, start, end, page or None)


def pack_document(key: bytes, document: Document, *, pinned: bool) -> bytes:
    """Raises ValueError if the metadata holds anything but JSON-like values; the message names the key."""
    _check_json(dict(document.metadata), "metadata", _MAX_DEPTH)
    return seal_document(
        key,
        DocumentRow(
            document.doc_id,
            document.source,
            document.text_id,
            document.recipe,
            len(document.chunks),
            document.n_tokens,
            pinned,
            dict(document.metadata),
        ),
    )


def seal_document(key: bytes, row: DocumentRow) -> bytes:
    return seal(key, _pack(row))


def unpack_document(key: bytes, value: Buffer) -> DocumentRow:
    fields = _unpack("document", key, value, list, len(DocumentRow._fields))
    row = DocumentRow(*fields)
    if not isinstance(row.doc_id, str) or document_key(key[:ID_BYTES], row.doc_id) != key:
        raise damaged("document", key, f"it says to be {row.doc_id!r}")
    return row


def pack_fingerprint(fingerprint: ModelFingerprint) -> bytes:
    return pack_map(fingerprint.digest, asdict(fingerprint))


def unpack_fingerprint(key: bytes, value: Buffer) -> ModelFingerprint:
    fields = unpack_map("fingerprint", key, value)
    try:
        fingerprint = ModelFingerprint(**fields)
    except TypeError as error:
        raise damaged("fingerprint", key, str(error)) from error
    if fingerprint.digest != key:
        raise damaged("fingerprint", key, f"its fields digest to {fingerprint.digest.hex()}")
    return fingerprint


def pack_text(key: bytes, text: str) -> bytes:
    return seal(key, text.encode("utf-8", "surrogatepass"))


def unpack_text(key: bytes, value: Buffer) -> str:
    payload = unseal("text", key, value)
    try:
        return payload.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:  # a row of another table under this key has the same seal
        raise damaged("text", key, str(error)) from error


def pack_map(key: bytes, fields: Mapping[str, Any]) -> bytes:
    return seal(key, _pack(dict(fields)))


def unpack_map(what: str, key: bytes, value: Buffer) -> dict[str, Any]:
    fields: dict[str, Any] = _unpack(what, key, value, dict, None)
    return fields


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass")
    return packed


def _unpack(what: str, key: bytes, value: Buffer, form: type[list[Any] | dict[str, Any]], n_fields: int | None) -> Any:
    payload = unseal(what, key, value)
    try:
        fields = msgpack.unpackb(payload, raw=False, unicode_errors="surrogatepass", strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise damaged(what, key, repr(error)) from error
    if not isinstance(fields, form) or (n_fields is not None and len(fields) != n_fields):
        raise damaged(what, key, f"it holds no {form.__name__} of {n_fields} fields")
    return fields


def _check_json(value: object, where: str, depth: int) -> None:
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{where} is {value}, integers of metadata have at most 64 bits")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{where} is {value}, which JSON does not know; leave it out or store a string")
    elif depth == 0:
        raise ValueError(f"{where} is nested more than {_MAX_DEPTH} deep")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]", depth - 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ValueError(f"{where} has the key {name!r} of type {type(name).__name__}, keys must be strings")
            _check_json(item, f"{where}[{name!r}]", depth - 1)
    else:
        raise ValueError(
            f"{where} is a {type(value).__module__}.{type(value).__name__}; metadata holds None, bool, int, float, "
            "str, list and dict only: convert it first"
        )
