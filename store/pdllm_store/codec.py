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
from collections.abc import Iterator, Sequence
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
_PIECE_ELEMENTS = 2**18
_SERIAL_ELEMENTS = 30720


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
        _quantise(tensor, out)
        return
    bits, little_endian = _BITS[dtype]
    stored = np.frombuffer(out, little_endian)
    if tensor.dtype == TORCH_DTYPES[dtype]:
        stored.reshape(tensor.shape)[...] = tensor.view(bits).numpy().view(little_endian[1:])
        return
    for start, piece in _pieces(tensor, _PIECE_ELEMENTS):
        converted = _converted(piece, TORCH_DTYPES[dtype]).view(bits).numpy().view(little_endian[1:])
        stored[start : start + converted.size] = converted.reshape(-1)


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
    else:
        _expand(block, dtype, out)


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


def _pieces(tensor: torch.Tensor, n_max: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Views [..., D] that make up the tensor in order, each after the number of elements before it.

    A piece has at most `n_max` elements, but at least one vector.
    """
    n_elements = tensor.numel()
    if n_elements <= n_max or tensor.dim() < 2:
        yield 0, tensor
        return
    n_below = n_elements // len(tensor)
    start = 0
    for part in tensor.split(max(n_max // n_below, 1)):
        for offset, piece in _pieces(part[0], n_max) if n_below > n_max else [(0, part)]:
            yield start + offset, piece
        start += part.numel()


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    out = torch.empty(tensor.shape, dtype=dtype, device="cpu")
    _convert(tensor, out)
    return out


def _convert(tensor: torch.Tensor, out: torch.Tensor) -> None:
    torch._foreach_copy_(
        [piece for _, piece in _pieces(out, _SERIAL_ELEMENTS)],
        [piece for _, piece in _pieces(tensor, _SERIAL_ELEMENTS)],
    )


def _expand(block: Buffer, dtype: KVDtype, out: torch.Tensor) -> None:
    """Write a block by way of float32, which holds all three dtypes exactly (int8 but for one rounding)."""
    n_scales = math.prod(out.shape[:-1]) if dtype == "int8" else 0
    view = memoryview(block)
    scales = np.frombuffer(view[: 4 * n_scales], "<f4")
    stored = np.frombuffer(view[4 * n_scales :], "i1" if dtype == "int8" else _BITS[dtype][1])
    for start, piece in _pieces(out, _PIECE_ELEMENTS):
        part = stored[start : start + piece.numel()].reshape(piece.shape)
        expanded = piece.numpy() if piece.dtype == torch.float32 else np.empty(piece.shape, np.float32)
        if dtype == "bfloat16":  # the upper half of a float32
            np.left_shift(part, 16, out=expanded.view(np.uint32), dtype=np.uint32)
        elif dtype == "float32":
            expanded.view(np.uint32)[...] = part
        elif piece.numel():
            first = start // piece.shape[-1]
            lead = piece.shape[:-1]
            np.multiply(part, scales[first : first + math.prod(lead)].reshape(*lead, 1), out=expanded)
        if piece.dtype != torch.float32:
            _convert(torch.from_numpy(expanded), piece)


def _quantise(tensor: torch.Tensor, out: memoryview) -> None:
    """Write the scales [...] and the values [..., D] of a tensor [..., D]."""
    n_scales = math.prod(tensor.shape[:-1])
    scales = np.frombuffer(out[: 4 * n_scales], "<f4")
    values = np.frombuffer(out[4 * n_scales :], "i1")
    if tensor.numel() == 0:
        scales[...] = 0
        return
    head_dim = tensor.shape[-1]
    for start, piece in _pieces(tensor, _PIECE_ELEMENTS):
        x = _converted(piece, torch.float32).numpy().reshape(-1, head_dim)
        # Without their signs, floats are in the order of their bits, inf and NaN last.
        scratch = np.bitwise_and(x.view(np.uint32), 0x7FFFFFFF)
        amax = np.maximum.reduceat(scratch.reshape(-1), np.arange(0, x.size, head_dim)).view(np.float32)
        if not np.isfinite(amax).all():
            raise ValueError("int8 cannot hold inf or NaN: store these keys and values as bfloat16 or float32")
        exact = amax / np.float32(_INT8_MAX)
        # A subnormal scale has too few bits left to divide by.
        kept = np.where(exact < np.finfo(np.float32).tiny, np.float32(0), np.minimum(exact, _MAX_SCALE))
        divisors = np.where(kept > 0, kept, np.float32(np.inf))
        # No quotient rounds to more than 127: amax / scale is 127 but for the rounding of the scale.
        rounded = np.divide(x, divisors[:, np.newaxis], out=scratch.view(np.float32))
        np.rint(rounded, out=rounded)
        first = start // head_dim
        scales[first : first + len(kept)] = kept
        np.copyto(values[start : start + x.size].reshape(x.shape), rounded, casting="unsafe")
