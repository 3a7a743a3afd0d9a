"""Imported before all else, so that a system that the store cannot work on is told so."""

import sys

if sys.platform == "win32":
    raise ImportError(
        "pdllm_store locks files as POSIX does (fcntl), and this is Windows; run it under WSL 2, or on Linux or macOS"
    )
