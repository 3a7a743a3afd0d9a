"""Deleting the objects of a far store that nothing refers to any more.

- Chunks are written before the document that needs them is published, so an object is left alone for a while after it
  was written (the grace). A writer never relies on an older object that no document refers to: it writes it again.
- An object is looked at once more right before it is deleted, and so is the pointer. What a writer does between that
  look and the deletion (milliseconds) can still lose a chunk, which is then computed again when it is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from pdllm_store.bucket import Bucket, Entry
from pdllm_store.errors import RecordDamagedError, StoreNotFoundError
from pdllm_store.published import (
    CHUNKS,
    MANIFESTS,
    MERGED_BYTES,
    SEGMENTS,
    Head,
    Segment,
    SegmentRef,
    chunk_name,
    digest,
    merged,
    pack_segment,
    publish_manifest,
    read_head,
    read_segments,
    without_deleted,
)

logger = logging.getLogger(__name__)

GRACE_S = 24 * 3600.0
RENEW_S = 1800.0  # an object older than this, that no document refers to, is relied on by nobody
_AT_ONCE = 256  # objects between two looks at the pointer


class Garbage(NamedTuple):
    """What was deleted, or would be."""

    chunks: int
    others: int  # manifests and segments
    n_bytes: int


def collect(bucket: Bucket, *, grace_s: float, dry_run: bool) -> Garbage:
    """Delete what the manifest in force does not need and is older than the grace.

    Raises:
        StoreError, RecordDamagedError: what is in force cannot be read; nothing was deleted then.
    """
    old = [
        entry for folder in (CHUNKS, SEGMENTS, MANIFESTS) for entry in bucket.entries(folder) if entry.age_s > grace_s
    ]
    if not dry_run:
        _drop_deleted_documents(bucket)
    head, segments = _in_force(bucket)
    needed = _needed(head, segments)
    victims = [entry for entry in old if entry.name not in needed]
    deleted: list[Entry] = [] if not dry_run else victims
    for start in range(0, len(victims) if not dry_run else 0, _AT_ONCE):
        part = victims[start : start + _AT_ONCE]
        seen = bucket.map(lambda entry: bucket.head(entry.name), part)
        latest = read_head(bucket, head)
        if latest is not head:
            head, segments = _in_force(bucket)
            needed = _needed(head, segments)
        part = [entry for entry in seen if entry and entry.age_s > grace_s and entry.name not in needed]
        bucket.delete([entry.name for entry in part])
        deleted += part
    n_chunks = sum(entry.name.startswith(CHUNKS) for entry in deleted)
    return Garbage(n_chunks, len(deleted) - n_chunks, sum(entry.n_bytes for entry in deleted))


def _in_force(bucket: Bucket) -> tuple[Head, list[Segment]]:
    head = None
    for _ in range(5):
        head = read_head(bucket, head)
        if head is None:
            raise StoreNotFoundError(f"there is no store at {bucket.url}; check the URL")
        if (segments := read_segments(bucket, head.manifest.segments)) is not None:
            return head, segments
    raise RecordDamagedError(f"{bucket.url}: segments in force are gone, so nothing was deleted; restore them")


def _needed(head: Head, segments: Iterable[Segment]) -> set[str]:
    """Names of all objects that a manifest leads to."""
    names = {f"{MANIFESTS}/{head.name}", *(f"{SEGMENTS}/{ref.name}" for ref in head.manifest.segments)}
    documents = merged(segments).documents.values()
    return names | {chunk_name(chunk_id) for entry in documents if entry for chunk_id in entry.chunks}


def _drop_deleted_documents(bucket: Bucket) -> None:
    """Publish segments without the documents that later ones replace or delete, if there are any."""
    head, segments = _in_force(bucket)
    whole = without_deleted(merged(segments))
    if len(whole.documents) == sum(len(segment.documents) for segment in segments):
        return
    generation = head.manifest.generation + 1
    packed = {digest(data): data for data in _pieces(whole, generation)}
    refs = tuple(SegmentRef(name, len(data)) for name, data in packed.items())
    manifest = head.manifest._replace(generation=generation, segments=refs)
    if publish_manifest(bucket, head, manifest, packed) is None:
        logger.info("%s: deleted documents stay in its segments, because somebody published meanwhile", bucket.url)


def _pieces(whole: Segment, generation: int) -> list[bytes]:
    """Segments of about the size up to which they are merged."""
    pieces: list[bytes] = []
    piece, n_bytes = Segment({}, whole.fingerprints), 0
    for key, entry in whole.documents.items():
        piece.documents[key] = entry
        n_bytes += len(pack_segment(Segment({key: entry}, {}), 0))
        if n_bytes > MERGED_BYTES:
            pieces.append(pack_segment(piece, generation))
            piece, n_bytes = Segment({}, whole.fingerprints), 0
    return [*pieces, pack_segment(piece, generation)] if piece.documents else pieces
