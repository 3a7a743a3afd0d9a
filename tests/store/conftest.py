"""Fixtures of the store's tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pdllm_store import ObjectChunkStore


@pytest.fixture
def run_child() -> Callable[..., str]:
    """Runs Python code in a fresh process with arguments and environment variables; gives its standard output."""

    def run(code: str, *arguments: str, status: int = 0, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    return run


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A place for a far store."""
    return (tmp_path / "far").as_uri()


@pytest.fixture
def store(url: str) -> Iterator[ObjectChunkStore]:
    """A far store; modules about other stores have a fixture of this name of their own."""
    with ObjectChunkStore.open(url) as opened:
        yield opened


@pytest.fixture
def other(store: ObjectChunkStore) -> Iterator[ObjectChunkStore]:
    """Another machine's handle on the same store."""
    with ObjectChunkStore.open(store.path) as opened:
        yield opened
