"""Tensors survive being stored: bit for bit as floats, within a bound as int8."""

from __future__ import annotations

import math
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pdllm_store import KV_DTYPES, KVDtype, codec
from pdllm_store.codec import block_bytes, decode, decode_into, encode, encode_into
from pdllm_store.testing import bits

SHAPES = st.tuples(*(st.integers(0, 4) for _ in range(3)), st.integers(1, 9))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Bits of float32: zeros, subnormals, the smallest normal and the largest numbers, what lies on, just below and just
# above the middle of two bfloat16, what rounds to infinity, and anything.
ODD_BITS = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F818001, 0x8000, 0x7F7F8000]
PATTERNS = st.sampled_from(ODD_BITS + [bits | 1 << 31 for bits in ODD_BITS]) | st.integers(0, 2**32 - 1)
# Around as many elements as are converted at once, and as are quantised at once, along each axis.
N_SERIAL = codec._SERIAL_ELEMENTS
LARGE = [
    *[(1, n) for n in (N_SERIAL - 1, N_SERIAL, N_SERIAL + 1)],
    *[(n, 1, 1) for n in (N_SERIAL, N_SERIAL + 1)],
    *[(2, 3, n, 8) for n in (N_SERIAL // 24 + 1, N_SERIAL // 8, N_SERIAL // 8 + 1)],
    *[(codec._QUANTISED_AT_ONCE // 128 + n, 128) for n in (-1, 0, 1)],
    (2, codec._QUANTISED_AT_ONCE + 1),
]


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_every_float32_bit_pattern_survives(patterns: list[int]) -> None:
    tensor = torch.tensor(patterns, dtype=torch.int32).view(torch.float32).reshape(1, -1)
    assert torch.equal(bits(decode(encode(tensor, "float32"), "float32", tensor.shape)), bits(tensor))


def test_every_bfloat16_bit_pattern_survives() -> None:
    tensor = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).reshape(16, 16, 8, 32)
    assert torch.equal(bits(decode(encode(tensor, "bfloat16"), "bfloat16", tensor.shape)), bits(tensor))


@given(SHAPES, st.sampled_from(KV_DTYPES), st.permutations(range(4)), st.booleans())
def test_shapes_and_strides_do_not_matter(
    shape: tuple[int, ...], dtype: KVDtype, order: list[int], flipped: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    base = torch.randn([shape[axis] for axis in order], generator=generator)
    tensor = base.permute([order.index(axis) for axis in range(4)])
    if flipped:
        tensor = tensor.repeat_interleave(2, dim=1)[:, ::2]
    block = encode(tensor, dtype)
    assert len(block) == block_bytes(shape, dtype)
    assert block == encode(tensor.contiguous(), dtype)
    out = torch.full([*shape[:3], 2 * shape[3]], 7.0)
    decode_into(block, dtype, out[..., ::2])
    exact = torch.empty(shape)
    decode_into(block, dtype, exact)
    assert torch.equal(out[..., ::2], exact)
    assert bool((out[..., 1::2] == 7).all())


@given(st.lists(st.lists(FINITE, min_size=4, max_size=4), min_size=1, max_size=8))
@example([[0.0, 1.0, -2.0, 3.4028234663852886e38]])  # 127 times its rounded scale would be infinite
def test_int8_stays_within_its_bound(rows: list[list[float]]) -> None:
    tensor = torch.tensor(rows, dtype=torch.float32)
    out = torch.empty_like(tensor)
    decode_into(encode(tensor, "int8"), "int8", out)
    amax = tensor.double().abs().amax(-1, keepdim=True)
    bound = torch.where(amax < 1.5e-36, amax, amax / 254 * (1 + 2e-5))  # one rounding of the scale: 127 * 2**-24
    assert bool(((out.double() - tensor.double()).abs() <= bound).all())


@given(st.lists(FINITE, min_size=1, max_size=16))
def test_int8_is_symmetric(row: list[float]) -> None:
    tensor = torch.tensor(row, dtype=torch.float32)
    positive, negative = (torch.empty_like(tensor) for _ in range(2))
    decode_into(encode(tensor, "int8"), "int8", positive)
    decode_into(encode(-tensor, "int8"), "int8", negative)
    assert torch.equal(positive, -negative)


def test_int8_keeps_zero_vectors_zero_and_scales_each_vector_alone() -> None:
    tensor = torch.tensor([[0.0, -0.0], [1e-42, 0.0], [127.0, -127.0], [1e30, 5e29]])
    out = torch.empty_like(tensor)
    decode_into(encode(tensor, "int8"), "int8", out)
    assert out[:3].tolist() == [[0, 0], [0, 0], [127, -127]]
    assert ((out[3] - tensor[3]).abs() / 1e30).tolist() == pytest.approx([0, 1 / 254], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_int8_refuses_what_has_no_scale(bad: float) -> None:
    with pytest.raises(ValueError, match="inf or NaN"):
        encode(torch.tensor([[1.0, bad]]), "int8")


def test_blocks_are_little_endian_with_scales_first() -> None:
    tensor = torch.tensor([[1.0, -0.5], [254.0, 127.0]])
    assert encode(tensor, "float32") == struct.pack("<4f", 1.0, -0.5, 254.0, 127.0)
    assert encode(tensor, "bfloat16") == bytes.fromhex("803f00bf7e43fe42")
    assert encode(tensor, "int8") == struct.pack("<2f4b", 1 / 127, 2.0, 127, -64, 127, 64)


def test_other_float_dtypes_are_rounded_once() -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stored = decode(encode(tensor, "bfloat16"), "bfloat16", tensor.shape)
    assert torch.equal(stored, tensor.to(torch.bfloat16))


def test_wrong_sizes_and_integer_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="float tensors"):
        encode(torch.zeros(2, 2, dtype=torch.int64), "float32")
    with pytest.raises(ValueError, match="float tensors"):
        decode_into(bytes(16), "float32", torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="15 bytes"):
        decode(bytes(15), "float32", (2, 2))
    with pytest.raises(ValueError, match="17 bytes"):
        encode_into(torch.zeros(2, 2), "float32", memoryview(bytearray(17)))


def test_tensors_that_require_grad_can_be_stored_and_filled() -> None:
    tensor = torch.ones(2, 2, requires_grad=True)
    out = torch.zeros(2, 2, requires_grad=True)
    decode_into(encode(tensor, "float32"), "float32", out)
    assert torch.equal(out, tensor)


def tiled(patterns: list[int], shape: tuple[int, ...]) -> torch.Tensor:
    """A float32 tensor in which a list of bit patterns comes again and again."""
    return torch.from_numpy(np.resize(np.array(patterns, np.uint32), shape).view(np.float32))


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Equal to the tensor, but a slice of a larger one in its next to last axis."""
    if tensor.dim() < 2:
        return tensor
    *lead, n_rows, n_columns = tensor.shape
    out = torch.full([*lead, n_rows + 3, n_columns], 7.0, dtype=tensor.dtype)[..., 1 : n_rows + 1, :]
    return out.copy_(tensor)


def reference_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """The nearer of the two bfloat16 around each number, in the middle the even one; 2**128 stands for infinity."""
    magnitude = np.abs(x).astype(np.float64)
    below = (x.view(np.uint32) & 0x7FFFFFFF) >> 16
    lower, upper = ((bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for bits in (below, below + 1))
    upper_or_limit = np.where(np.isinf(upper), 2.0**128, upper)
    to_upper = np.where(
        below % 2, magnitude - lower >= upper_or_limit - magnitude, magnitude - lower > upper_or_limit - magnitude
    )
    return np.copysign(np.where(to_upper, upper, lower), x)


def reference_int8(x: NDArray[np.float32]) -> tuple[list[np.float32], list[list[int]]]:
    """Scale and values of each vector of [N, D], as the module says."""
    largest = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
    scales, values = [], []
    for row in x:
        amax = np.float32(max((abs(value) for value in row.tolist()), default=0))
        scale = min(amax / np.float32(127), largest)
        scale = scale if scale >= 2.0**-126 else np.float32(0)
        scales.append(scale)
        values.append([round(quotient) for quotient in (row / scale).tolist()] if scale else [0] * len(row))
    return scales, values


def assert_same_floats(got: torch.Tensor, expected: NDArray[Any]) -> None:
    """Equal as float64, -0.0 told from 0.0; any NaN equals any other."""
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got.double().numpy(), expected)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got.double().numpy())[finite], np.signbit(expected)[finite])


def check_floats(tensor: torch.Tensor) -> None:
    """float32 to bfloat16 and bfloat16 to float32, stored as either, against the reference."""
    rounded = reference_bfloat16(tensor.numpy().copy())
    shape = tuple(tensor.shape)
    assert_same_floats(decode(encode(strided(tensor), "bfloat16"), "bfloat16", shape), rounded)
    out = strided(torch.empty(shape, dtype=torch.bfloat16))
    decode_into(encode(tensor, "float32"), "float32", out)
    assert_same_floats(out, rounded)
    stored = encode(out, "float32")
    assert_same_floats(decode(stored, "float32", shape), rounded)
    wide = strided(torch.empty(shape))
    decode_into(encode(out, "bfloat16"), "bfloat16", wide)
    assert_same_floats(wide, rounded)


def check_int8(tensor: torch.Tensor) -> None:
    """The stored bytes, and what they decode to, of a finite float32 or bfloat16 tensor against the reference."""
    shape = tuple(tensor.shape)
    scales, values = reference_int8(tensor.float().numpy().reshape(math.prod(shape[:-1]), shape[-1]))
    block = encode(strided(tensor), "int8")
    assert block[: 4 * len(scales)] == struct.pack(f"<{len(scales)}f", *scales)
    assert block[4 * len(scales) :] == struct.pack(f"<{tensor.numel()}b", *(value for row in values for value in row))
    factors = np.array(scales, np.float32)[:, np.newaxis]
    expected = (np.array(values, np.float32).reshape(len(scales), shape[-1]) * factors).reshape(shape)
    out = strided(torch.empty(shape))
    decode_into(block, "int8", out)
    assert_same_floats(out, expected)
    assert_same_floats(decode(block, "int8", shape), reference_bfloat16(expected))


@given(SHAPES, st.lists(PATTERNS, min_size=1, max_size=32), st.integers(1, 20))
def test_floats_convert_like_the_reference_whatever_the_size_of_a_piece(
    shape: tuple[int, ...], patterns: list[int], n_serial: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_SERIAL_ELEMENTS", n_serial)
        check_floats(tiled([bits for bits in patterns if bits & 0x7FFFFFFF <= 0x7F800000] or [0], shape))


@given(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 9)),
    st.lists(PATTERNS, min_size=1, max_size=32),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 20),
)
def test_int8_is_what_the_reference_says_whatever_the_size_of_a_piece(
    shape: tuple[int, ...], patterns: list[int], dtype: torch.dtype, n_at_once: int
) -> None:
    tensor = tiled(patterns, shape).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_SERIAL_ELEMENTS", n_at_once)
        patch.setattr(codec, "_QUANTISED_AT_ONCE", n_at_once)
        if tensor.isfinite().all():
            check_int8(tensor)
        else:
            with pytest.raises(ValueError, match="inf or NaN"):
                encode(strided(tensor), "int8")


@pytest.mark.parametrize("shape", LARGE)
def test_large_tensors_convert_like_the_reference(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=generator)
    check_floats(tensor)
    check_int8(tensor)
    check_int8(tensor.to(torch.bfloat16))


def test_nan_and_infinity_survive_a_change_of_float_dtype() -> None:
    tensor = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf]).repeat(10_000, 1)
    for stored in ("float32", "bfloat16"):
        for given_as in (torch.float32, torch.bfloat16):
            for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
                out = torch.empty_like(tensor, dtype=out_dtype)
                decode_into(encode(tensor.to(given_as), stored), stored, out)
                assert_same_floats(out, tensor.double().numpy())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_finds_what_has_no_scale_anywhere(bad: float, dtype: torch.dtype) -> None:
    n_at_once = codec._QUANTISED_AT_ONCE
    for index in (0, n_at_once - 1, n_at_once, 2 * n_at_once + 127):
        tensor = torch.zeros(2 * n_at_once // 128 + 1, 128, dtype=dtype)
        tensor.view(-1)[index] = bad
        with pytest.raises(ValueError, match="inf or NaN"):
            encode(tensor, "int8")


def test_threads_may_convert_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 40, 3, 128, generator=generator) for _ in range(4)]
    expected = [encode(tensor, "int8") for tensor in tensors]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda tensor: encode(tensor, "int8"), tensors * 8)) == expected * 8
