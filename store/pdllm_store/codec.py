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
from typing import Any

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
# From 32768 elements on torch works in its thread pool, which on a busy machine takes a hundred times as long as doing
# the same in the calling thread. numpy has no such pool, but no bfloat16 either.
_SERIAL_ELEMENTS = 2**15 - 64  # whole vector registers
_QUANTISED_AT_ONCE = 2**17  # elements: the two float32 arrays that this takes stay in the L2 cache


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
        ValueError: the tensor is no float tensor, `out` has another length, or int8 is asked for inf or NaN (`out`
            may be half written then).
    """
    expected = block_bytes(tensor.shape, dtype)
    if len(out) != expected:
        raise ValueError(f"the block buffer has {len(out)} bytes, {tuple(tensor.shape)} as {dtype} takes {expected}")
    if not tensor.is_floating_point():
        raise ValueError(f"keys and values must be float tensors, got {tensor.dtype}")
    tensor = tensor.detach().cpu()
    if dtype == "int8":
        _quantise(tensor, out)
        return
    bits, little_endian = _BITS[dtype]
    converted = _converted(tensor, TORCH_DTYPES[dtype]).view(bits).numpy().view(little_endian[1:])
    np.frombuffer(out, little_endian).reshape(tensor.shape)[...] = converted


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
    elif (raw := raw_view(out, dtype)) is not None:
        copy_raw(block, raw)
    elif out.dtype == torch.float32:
        _expand(block, dtype, out.numpy())
    else:
        expanded = np.empty(out.shape, np.float32)
        _expand(block, dtype, expanded)
        _convert(torch.from_numpy(expanded), out)


def copy_raw(block: Buffer, raw: NDArray[Any]) -> None:
    """Copy one block into a `raw_view` of its shape. Raises ValueError if the lengths differ."""
    raw[...] = np.frombuffer(block, raw.dtype.newbyteorder("<")).reshape(raw.shape)


def raw_view(tensor: torch.Tensor, dtype: KVDtype) -> NDArray[Any] | None:
    """A CPU tensor's memory as the integers that its blocks hold, None where a block has to be converted into it."""
    if dtype == "int8" or tensor.dtype != TORCH_DTYPES[dtype] or tensor.device.type != "cpu":
        return None
    bits, little_endian = _BITS[dtype]
    return tensor.detach().view(bits).numpy().view(little_endian[1:])


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


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor as another float dtype; itself if it has that dtype."""
    if tensor.dtype == dtype:
        return tensor
    out = torch.empty(tensor.shape, dtype=dtype, device="cpu")
    _convert(tensor, out)
    return out


def _convert(source: torch.Tensor, out: torch.Tensor) -> None:
    """Do `out.copy_(source)` in the calling thread."""
    if out.numel() <= _SERIAL_ELEMENTS:
        out.copy_(source)
        return
    n_below = out.numel() // len(out)
    if n_below <= _SERIAL_ELEMENTS:
        n_each = _SERIAL_ELEMENTS // n_below
        # All pieces in one call: each call gives up the interpreter lock, and waits for other threads to get it back.
        torch._foreach_copy_(torch.split(out, n_each), torch.split(source, n_each))
    else:
        for source_part, out_part in zip(source, out, strict=True):
            _convert(source_part, out_part)


def _widen(bits: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
    """Write bfloat16 as float32: it is the upper half."""
    np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)


def _expand(block: Buffer, dtype: KVDtype, out: NDArray[np.float32]) -> None:
    """Write a block as float32 [..., D], which holds all three dtypes exactly (int8 but for one rounding)."""
    if dtype == "bfloat16":
        _widen(np.frombuffer(block, "<u2").reshape(out.shape), out)
    elif dtype == "float32":
        out.view(np.uint32)[...] = np.frombuffer(block, "<u4").reshape(out.shape)
    else:
        n_scale_bytes = 4 * math.prod(out.shape[:-1])
        scales = np.frombuffer(block[:n_scale_bytes], "<f4").reshape(*out.shape[:-1], 1)
        np.multiply(np.frombuffer(block[n_scale_bytes:], "i1").reshape(out.shape), scales, out=out)


def _quantise(tensor: torch.Tensor, out: memoryview) -> None:
    """Write the scales [...] and the values [..., D] of a tensor [..., D]."""
    n_vectors = math.prod(tensor.shape[:-1])
    scales = np.frombuffer(out[: 4 * n_vectors], "<f4")
    if tensor.numel() == 0:
        scales[...] = 0
        return
    values = np.frombuffer(out[4 * n_vectors :], "i1").reshape(n_vectors, -1)
    bits = raw_view(tensor, "bfloat16")
    source = (_converted(tensor, torch.float32).numpy() if bits is None else bits).reshape(values.shape)
    n_each = max(1, _QUANTISED_AT_ONCE // values.shape[1])
    wide, scratch = np.empty((2, min(n_each, n_vectors), values.shape[1]), np.float32)
    for first in range(0, n_vectors, n_each):
        piece = slice(first, first + n_each)
        x = source[piece]
        if bits is not None:
            _widen(x, wide[: len(x)])
            x = wide[: len(x)]
        scales[piece] = _scales(x, scratch[: len(x)])
        divisors = np.where(scales[piece] > 0, scales[piece], np.float32(np.inf))
        quotients = np.divide(x, divisors[:, np.newaxis], out=scratch[: len(x)])
        # amax / scale is 127 but for two roundings of the scale, so that nothing is left to clip.
        np.copyto(values[piece], np.rint(quotients, out=quotients), casting="unsafe")


def _scales(x: NDArray[np.float32], scratch: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales [N] of vectors [N, D]; `scratch` is of the same shape, contiguous, and overwritten."""
    # Without their signs floats sort like their bits, and the maxima of integers are found several times faster.
    magnitudes = np.bitwise_and(x.view(np.uint32), 0x7FFFFFFF, out=scratch.view(np.uint32)).reshape(-1)
    amax = np.maximum.reduceat(magnitudes, np.arange(0, x.size, x.shape[1])).view(np.float32)
    if not np.isfinite(amax).all():
        raise ValueError("int8 cannot hold inf or NaN: store these keys and values as bfloat16 or float32")
    exact = amax / np.float32(_INT8_MAX)
    # A subnormal scale has too few bits left to divide by.
    scales: NDArray[np.float32] = np.where(exact < np.finfo(np.float32).tiny, 0, np.minimum(exact, _MAX_SCALE))
    return scales
