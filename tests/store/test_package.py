"""What the package shows to others."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pdllm_store

NAMES = [
    "FORMAT",
    "ID_BYTES",
    "KV_DTYPES",
    "RECORD_FORMAT",
    "ChunkDiffersError",
    "ChunkId",
    "ChunkKV",
    "ChunkMeta",
    "ChunkNotFoundError",
    "ChunkRef",
    "ChunkStore",
    "Document",
    "DocumentConflictError",
    "DocumentInfo",
    "DocumentNotFoundError",
    "Fetched",
    "Garbage",
    "KVDtype",
    "LMDBStore",
    "MemoryStore",
    "MergeReport",
    "ModelFingerprint",
    "ModelStats",
    "ObjectChunkStore",
    "PdllmError",
    "Recompute",
    "RecordDamagedError",
    "StoreAccessError",
    "StoreClosedError",
    "StoreConflictError",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreMismatchError",
    "StoreNotFoundError",
    "StoreReadOnlyError",
    "StoreStats",
    "StoreUnavailableError",
    "TieredChunkStore",
    "VerifyReport",
    "export_store",
    "import_store",
    "is_url",
    "merge",
    "open_store",
    "real_location",
]


def test_these_names_are_public() -> None:
    assert pdllm_store.__all__ == NAMES
    assert all(hasattr(pdllm_store, name) for name in NAMES)


def test_importing_it_pulls_in_no_model_library_and_no_pytest(run_child: Callable[..., str]) -> None:
    code = """
        import sys, pdllm_store
        unwanted = {"transformers", "pdllm_rag", "fastapi", "pytest", "langchain_core", "obstore"}
        print(*sorted(sys.modules.keys() & unwanted))
    """
    assert run_child(code).strip() == ""


def test_no_module_reads_pickles() -> None:
    folder = Path(pdllm_store.__file__).parent
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not imported & {"pickle", "shelve", "marshal"}, path
        assert not attributes & {"load_state_dict", "UntypedStorage"}, path


def test_windows_is_told_that_it_cannot_be_used() -> None:
    program = "import sys; sys.platform = 'win32'; import pdllm_store"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: pdllm_store locks files as POSIX does")
