"""The weight files of a checkpoint folder: safetensors, sharded or not, checked before a tensor is read.

Headers are read here rather than by the library, so that an error can name the file and the tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from pdllm_rag.errors import ModelFormatError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_AGAIN = "Fetch the checkpoint again"


class Entry(NamedTuple):
    """Where a tensor is, and its shape as stored."""

    file: Path
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The files that the index names, else all safetensors files, by name.

    Raises:
        ModelFormatError: there are none (pickled weights are refused), the index is damaged, or a file is missing.
    """
    if (folder / INDEX).is_file():
        return sorted({folder / name for name in _weight_map(folder).values()})
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    if not files:
        others = sorted(p.name for kind in ("bin", "pt", "pth", "gguf") for p in folder.glob(f"*.{kind}"))
        raise ModelFormatError(
            f"{folder} holds no *.safetensors file"
            + (f" but {', '.join(others)}" if others else "")
            + "; expected safetensors weights (pickled ones can run code and are refused, GGUF is not read). Convert "
            "them with save_pretrained(folder)"
        )
    return files


def read_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of the checkpoint by name, each file's header checked against its size and the index.

    Raises:
        ModelFormatError: as `weight_files`; a file is truncated or damaged; index and files disagree.
    """
    entries: dict[str, Entry] = {}
    for file in weight_files(folder):
        for name, shape in _header(file).items():
            if name in entries:
                raise ModelFormatError(
                    f"tensor {name} is in {entries[name].file.name} and in {file.name} of {folder}; expected it once"
                )
            entries[name] = Entry(file, shape)
    if (folder / INDEX).is_file():
        listed = _weight_map(folder)
        for name in sorted(listed.keys() | entries.keys()):
            held = entries[name].file.name if name in entries else "no file"
            if listed.get(name) != held:
                raise ModelFormatError(
                    f"tensor {name} is in {held} of {folder}, but {INDEX} says {listed.get(name, 'nothing of it')}. "
                    + _AGAIN
                )
    return entries


def unlisted(folder: Path) -> list[str]:
    """Names of safetensors files in the folder that the index does not name."""
    return sorted({path.name for path in folder.glob("*.safetensors")} - {path.name for path in weight_files(folder)})


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        listed = json.loads(path.read_text())["weight_map"]
        shards = sorted(set(listed.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFormatError(f"{path} is no index of weights: {error}; expected a 'weight_map'. {_AGAIN}") from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not (folder / shard).is_file():
            lost = next(name for name, file in listed.items() if file == shard)
            raise ModelFormatError(f"{path} says that tensor {lost} is in {shard!r}, which is no file there. {_AGAIN}")
    return dict(listed)


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of one safetensors file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header would take {length} bytes")
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = {name: int(entry["data_offsets"][1]) + 8 + length for name, entry in tensors.items()}
            shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelFormatError(f"{file} is no safetensors file of {size} bytes: {error}. {_AGAIN}") from error
    beyond = sorted((end, name) for name, end in ends.items() if end > size)
    if beyond:
        end, name = beyond[0]
        raise ModelFormatError(
            f"{file} is truncated: it has {size} bytes, tensor {name} ends at byte {end} and {len(beyond) - 1} more "
            f"tensors lie beyond. {_AGAIN}"
        )
    return shapes
