from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
if not torch.cuda.is_available():  # Triton's kernels are interpreted; read when triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["PDLLM_CONFIG"] = ""  # a test is not to go by the configuration of whoever runs it

from command_line import Outcome, Pdllm, write_texts
from far import ENVIRONMENT, Moto, moto_server
from tiny import save_tiny_model

from pdllm_rag.cli import main
from pdllm_rag.models import LoadedModel, load_model

# The same examples in every CI run: a red run is the change's doing. Elsewhere hypothesis goes on exploring.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and waiting threads lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _event_loop() -> Iterator[None]:
    """Synchronous methods of other libraries take the thread's event loop; one that they make they never close."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random three-layer checkpoint folder."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_model_path: Path) -> LoadedModel:
    """The same, loaded in float32."""
    return load_model(str(tiny_model_path), dtype=torch.float32)


@pytest.fixture(scope="session")
def demo_model() -> LoadedModel:
    """The bundled model, loaded once."""
    return load_model("demo")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray on this machine, one thread a worker; when it ends, nothing of it is left."""
    pytest.importorskip("ray")
    from pdllm_rag.distributed.cluster import connected

    in_home = set(Path.home().glob(".ray"))
    with tempfile.TemporaryDirectory(prefix="t") as temp, pytest.MonkeyPatch.context() as patch:  # a short path
        patch.setenv("OMP_NUM_THREADS", "1")
        with ExitStack() as stack:
            with pytest.MonkeyPatch.context() as patch_start:
                patch_start.setattr(tempfile, "tempdir", temp)
                stack.enter_context(connected())
            yield
        assert list(Path(temp).iterdir()) == []
        assert set(Path.home().glob(".ray")) == in_home


@pytest.fixture
def pdllm(capsys: pytest.CaptureFixture[str]) -> Pdllm:
    """Runs a command line in this process."""

    def run(*argv: object) -> Outcome:
        capsys.readouterr()
        status = main([str(word) for word in argv])
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two small documents."""
    return write_texts(tmp_path / "docs")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> Path:
    """A store with both documents, for tests that only read it."""
    top = tmp_path_factory.mktemp("filled")
    write_texts(top / "docs")
    assert main(["prefill", str(top / "docs"), "--store", str(top / "kb"), "--model", str(tiny_model_path)]) == 0
    return top / "kb"


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    """A server of S3."""
    with moto_server() as server:
        yield server


@pytest.fixture
def s3(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> Moto:
    """A server of S3 that the environment leads to."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{moto.port}"}.items():
        monkeypatch.setenv(name, value)
    return moto
