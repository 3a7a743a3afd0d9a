"""Which backend runs: what "auto" comes to, and that one asked for by name runs or says why it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from attention_cases import BF16, F16, F32, INTERPRETED_HERE, NEEDS_CUDA, RUNS

from pdllm_rag.attention import BACKENDS, ChunkTable, resolve, split_s_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ONE_RUN = ChunkTable((0,), (4,), (0,))


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where triton is installed, whatever this one is."""
    monkeypatch.setattr("pdllm_rag.attention.triton.find_spec", lambda _: object())


@pytest.fixture
def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where triton is not installed."""
    monkeypatch.setattr("pdllm_rag.attention.triton.find_spec", lambda _: None)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=INTERPRETED_HERE), pytest.param("cuda", marks=list(NEEDS_CUDA))]
)
def test_a_backend_runs_on_the_dtypes_that_it_is_tested_with_and_on_no_other(device: str) -> None:
    assert set(RUNS[device]) == set(BACKENDS)
    for name, dtypes in RUNS[device].items():
        backend = BACKENDS[name]
        runs = {dtype for dtype in (F32, BF16, F16) if backend.why_not(torch.device(device), dtype, 64) is None}
        assert runs == set(dtypes), name
        assert (backend.why_not(torch.device(device), torch.float64, 64) is None) == (name == "reference")


def test_auto_on_cuda_is_triton() -> None:
    for dtype in (F32, BF16, F16):
        assert resolve("auto", CUDA, dtype, 128) == "triton"


@pytest.mark.usefixtures("_without_triton")
def test_auto_on_cuda_without_the_kernels_is_flash_where_it_runs() -> None:
    assert resolve("auto", CUDA, BF16, 128) == "flash"
    assert resolve("auto", CUDA, F32, 128) == "reference"


def test_auto_on_cuda_with_unusual_heads_is_what_takes_them() -> None:
    assert resolve("auto", CUDA, BF16, 80) == "flash"
    assert resolve("auto", CUDA, BF16, 20) == "reference"
    assert resolve("auto", CUDA, torch.float64, 128) == "reference"


def test_auto_on_a_cpu_is_flash_and_never_an_interpreted_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve("auto", CPU, F32, 64) == resolve("auto", CPU, BF16, 7) == "flash"
    assert resolve("auto", CPU, F16, 64) == resolve("auto", CPU, torch.float64, 64) == "reference"


def test_auto_elsewhere_is_the_reference() -> None:
    assert resolve("auto", torch.device("meta"), F32, 64) == "reference"


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_named_backend_is_the_one_that_runs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve(backend, CPU, F32, 64) == backend
    q, calls = torch.randn(1, 2, 64), []
    monkeypatch.setitem(BACKENDS, backend, BACKENDS[backend]._replace(attend=lambda *_, **__: calls.append(backend)))
    split_s_attention(q, q, q, ChunkTable((0,), (1,), (0,)), backend=backend)
    assert calls == [backend]


@pytest.mark.parametrize("backend", ["flash", "flex", "triton"])
def test_a_named_backend_never_falls_back(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k = torch.randn(1, 2, 64, dtype=torch.float64), torch.randn(4, 2, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"'{backend}' cannot run: .*float64.*expected.*ask for 'auto'") as raised:
        split_s_attention(q, k, k, ONE_RUN, backend=backend)
    assert "torch.float32" in str(raised.value)


@pytest.mark.usefixtures("_without_triton")
def test_triton_that_is_not_installed_says_how_to_install_it() -> None:
    q, k = torch.randn(1, 2, 64), torch.randn(4, 2, 64)
    with pytest.raises(ValueError, match=r"'triton' cannot run: .*not installed.*pip install.*ask for 'auto'"):
        split_s_attention(q, k, k, ONE_RUN, backend="triton")


def test_triton_on_a_cpu_says_that_it_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="the device is cpu; triton needs a CUDA device"):
        resolve("triton", CPU, F32, 64)


def test_head_dims_that_a_kernel_does_not_take_are_refused() -> None:
    for backend, head_dim in (("flash", 20), ("flash", 264), ("flex", 8), ("flex", 264), ("triton", 80)):
        with pytest.raises(ValueError, match=rf"'{backend}' cannot run: heads have {head_dim} elements.*expected"):
            resolve(backend, CUDA, BF16, head_dim)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'flash3' is unknown; expected auto, reference, flash, flex, triton"):
        resolve("flash3", CPU, F32, 64)


def test_attention_on_a_cpu_imports_neither_triton_nor_the_compiler() -> None:
    code = (
        "import sys, torch; from pdllm_rag.attention import ChunkTable, split_s_attention; q = torch.randn(2, 2, 64); "
        "split_s_attention(q, q, q, ChunkTable((0,), (2,), (0,))); "
        "print([name for name in ('triton', 'torch._dynamo') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wrong_shapes_and_tables_are_refused() -> None:
    q, k = torch.randn(1, 4, 8), torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match="beyond the buffer"):
        split_s_attention(q, k, k, ChunkTable((2,), (3,), (0,)))
    apart, spread = torch.randn(4, 4, 8)[:, :2], torch.randn(4, 2, 16)[..., ::2]
    for keys, values in ((k, apart), (spread, spread), (k, k.transpose(0, 1).contiguous().transpose(0, 1))):
        with pytest.raises(ValueError, match="expected contiguous rows"):
            split_s_attention(q, keys, values, ONE_RUN)
    with pytest.raises(ValueError, match="no rope"):
        split_s_attention(q, k, k, ChunkTable((0,), (3,), (1,)))
    with pytest.raises(ValueError, match="multiple of G"):
        split_s_attention(torch.randn(1, 3, 8), k, k, ChunkTable((0,), (3,), (0,)))
    with pytest.raises(ValueError, match="1 query rows by the last of"):
        split_s_attention(q, k, k, ChunkTable((0,), (3,), (0,)), mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="keeps 2 of its 3 rows; expected a masked run that is read whole"):
        split_s_attention(q, k, k, ChunkTable((0,), (3,), (0,), ((0, 2),)), mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="as many of each"):
        ChunkTable((0,), (), (0,))


@pytest.mark.parametrize("kept", [((0, 3),), ((2, 1),), ((0, 0),), ((-1,),), ((),), ((0,), (0,))])
def test_kept_rows_that_are_not_ascending_rows_of_their_run_are_refused(kept: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="kept rows"):
        ChunkTable((0,), (3,), (0,), kept)
