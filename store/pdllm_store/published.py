"""What a far store consists of: objects that are written once, and one pointer that says which of them count.

    store                        the pointer, the only object that is ever replaced: the name of the manifest in force
    manifests/<name>             stored dtype, identity and generation of the store, and its segments in order
    segments/<name>              documents that were added, replaced or deleted: rows, texts, references, chunk rows
    chunks/<2 digits>/<id>       the KV records of one chunk, one behind the other

Manifests and segments are named by the BLAKE3 of their bytes, so that they are checked whenever they are read.
docs/object-store.md has the layout and the protocol on a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import blake3
import msgpack

from pdllm_store.bucket import Bucket, Versioned
from pdllm_store.codec import Buffer
from pdllm_store.documents import StoredDocument
from pdllm_store.errors import RecordDamagedError, StoreFormatError, StoreUnavailableError
from pdllm_store.rows import pack_map, unpack_map
from pdllm_store.types import ID_BYTES, KV_DTYPES, ChunkId, KVDtype

OBJECT_FORMAT = 1  # raised whenever a byte of an object but the chunks' changes its meaning
POINTER, MANIFESTS, SEGMENTS, CHUNKS = "store", "manifests", "segments", "chunks"
MERGED_BYTES = 8 << 20  # of a segment: up to this, later ones are merged into it
_POINTER_KEY, _MANIFEST_KEY = b"store", b"manifest"
_MAX_VANISHED = 5  # manifests in a row that were replaced and collected between two requests


class PublishedDocument(NamedTuple):
    """A document with all that is needed to show it: its rows, and the rows of its chunks without what is local."""

    rows: StoredDocument
    chunks: dict[ChunkId, bytes]


class Segment(NamedTuple):
    """Changes of documents by the keys of their rows (None: deleted), and the rows of their models' fingerprints."""

    documents: dict[bytes, PublishedDocument | None]
    fingerprints: dict[bytes, bytes]


class SegmentRef(NamedTuple):
    """A segment as a manifest names it."""

    name: str
    n_bytes: int


class Manifest(NamedTuple):
    """One state of a store. The segments apply in order, a later one over the earlier."""

    kv_dtype: KVDtype
    store_id: str
    generation: int  # larger in every later manifest
    segments: tuple[SegmentRef, ...]


class Head(NamedTuple):
    """The manifest in force, and the pointer to it as it was read or written."""

    pointer: Versioned
    name: str
    manifest: Manifest


def chunk_name(chunk_id: ChunkId) -> str:
    """The object of a chunk; folders by its first digits, because a folder of a file system must not grow too large."""
    return f"{CHUNKS}/{chunk_id.hex()[:2]}/{chunk_id.hex()}"


def read_head(bucket: Bucket, known: Head | None = None) -> Head | None:
    """The manifest in force, `known` itself if it is still that, None if there is no store.

    Raises:
        StoreFormatError: what is there is no store of ours, or one of another format.
        RecordDamagedError: the manifest is damaged or gone.
    """
    for _ in range(_MAX_VANISHED):
        pointer = bucket.get_versioned(POINTER, known.pointer if known else None)
        if pointer is None or (known is not None and pointer is known.pointer):
            return known if pointer else None
        name = _read_pointer(bucket, pointer.data)
        if (data := _read(bucket, MANIFESTS, name)) is not None:
            return Head(pointer, name, _parse_manifest(bucket, data))
        known = None
    raise _damaged(bucket, f"{MANIFESTS}/{name}", "is gone")


def read_segments(bucket: Bucket, refs: Sequence[SegmentRef]) -> list[Segment] | None:
    """Segments of a manifest; None if one was collected, because the manifest is in force no more.

    Raises RecordDamagedError.
    """
    found = bucket.map(lambda ref: _read_segment(bucket, ref.name), refs)
    whole = [segment for segment in found if segment is not None]
    return whole if len(whole) == len(found) else None


def publish(bucket: Bucket, head: Head, change: Segment, *, generation: int) -> Head | None:
    """Put a change of documents in force; None if another manifest is in force than `head`'s, and nothing was changed.

    Segments are merged like the digits of a counter: each byte is written again as often as its number has digits.
    """
    segments = list(head.manifest.segments)
    data = pack_segment(change, generation)
    while segments and segments[-1].n_bytes <= len(data) <= MERGED_BYTES - segments[-1].n_bytes:
        earlier = read_segments(bucket, [segments.pop()])
        if earlier is None:
            return None
        change = merged([*earlier, change])
        data = pack_segment(change if segments else without_deleted(change), generation)
    name = digest(data)
    manifest = head.manifest._replace(generation=generation, segments=(*segments, SegmentRef(name, len(data))))
    return publish_manifest(bucket, head, manifest, {name: data})


