"""Ray: a cluster that is there, or one on this machine that leaves nothing behind."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pdllm_rag.errors import ClusterError

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """The module `ray`, connected while the block runs; one that this process is connected to already is used as it is.

    Args:
        address: of a cluster ("host:port", or "auto" on one of its nodes); None takes RAY_ADDRESS, or else starts a
            cluster of this machine alone, which ends with the block.

    Raises:
        ClusterError: Ray is not installed, or the cluster cannot be reached.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # read by the import; killed workers are no news here
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ClusterError(
            f"this needs the package ray, which is not installed ({error}); run pip install 'pdllm-rag[scale]'"
        ) from error
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what ends a run is raised as well
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS")
    with ExitStack() as stack:
        if address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # Else Ray writes one into the user's home. It is read once in a process, so it stays for the next cluster.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # Below it come Ray's own 65 characters, and the path of a Unix socket has at most 107.
            temp = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
            options: dict[str, Any] = {"address": "local", "_temp_dir": temp, "include_dashboard": False}
        else:
            options = {"address": address}
        stack.callback(ray.shutdown)
        try:
            ray.init(**options, **_QUIET)
        except (OSError, ValueError, RuntimeError) as error:
            place = "no cluster could be started here" if address is None else f"no cluster answers at {address}"
            raise ClusterError(f"{place}: {error}") from error
        yield ray
