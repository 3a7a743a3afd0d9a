"""Tensors to bytes and back, in the three stored dtypes.

- All numbers are little-endian, whatever the machine.
- `float32` and `bfloat16` are bit-exact for inputs of that dtype: inf, -0.0, subnormals and NaN payloads survive.
- `int8` is symmetric per vector (last axis): float32 scale = amax / 127, value = round(x / scale). The error of an
  element is at most amax / 254 (plus float32 rounding); a zero vector has scale 0 and comes back as zeros, and so
  does one whose scale would be subnormal (amax < 1.5e-36). inf and NaN have no scale and are refused.
- A block of `int8` holds all scales first, then all values, so that both are aligned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pdllm_store.types import KVDtype

Buffer = bytes | bytearray | memoryview

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.bfloat16,  # what decoded int8 is handed out as
}
# Floats travel as integers of their width: numpy knows no bfloat16, and integer copies keep every NaN payload.
_BITS: dict[KVDtype, tuple[torch.dtype, str]] = {
    "bfloat16": (torch.int16, "<u2"),
    "float32": (torch.int32, "<u4"),
}
_INT8_MAX = 127
_MAX_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(_INT8_MAX), np.float32(0))  # times 127: finite


def block_bytes(shape: Sequence[int], dtype: KVDtype) -> int:
    """Bytes that a tensor of this shape takes when stored."""
    n_elements = math.prod(shape)
    if dtype == "int8":
        return n_elements + 4 * math.prod(shape[:-1])
    return n_elements * (2 if dtype == "bfloat16" else 4)


def encode_into(tensor: torch.Tensor, dtype: KVDtype, out: memoryview) -> None:
    """Write a tensor (any float dtype, stride and device) as one block.

    Args:
        tensor: [..., D].
        out: writable, exactly `block_bytes(tensor.shape, dtype)` long.

    Raises:
        ValueError: the tensor is no float tensor, `out` has another length, or int8 is asked for inf or NaN.
    """
    expected = block_bytes(tensor.shape, dtype)
    if len(out) != expected:
        raise ValueError(f"the block buffer has {len(out)} bytes, {tuple(tensor.shape)} as {dtype} takes {expected}")
    if not tensor.is_floating_point():
        raise ValueError(f"keys and values must be float tensors, got {tensor.dtype}")
    tensor = tensor.detach().cpu()
    if dtype == "int8":
        scales, values = _quantise(tensor.to(torch.float32).numpy())
        np.frombuffer(out[: scales.nbytes], "<f4").reshape(scales.shape)[...] = scales
        np.frombuffer(out[scales.nbytes :], "i1").reshape(values.shape)[...] = values
        return
    bits, little_endian = _BITS[dtype]
    stored = np.frombuffer(out, little_endian).reshape(tensor.shape)
    stored[...] = tensor.to(TORCH_DTYPES[dtype]).view(bits).numpy().view(little_endian[1:])


def decode_into(block: Buffer, dtype: KVDtype, out: torch.Tensor) -> None:
    """Copy one block into a tensor of the same shape, of any float dtype, stride and device.

    Nothing of `block` is referred to afterwards. int8 is multiplied out in float32 and rounded to `out.dtype` once.

    Raises:
        ValueError: the block has another length than the shape takes, or `out` is no float tensor.
    """
    expected = block_bytes(out.shape, dtype)
    if len(block) != expected:
        raise ValueError(f"the block has {len(block)} bytes, {tuple(out.shape)} as {dtype} takes {expected}")
    if not out.is_floating_point():
        raise ValueError(f"keys and values can only be decoded into float tensors, got {out.dtype}")
    out = out.detach()
    if out.device.type != "cpu":
        on_host = torch.empty(out.shape, dtype=out.dtype)
        decode_into(block, dtype, on_host)
        out.copy_(on_host)
    elif dtype != "int8" and out.dtype == TORCH_DTYPES[dtype]:
        bits, little_endian = _BITS[dtype]
        out.view(bits).numpy().view(little_endian[1:])[...] = np.frombuffer(block, little_endian).reshape(out.shape)
    elif out.dtype == torch.float32:
        _expand(block, dtype, out.numpy())
    else:
        expanded = np.empty(out.shape, np.float32)
        _expand(block, dtype, expanded)
        out.copy_(torch.from_numpy(expanded))


def encode(tensor: torch.Tensor, dtype: KVDtype) -> bytes:
    """One block as bytes (see `encode_into`)."""
    out = bytearray(block_bytes(tensor.shape, dtype))
    encode_into(tensor, dtype, memoryview(out))
    return bytes(out)


def decode(block: Buffer, dtype: KVDtype, shape: Sequence[int]) -> torch.Tensor:
    """One block as a new CPU tensor: float32 or bfloat16 (int8 comes back as bfloat16)."""
    out = torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype])
    decode_into(block, dtype, out)
    return out


# Both use numpy: on a busy machine torch's thread pool makes these short, memory-bound steps ten times slower.
def _expand(block: Buffer, dtype: KVDtype, out: NDArray[np.float32]) -> None:
    """Write a block as float32 [..., D], which holds all three dtypes exactly (int8 but for one rounding)."""
    if dtype == "bfloat16":  # the upper half of a float32
        np.left_shift(np.frombuffer(block, "<u2").reshape(out.shape), 16, out=out.view(np.uint32), dtype=np.uint32)
    elif dtype == "float32":
        out.view(np.uint32)[...] = np.frombuffer(block, "<u4").reshape(out.shape)
    else:
        n_scale_bytes = 4 * math.prod(out.shape[:-1])
        scales = np.frombuffer(block[:n_scale_bytes], "<f4").reshape(*out.shape[:-1], 1)
        np.multiply(np.frombuffer(block[n_scale_bytes:], "i1").reshape(out.shape), scales, out=out)


def _quantise(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Scales [...] and values [..., D] of a tensor [..., D]."""
    if x.size == 0:
        return np.zeros(x.shape[:-1], np.float32), np.zeros(x.shape, np.int8)
    scales = np.abs(x).max(axis=-1) / np.float32(_INT8_MAX)
    if not np.isfinite(scales).all():
        raise ValueError("int8 cannot hold inf or NaN: store these keys and values as bfloat16 or float32")
    # A subnormal scale has too few bits left to divide by.
    scales = np.where(scales < np.finfo(np.float32).tiny, np.float32(0), np.minimum(scales, _MAX_SCALE))
    divisors = np.where(scales > 0, scales, np.float32(np.inf))
    values = np.rint(x / divisors[..., np.newaxis])
    return scales, np.clip(values, -_INT8_MAX, _INT8_MAX).astype(np.int8)