def publish_manifest(
    bucket: Bucket, head: Head | None, manifest: Manifest, segments: Mapping[str, bytes]
) -> Head | None:
    """Write a manifest and its new segments, and put it in force in the place of `head`'s (None: of none).

    Returns None if another one is in force; what was written is then collected some time.

    Raises:
        StoreUnavailableError: whether it is in force is not known; a later `read_head` tells.
    """
    fields = {**manifest._asdict(), "format": OBJECT_FORMAT, "segments": [list(ref) for ref in manifest.segments]}
    packed = pack_map(_MANIFEST_KEY, fields)
    name = digest(packed)
    written = {f"{MANIFESTS}/{name}": packed, **{f"{SEGMENTS}/{key}": data for key, data in segments.items()}}
    bucket.map(lambda item: bucket.create(*item), written.items())
    pointer = pack_map(_POINTER_KEY, {"format": OBJECT_FORMAT, "manifest": name})
    failure = None
    try:
        placed = bucket.swap(POINTER, pointer, head.pointer if head else None)
    except StoreUnavailableError as error:
        placed, failure = None, error
    if placed is None:  # or it was placed and the answer was lost: the pointer itself tells
        found = bucket.get_versioned(POINTER)
        if found is None or found.data != pointer:
            if failure is not None:
                raise failure
            return None
        placed = found
    return Head(placed, name, manifest)


def merged(segments: Iterable[Segment]) -> Segment:
    """One segment that does what these do in turn."""
    whole = Segment({}, {})
    for segment in segments:
        whole.documents.update(segment.documents)
        whole.fingerprints.update(segment.fingerprints)
    return whole


def without_deleted(segment: Segment) -> Segment:
    """A segment without its deletions, for where nothing lies below it."""
    return segment._replace(documents={key: entry for key, entry in segment.documents.items() if entry is not None})


def pack_segment(segment: Segment, generation: int) -> bytes:
    """The bytes of a segment. The generation makes them new: a name that was in use once may be collected any time."""
    documents = [
        [key, entry and [entry.rows.row, entry.rows.text, list(entry.rows.refs), list(entry.chunks.items())]]
        for key, entry in segment.documents.items()
    ]
    packed: bytes = msgpack.packb([generation, list(segment.fingerprints.items()), documents], use_bin_type=True)
    return packed


def _read_segment(bucket: Bucket, name: str) -> Segment | None:
    data = _read(bucket, SEGMENTS, name)
    if data is None:
        return None
    try:
        _, fingerprints, documents = msgpack.unpackb(data, use_list=False)
        return Segment(
            {
                key: entry and PublishedDocument(StoredDocument(entry[0], entry[1], list(entry[2])), dict(entry[3]))
                for key, entry in documents
            },
            dict(fingerprints),
        )
    except (ValueError, TypeError, IndexError, msgpack.exceptions.UnpackException) as error:
        raise _damaged(bucket, f"{SEGMENTS}/{name}", f"is no segment ({type(error).__name__})") from error


def _read(bucket: Bucket, folder: str, name: str) -> Buffer | None:
    data = bucket.get(f"{folder}/{name}")
    if data is not None and digest(data) != name:
        raise _damaged(bucket, f"{folder}/{name}", f"has {len(data)} bytes that are not those it is named by")
    return data


def _read_pointer(bucket: Bucket, data: bytes) -> str:
    try:
        fields = unpack_map("pointer", _POINTER_KEY, data)
    except RecordDamagedError as error:
        raise StoreFormatError(f"{bucket.url} holds an object 'store' that is not ours; give another URL") from error
    if fields.get("format") != OBJECT_FORMAT:
        raise StoreFormatError(
            f"{bucket.url} is a store of format {fields.get('format')!r}, this version reads format {OBJECT_FORMAT}; "
            "open it with the version that wrote it, or prefill its documents into a new store"
        )
    return str(fields.get("manifest"))


def _parse_manifest(bucket: Bucket, data: Buffer) -> Manifest:
    fields: dict[str, Any] = unpack_map("manifest", _MANIFEST_KEY, data)
    try:
        if fields.pop("format") != OBJECT_FORMAT or fields["kv_dtype"] not in KV_DTYPES:
            raise ValueError("another format")
        return Manifest(**{**fields, "segments": tuple(SegmentRef(*ref) for ref in fields["segments"])})
    except (ValueError, TypeError, KeyError) as error:
        raise StoreFormatError(
            f"{bucket.url} has a manifest that this version cannot read ({error}); open it with the one that wrote it"
        ) from error


def digest(data: Buffer) -> str:
    """The name of an object of these bytes."""
    return blake3.blake3(data).hexdigest(ID_BYTES)


def _damaged(bucket: Bucket, name: str, what: str) -> RecordDamagedError:
    return RecordDamagedError(
        f"{bucket.url}: {name} {what}; restore that object (an earlier version of it), or prefill into a new store"
    )
