"""Which part of a store each byte of its data file belongs to.

Rows are found by the addresses that LMDB hands out, so no copy of a row in a freed page is taken for the live one.
What lies around them follows from LMDB 0.9's page layout (mdb.c: MDB_page, MDB_node, MDB_meta, MDB_db).
"""

from __future__ import annotations

import mmap
import os
import struct
from itertools import pairwise
from typing import Any, NamedTuple

import lmdb
import numpy as np

from pdllm_store.codec import Buffer
from pdllm_store.location import DATA_FILE

META_PAGE, TABLE_ROOT, TREE_PAGE, OVERFLOW_FRAME = "meta page", "table root", "tree page", "overflow frame"
FREE_LIST, FREE_PAGE, PAGE_GAP, ROW_KEY = "free list", "free page", "page gap", "row key"
_PAGE = mmap.PAGESIZE
_BRANCH, _HAS_LEAVES = 0x01, 0x03
_META_BYTES = 152  # 16 of page header and 136 of MDB_meta
_MAGIC = b"PDKV"
_KEYS_ONLY = (b"lru",)  # tables whose values are empty, so that their keys are all that counts
MAC_OF_NOTHING = "MAC of an empty row"


class Area(NamedTuple):
    """Bytes `start:end` of the data file."""

    part: str
    start: int
    end: int


def file_areas(folder: str) -> list[Area]:
    """The whole data file of a closed store in areas that do not overlap, in order."""
    with open(os.path.join(folder, DATA_FILE), "rb") as file:
        data = file.read()
    parts = np.full(len(data), FREE_PAGE, dtype=object)
    parts[:_META_BYTES] = parts[_PAGE : _PAGE + _META_BYTES] = META_PAGE
    meta = max((0, _PAGE), key=lambda page: _u64(data, page + 144))  # the newer transaction
    _paint_tree(parts, data, _u64(data, meta + 80), FREE_LIST)
    _paint_tree(parts, data, _u64(data, meta + 128), TREE_PAGE)
    env = lmdb.open(folder, readonly=True, lock=False, max_dbs=32)
    try:
        with env.begin(buffers=True) as transaction:
            _paint_tables(parts, data, env, transaction, _map_start(folder))
    finally:
        env.close()
    edges = [0, *(np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist(), len(data)]
    return [Area(parts[start], start, end) for start, end in pairwise(edges)]


def _paint_tables(parts: Any, data: bytes, env: Any, transaction: Any, base: int) -> None:
    for name, entry in transaction.cursor():
        at = _address(entry) - base
        _paint_tree(parts, data, _u64(data, at + 40), TREE_PAGE)
        parts[at : at + len(entry)] = TABLE_ROOT
        table = bytes(name)
        for key, value in transaction.cursor(db=env.open_db(table, txn=transaction, create=False)):
            at = _address(key) - base
            parts[at : at + len(key)] = ROW_KEY
            if not value:
                continue
            start = _address(value) - base
            if start // _PAGE != at // _PAGE:  # the value has pages of its own
                parts[start // _PAGE * _PAGE : -(-(start + len(value)) // _PAGE) * _PAGE] = OVERFLOW_FRAME
            is_row = table not in _KEYS_ONLY
            parts[start : start + len(value)] = f"row of {table.decode()}" if is_row else MAC_OF_NOTHING
            if bytes(value[:4]) == _MAGIC:
                _paint_record(parts, start, value)


def _paint_record(parts: Any, start: int, value: Buffer) -> None:
    """The parts of a KV record (layout in docs/store-format.md)."""
    n_header, data_start, n_k, n_v = struct.unpack_from("<IIQQ", value, 24)
    v_start = data_start + -(-n_k // 64) * 64
    if 48 + n_header > data_start or v_start + n_v > len(value):
        raise ValueError(f"KV records have another layout: {n_header}, {data_start}, {n_k}, {n_v} of {len(value)}")
    for part, first, end in (
        ("KV prelude", 0, 48),
        ("KV header", 48, 48 + n_header),
        ("KV padding", 48 + n_header, data_start),
        ("KV payload", data_start, data_start + n_k),
        ("KV padding", data_start + n_k, v_start),
        ("KV payload", v_start, v_start + n_v),
        ("KV MAC", v_start + n_v, len(value)),  # of a store with a key
    ):
        parts[start + first : start + end] = part


def _paint_tree(parts: Any, data: bytes, root: int, part: str) -> None:
    """All pages of a tree but overflow pages."""
    if root == 2**64 - 1:  # an empty tree
        return
    at = root * _PAGE
    parts[at : at + _PAGE] = part
    flags, lower, upper = struct.unpack_from("<HHH", data, at + 10)
    parts[at + lower : at + upper] = PAGE_GAP
    assert flags & _HAS_LEAVES, f"page {root} is neither branch nor leaf"
    if flags & _BRANCH:
        for node in struct.unpack_from(f"<{(lower - 16) // 2}H", data, at + 16):
            low, middle, high = struct.unpack_from("<HHH", data, at + node)
            _paint_tree(parts, data, low | middle << 16 | high << 32, part)


def _u64(data: bytes, at: int) -> int:
    (number,) = struct.unpack_from("<Q", data, at)
    return int(number)


def _address(view: Buffer) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _map_start(folder: str) -> int:
    """Where this process has the data file mapped."""
    real = os.path.realpath(os.path.join(folder, DATA_FILE))
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].rstrip("\n") == real and int(fields[2], 16) == 0:
                return int(fields[0].split("-")[0], 16)
    raise RuntimeError(f"{real} is not mapped")
