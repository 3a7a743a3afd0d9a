"""Fixtures of the store's tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest


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
