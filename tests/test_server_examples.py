"""The examples of the server run, and say what they are for."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdllm_store import MemoryStore
from serving import KEY, Site, served

from pdllm_rag import LoadedModel, RagEngine
from pdllm_rag.cli.main import build_parser
from pdllm_rag.server import ServerSettings

FOLDER = Path(__file__).parent.parent / "examples" / "qa_server"


@pytest.fixture(scope="module")
def site(tiny_model: LoadedModel) -> Iterator[Site]:
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=128)
    with engine, served(engine, api_key=KEY) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text(f"{KEY}\n")
    return tmp_path / "key"


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_walk_with_curl(site: Site, key_file: Path) -> None:
    environment = {**os.environ, "URL": site.url, "KEY_FILE": str(key_file)}
    done = subprocess.run(["bash", FOLDER / "curl.sh"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert '{"status":"ok"}' in done.stdout
    assert done.stdout.count('"state":"done"') == 2
    assert "event: answer" in done.stdout
    assert '{"doc_id":"note","deleted":true}' in done.stdout
    assert "pdllm_requests_total" in done.stdout


def test_the_conversation_with_openais_client(site: Site, key_file: Path) -> None:
    site.add(("leave", "From 2025 on there are 28 days of paid annual leave."))
    command = [sys.executable, FOLDER / "chat.py", "--url", site.url, "--key-file", key_file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sources, " in done.stdout


def test_the_unit_and_the_container_name_options_that_there_are() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FOLDER / "pdllm.service")
    program, *words = unit["Service"]["ExecStart"].split()
    assert program.endswith("/pdllm")
    build_parser().parse_args(words)
    container = (FOLDER / "Containerfile").read_text()
    build_parser().parse_args(["serve", "--store", "/kb/store"])
    named = {
        word.partition("=")[0] for word in (container + unit["Service"]["Environment"]).split() if "PDLLM_" in word
    }
    settings = {f"PDLLM_{name.upper()}" for name in ServerSettings.model_fields}
    assert named
    assert named <= settings
