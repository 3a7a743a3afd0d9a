"""Tensors survive being stored: bit for bit as floats, within a bound as int8."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pdllm_store import KV_DTYPES, KVDtype
from pdllm_store.codec import block_bytes, decode, decode_into, encode, encode_into
from pdllm_store.testing import bits

SHAPES = st.tuples(*(st.integers(0, 4) for _ in range(3)), st.integers(1, 9))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


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
