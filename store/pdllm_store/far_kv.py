"""KV of a far store: where the records of a chunk lie in its object, and fetching the ranges that are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from pdllm_store import chunks, record
from pdllm_store.bucket import Bucket
from pdllm_store.codec import Buffer
from pdllm_store.errors import RecordDamagedError
from pdllm_store.loading import Plan, chosen_layers
from pdllm_store.published import chunk_name
from pdllm_store.rows import ChunkRow, kv_key, unpack_fingerprint
from pdllm_store.tables import OverTables, Table, Tables
from pdllm_store.types import ID_BYTES, ChunkId

Records = dict[bytes, memoryview]  # by their keys in the table `kv`


def far_plan(tables: Tables, chunk_id: ChunkId) -> Plan:
    """How a chunk lies in its object, as row and fingerprint say; its records have to agree with that.

    Raises ChunkNotFoundError and RecordDamagedError.
    """
    row = chunks.chunk_row(tables, chunk_id)
    if row is None:
        raise chunks.not_found(chunk_id, "is not in the store")
    if not row.kv_bytes:
        raise chunks.not_found(chunk_id, "has no KV any more")
    return plan_of(tables, chunk_id, row)


def plan_of(tables: Tables, chunk_id: ChunkId, row: ChunkRow) -> Plan:
    """As `far_plan`, from a row that may not say yet what is held. Raises RecordDamagedError."""
    sealed = tables.get("fingerprints", row.fingerprint)
    if sealed is None:
        raise RecordDamagedError(f"chunk {chunk_id.hex()} is of a model whose fingerprint is absent; prefill it again")
    headers = chunks.layout(unpack_fingerprint(row.fingerprint, sealed), chunk_id, row.n_tokens)
    return Plan(chunk_id, len(headers), headers[0].n_layers, sum(map(record.size, headers)), headers[0])


def fetch_records(bucket: Bucket, plans: Iterable[Plan], layers: range | None = None) -> Records:
    """The records that hold these layers (None: all); those of objects that are absent or too short are left out.

    Raises:
        StoreError: the far store cannot be read.
        ValueError: the layers are none of the model.
    """

    def fetch(plan: Plan) -> Records:
        groups = plan.groups(chosen_layers(layers, plan.shape[0]))
        ends = list(accumulate(record.size(plan.group_header(group)) for group in range(plan.n_groups)))
        starts = [0, *ends]
        first = starts[groups.start]
        data = bucket.range(chunk_name(plan.chunk_id), first, ends[groups.stop - 1])
        if data is None:
            return {}
        return {kv_key(plan.chunk_id, group): data[starts[group] - first : ends[group] - first] for group in groups}

    found: Records = {}
    for records in bucket.map(fetch, plans):
        found |= records
    return found


class FetchedTables(OverTables):
    """Tables with records that were fetched."""

    def __init__(self, tables: Tables, records: Mapping[bytes, Buffer]) -> None:
        super().__init__(tables)
        self._records = records

    def get(self, table: Table, key: bytes) -> Buffer | None:
        return self._records.get(key) if table == "kv" else super().get(table, key)


class FarTables(OverTables):
    """Tables whose records are those of the far store, fetched a chunk at a time; written ones are there already."""

    def __init__(self, tables: Tables, bucket: Bucket) -> None:
        super().__init__(tables)
        self._bucket = bucket
        self._chunk_id = b""
        self._records: Records = {}  # of that chunk

    def get(self, table: Table, key: bytes) -> Buffer | None:
        if table != "kv":
            return super().get(table, key)
        if (chunk_id := key[:ID_BYTES]) != self._chunk_id:
            self._records = fetch_records(self._bucket, [far_plan(self, chunk_id)])
            self._chunk_id = chunk_id
        return self._records.get(key)

    def put(self, table: Table, key: bytes, value: Buffer) -> None:
        if table != "kv":
            super().put(table, key, value)
