"""Reading KV out of the tables: one chunk or many, all layers or some, by one thread or several.

- Every record is checked before anything of it is copied, and against what the chunk's first record says: a record of
  another chunk, model, shape or layer is never handed out.
- Large loads are divided among threads, each with a read transaction of its own. A thread first looks at all of its
  records, and then goes over them with as little Python as can be: code that runs between two copies finds that they
  have emptied the processor's caches, and takes five times as long. Checksum and copy both run without the
  interpreter's lock, record by record, so that a record is copied while it is still in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdllm_store import record
from pdllm_store.chunks import chunk_row, not_found
from pdllm_store.codec import TORCH_DTYPES, copy_raw, raw_view
from pdllm_store.errors import ChunkNotFoundError, RecordDamagedError
from pdllm_store.rows import kv_key
from pdllm_store.tables import Tables
from pdllm_store.types import ChunkId, ChunkKV
from pdllm_store.workers import Workers

Failure = ChunkNotFoundError | RecordDamagedError
Read = Callable[[], AbstractContextManager[Tables]]

_BYTES_PER_THREAD = 2 << 20  # below that, a second thread costs more than it saves
_PAGE_BYTES = 4096


class Plan(NamedTuple):
    """How a chunk lies in its records."""

    chunk_id: ChunkId
    n_groups: int
    group_layers: int
    kv_bytes: int
    header: record.RecordHeader  # of the first group; the others differ in their layers only

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[Y, T, G, D]."""
        return (self.header.n_layers_all, *self.header.shape[1:])

    def groups(self, layers: range) -> range:
        """The groups that these layers lie in."""
        return range(layers.start // self.group_layers, -(-layers.stop // self.group_layers))

    def group_header(self, group: int) -> record.RecordHeader:
        """What the record of a group must say of itself."""
        start = group * self.group_layers
        n_layers = min(self.group_layers, self.header.n_layers_all - start)
        return self.header._replace(layer_start=start, n_layers=n_layers)


Planning = Callable[[Tables, ChunkId], Plan]  # raises ChunkNotFoundError and RecordDamagedError


class _Task(NamedTuple):
    plan: Plan
    group: int
    out: ChunkKV
    raw: tuple[NDArray[Any], NDArray[Any]] | None  # the same memory, where blocks go into it as they are
    first_layer: int  # that out[0] stands for


def plan(tables: Tables, chunk_id: ChunkId) -> Plan:
    """Raises ChunkNotFoundError and RecordDamagedError; nothing is checksummed but the chunk's row."""
    row = chunk_row(tables, chunk_id)
    if row is None:
        raise not_found(chunk_id, "is not in the store")
    if not row.n_groups:
        raise not_found(chunk_id, "has no KV any more")
    data = _record(tables, chunk_id, 0, row.n_groups)
    header = record.parse(data, chunk_id=chunk_id, fingerprint=row.fingerprint, layer_start=0).header
    found = (row.n_groups, row.group_layers, header.n_layers, header.n_tokens)
    n_layers = header.n_layers_all
    expected = (-(-n_layers // max(1, row.group_layers)), row.group_layers, min(row.group_layers, n_layers))
    if found != (*expected, row.n_tokens):
        raise RecordDamagedError(
            f"chunk {chunk_id.hex()}: groups, layers of a group, layers of the first and tokens are {found}, its row "
            f"and first record ask for {(*expected, row.n_tokens)}; discard it and prefill again"
        )
    return Plan(chunk_id, row.n_groups, row.group_layers, row.kv_bytes, header)


def check(tables: Tables, chunk_id: ChunkId) -> None:
    """Read and checksum every record of a chunk.

    Raises:
        ChunkNotFoundError: no whole KV.
        RecordDamagedError: row or KV is damaged.
    """
    found = plan(tables, chunk_id)
    for group in range(found.n_groups):
        _parse(tables, found, group).check()


def empty_kv(shape: Sequence[int], kv_dtype: str, *, n_layers: int | None = None) -> ChunkKV:
    """Tensors [Y, T, G, D] for a chunk, in the dtype that its stored dtype is handed out in."""
    dtype = TORCH_DTYPES[kv_dtype]  # type: ignore[index]
    shape = (shape[0] if n_layers is None else n_layers, *shape[1:])
    return ChunkKV(*(torch.empty(shape, dtype=dtype) for _ in range(2)))


def load(
    read: Read,
    workers: Workers,
    chunk_ids: Sequence[ChunkId],
    out: Mapping[ChunkId, ChunkKV],
    *,
    layers: range | None = None,
    verify: bool,
    plan: Planning = plan,
) -> tuple[dict[ChunkId, ChunkKV], dict[ChunkId, Failure]]:
    """KV of distinct chunks, and why some could not be read.

    Args:
        out: tensors to load into; chunks that it lacks get new ones. What a failure leaves in them is undefined.
        layers: only these, consecutive ones.
        plan: says how a chunk lies in its records.

    Raises:
        ValueError: a tensor of `out` has another shape than its chunk, or the layers are none of the model.
    """
    plans: list[Plan] = []
    failures: dict[ChunkId, Failure] = {}
    with read() as tables:
        for chunk_id in chunk_ids:
            try:
                plans.append(plan(tables, chunk_id))
            except (ChunkNotFoundError, RecordDamagedError) as error:
                failures[chunk_id] = error
    kv: dict[ChunkId, ChunkKV] = {}
    tasks = []
    for found in plans:
        chosen = chosen_layers(layers, found.shape[0])
        target = out.get(found.chunk_id)
        if target is None:
            target = empty_kv(found.shape, found.header.kv_dtype, n_layers=len(chosen))
        else:
            _check_shape(target, (len(chosen), *found.shape[1:]))
        kv[found.chunk_id] = target
        groups = found.groups(chosen)
        raw_k, raw_v = (raw_view(tensor, found.header.kv_dtype) for tensor in target)
        raw = None if raw_k is None or raw_v is None else (raw_k, raw_v)
        tasks += [_Task(found, group, target, raw, chosen.start) for group in groups]

    def copy(part: Sequence[_Task]) -> None:
        with read() as tables:
            parsed = [_parse_or_fail(tables, task, failures, plan) for task in part]
            for task, found in zip(part, parsed, strict=True):
                if found is not None and task.plan.chunk_id not in failures:
                    try:
                        if verify:
                            found.check()
                        _copy(task, found)
                    except RecordDamagedError as error:
                        failures[task.plan.chunk_id] = error

    n_bytes = sum(found.kv_bytes for found in plans)
    n_parts = max(1, min(workers.n_threads, n_bytes // _BYTES_PER_THREAD, len(tasks)))
    parts = [tasks[index * len(tasks) // n_parts : (index + 1) * len(tasks) // n_parts] for index in range(n_parts)]
    workers.map(copy, parts)
    return {chunk_id: found for chunk_id, found in kv.items() if chunk_id not in failures}, failures


def touch_pages(read: Read, chunk_ids: Sequence[ChunkId], stopping: threading.Event) -> None:
    """Bring the records of chunks into the page cache; those that are absent or damaged are passed over."""
    for chunk_id in chunk_ids:
        if stopping.is_set():
            return
        with read() as tables:  # a long transaction would keep the pages that others free
            for _, data in tables.scan("kv", chunk_id):
                np.frombuffer(data, np.uint8)[::_PAGE_BYTES].sum()


def _parse_or_fail(
    tables: Tables, task: _Task, failures: dict[ChunkId, Failure], plan: Planning
) -> record.Record | None:
    """A task's record, not checksummed; None where it, or its chunk, is damaged or gone by now."""
    chunk_id = task.plan.chunk_id
    if chunk_id in failures:
        return None
    try:
        return _parse(tables, task.plan, task.group)
    except RecordDamagedError as error:
        failures[chunk_id] = _gone(tables, chunk_id, plan) or error
        return None


def _copy(task: _Task, parsed: record.Record) -> None:
    header = parsed.header
    start, end = header.layer_start - task.first_layer, header.layer_start + header.n_layers - task.first_layer
    is_inside = start >= 0 and end <= task.out.k.shape[0]
    if is_inside and task.raw is not None:
        for block, raw in zip((parsed.k_block, parsed.v_block), task.raw, strict=True):
            copy_raw(block, raw[start:end])
        return
    if is_inside:
        parsed.decode_into(task.out.k[start:end], task.out.v[start:end])
        return
    whole = empty_kv(header.shape, header.kv_dtype)
    parsed.decode_into(*whole)
    keep = slice(max(0, -start), header.n_layers - max(0, end - task.out.k.shape[0]))
    for source, target in zip(whole, task.out, strict=True):
        target[max(0, start) : end].copy_(source[keep])


def _gone(tables: Tables, chunk_id: ChunkId, plan: Planning) -> Failure | None:
    """What is wrong with a chunk by now, if it was deleted or evicted since it was planned."""
    try:
        plan(tables, chunk_id)
    except (ChunkNotFoundError, RecordDamagedError) as error:
        return error
    return None


def _parse(tables: Tables, found: Plan, group: int) -> record.Record:
    """The record of a group, its checksum not compared yet."""
    return record.parse_expected(_record(tables, found.chunk_id, group, found.n_groups), found.group_header(group))


def _record(tables: Tables, chunk_id: ChunkId, group: int, n_groups: int) -> bytes | bytearray | memoryview:
    data = tables.get("kv", kv_key(chunk_id, group))
    if data is None:
        raise RecordDamagedError(
            f"chunk {chunk_id.hex()}: layer group {group} of {n_groups} is absent; discard it and prefill again"
        )
    return data


def chosen_layers(wanted: range | None, n_layers: int) -> range:
    """The layers asked for. Raises ValueError if they are none of the model."""
    if wanted is None:
        return range(n_layers)
    if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= n_layers:
        raise ValueError(f"layers are {wanted}, expected consecutive ones within range(0, {n_layers})")
    return wanted


def _check_shape(kv: ChunkKV, shape: tuple[int, ...]) -> None:
    for name, tensor in (("k", kv.k), ("v", kv.v)):
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} is a {tensor.dtype} tensor {tuple(tensor.shape)}, the chunk needs a float tensor {shape}"
            )
