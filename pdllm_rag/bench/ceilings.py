"""What a device can do at all, measured in the run that is held against it: copies, matrix products, the disk.

Random data throughout: a matrix product of zeros draws less power and runs faster than any real one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pdllm_rag.bench.device_clock import queued_ms
from pdllm_rag.bench.machine import Spread, take_turns

REPEAT = 10
MAX_S = 2.0  # of one ceiling
GIB, MIB = 2**30, 2**20
TRITON = "triton"


class Ceilings(NamedTuple):
    """Measured limits of a device.

    copy_bytes_per_s: bytes read and written by a large copy within device memory.
    flops_per_s: floating-point operations (2 n^3) of a large matrix product.
    """

    copy_bytes_per_s: float
    flops_per_s: float

    def floor_s(self, n_bytes: float, flops: float) -> float:
        """Seconds that nothing which moves so many bytes and does so many operations can go below."""
        return max(n_bytes / self.copy_bytes_per_s, flops / self.flops_per_s)

    def bound(self, n_bytes: float, flops: float) -> str:
        """Which of the two it is: "memory" or "compute"."""
        return "memory" if n_bytes / self.copy_bytes_per_s >= flops / self.flops_per_s else "compute"


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Both ceilings: a copy of 4 GiB and an 8192^3 product on a GPU, small ones on the CPU."""
    n_bytes, n = (4 * GIB, 8192) if device.type == "cuda" else (16 * MIB, 256)
    source = torch.empty(n_bytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    copies = queued_ms({"copy": lambda: target.copy_(source)}, REPEAT, device=device, max_s=MAX_S)
    products = queued_ms({"product": lambda: torch.mm(a, b, out=out)}, REPEAT, device=device, max_s=MAX_S)
    copy_s, product_s = (Spread.of(ms).median / 1000 for ms in (copies["copy"], products["product"]))
    return Ceilings(2 * source.nbytes / copy_s, 2 * n**3 / product_s)


def host_copies(device: torch.device) -> dict[str, float]:
    """Bytes per second from the device to host memory: pageable, and pinned where there is a GPU."""
    size = GIB if device.type == "cuda" else MIB
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    targets = {"pageable": torch.zeros(size, dtype=torch.uint8)}
    if device.type == "cuda":
        targets["pinned"] = torch.zeros(size, dtype=torch.uint8).pin_memory()
    ms = take_turns(
        {name: lambda target=target: target.copy_(source) for name, target in targets.items()},  # type: ignore[misc]
        5,
        device=device,
    )
    return {name: size / (Spread.of(values).median / 1000) for name, values in ms.items()}


def write_synced(path: Path, data: memoryview) -> None:
    """Write a plain file; it is on the disk (fsync) when this returns."""
    with path.open("wb", buffering=0) as file:
        written = 0
        while written < len(data):
            written += file.write(data[written:])
        os.fsync(file.fileno())


def describe_device(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What `describe` leaves out where no model was loaded from files: the device and what drives it.

    Returns the keys device, dtype, memory_bytes, multiprocessors, l2_bytes, cuda and triton; None where there is none.
    """
    found: dict[str, Any] = {"device": device.type, "dtype": str(dtype).removeprefix("torch."), "triton": _triton()}
    found |= dict.fromkeys(("memory_bytes", "multiprocessors", "l2_bytes"))
    found["cuda"] = torch.version.cuda
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["device"] = about.name
        found["memory_bytes"] = about.total_memory
        found["multiprocessors"] = about.multi_processor_count
        found["l2_bytes"] = getattr(about, "L2_cache_size", None)
    return found


def _triton() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(TRITON)
    except PackageNotFoundError:
        return None
