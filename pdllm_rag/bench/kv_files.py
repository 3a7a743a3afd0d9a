"""Chunk KV in plain files, as it is kept without a store: what the store is compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pdllm_store import ChunkKV
from pdllm_store.location import sync
from safetensors import safe_open
from safetensors.torch import save_file

PLAIN_FILE = "kv"


class FileFormat(NamedTuple):
    """One way to keep chunks in the files of a folder.

    write: puts chunks there; they are on the disk when it returns.
    read: brings them back into tensors that are given, or into new ones, as `reading` says.
    """

    writing: str
    write: Callable[[Path, Sequence[ChunkKV]], None]
    reading: str
    read: Callable[[Path, Sequence[ChunkKV]], None]


def raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous CPU tensor; both share them."""
    return tensor.view(torch.uint8).numpy().reshape(-1)


def _write_torch(folder: Path, kvs: Sequence[ChunkKV]) -> None:
    for index, kv in enumerate(kvs):
        torch.save(kv._asdict(), folder / f"{index}.pt")
        sync(folder / f"{index}.pt")


def _read_torch(folder: Path, kvs: Sequence[ChunkKV]) -> None:
    for index in range(len(kvs)):
        torch.load(folder / f"{index}.pt", weights_only=True)


def _write_safetensors(folder: Path, kvs: Sequence[ChunkKV]) -> None:
    for index, kv in enumerate(kvs):
        save_file(kv._asdict(), folder / f"{index}.safetensors")
        sync(folder / f"{index}.safetensors")


def _read_safetensors(folder: Path, kvs: Sequence[ChunkKV]) -> None:
    for index, kv in enumerate(kvs):
        with safe_open(folder / f"{index}.safetensors", framework="pt") as file:
            for name, tensor in kv._asdict().items():
                tensor.copy_(file.get_tensor(name))


def _write_plain(folder: Path, kvs: Sequence[ChunkKV]) -> None:
    with (folder / PLAIN_FILE).open("wb", buffering=0) as file:
        for kv in kvs:
            for tensor in kv:
                file.write(raw(tensor).data)
        os.fsync(file.fileno())


def _read_plain(folder: Path, kvs: Sequence[ChunkKV]) -> None:
    with (folder / PLAIN_FILE).open("rb", buffering=0) as file:
        for kv in kvs:
            for tensor in kv:
                file.readinto(raw(tensor).data)


FORMATS = {
    "torch": FileFormat(
        "torch.save, a file and an fsync for each chunk", _write_torch, "torch.load into new tensors", _read_torch
    ),
    "safetensors": FileFormat(
        "safetensors' save_file, a file and an fsync for each chunk",
        _write_safetensors,
        "safetensors: mapped, copied into the same tensors",
        _read_safetensors,
    ),
    "plain": FileFormat(
        "the same bytes into one plain file, one fsync",
        _write_plain,
        "plain file, readinto the same tensors, one thread",
        _read_plain,
    ),
}
