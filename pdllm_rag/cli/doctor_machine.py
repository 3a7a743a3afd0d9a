"""What `pdllm doctor` says of the machine: versions, device, threads, backends, configuration and disk."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from pdllm_rag.cli.console import byte_size
from pdllm_rag.cli.doctor import OK, WARNING, WRONG, Finding

if TYPE_CHECKING:
    from pdllm_rag.cli.configuration import Configuration
    from pdllm_rag.models.loader import LoadedModel

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "lmdb", "numpy")
OPTIONAL = ("pdllm-rag", "triton", "obstore", "ray", "peft", "bitsandbytes", "torchao")
OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
LEAST_FREE = 10**9  # bytes


def versions() -> Iterator[Finding]:
    """Of Python and of every package that matters."""
    yield Finding(OK, "python", f"{platform.python_version()} on {platform.platform()}")
    for name in (*NEEDED, *OPTIONAL):
        try:
            yield Finding(OK, name, version(name))
        except PackageNotFoundError:
            if name in NEEDED:
                yield Finding(WRONG, name, "not installed", f"pip install {name}")
            else:
                source = "run from its source" if name == "pdllm-rag" else "not installed; it is not needed by all"
                yield Finding(OK, name, source)
    from pdllm_rag.models.loader import check_versions

    check_versions()


def device(asked: str) -> Iterator[Finding]:
    """Where a model computes, in what dtype, and with how many threads."""
    import torch

    from pdllm_rag.bench.machine import describe
    from pdllm_rag.models.loader import check_seen, one_device
    from pdllm_rag.models.precision import fastest_dtype

    chosen = check_seen(one_device(asked, None))
    on_gpu = chosen.type == "cuda"
    named = f"{chosen} ({torch.cuda.get_device_name(chosen)})" if on_gpu else str(chosen)
    reason = f"{asked} was asked for"
    if asked == "auto":
        reason = "auto takes the first GPU" if on_gpu else "auto, and torch sees no GPU"
    if os.path.exists("/dev/nvidia0") and not torch.cuda.is_available():
        advice = "install a CUDA build of torch, or look at the driver with nvidia-smi"
        yield Finding(WARNING, "device", f"{named}: there is a GPU, and torch {torch.__version__} sees none", advice)
    else:
        yield Finding(OK, "device", f"{named}: {reason}")
    dtype = fastest_dtype(chosen)
    half = dtype == torch.bfloat16
    units = "in hardware (AVX512-BF16 or AMX)"
    why = "on every GPU" if on_gpu else f"this CPU {'multiplies' if half else 'does not multiply'} bfloat16 {units}"
    yield Finding(OK, "dtype", f"{str(dtype).removeprefix('torch.')}: {why}")
    machine = describe()
    settings = ", ".join(f"{name}={os.environ[name]}" for name in OPENMP if name in os.environ)
    threads = f"{machine.threads} on {machine.cores} cores{f' ({settings})' if settings else ''}"
    if machine.threads > machine.cores:
        yield Finding(WARNING, "threads", threads, f"set OMP_NUM_THREADS={machine.cores}: threads that wait cost much")
    else:
        yield Finding(OK, "threads", threads)


def attention(model: LoadedModel) -> Iterator[Finding]:
    """Which attention backend and layer loop this model runs with, and why no other."""
    from pdllm_rag.attention import BACKENDS, resolve
    from pdllm_rag.models.fused import why_not_fused

    backbone = model.backbone
    on_gpu = backbone.device.type == "cuda"
    shape = (backbone.device, backbone.dtype, backbone.head_dim)
    taken = resolve("auto", *shape)
    reasons = {name: backend.why_not(*shape) for name, backend in BACKENDS.items() if name != taken}
    others = "; ".join(f"{name}: {reason or 'runs here, when asked for by name'}" for name, reason in reasons.items())
    slow = on_gpu and taken != "triton"
    advice = "pip install 'pdllm-rag[gpu]', unless the reason for triton is another" if slow else ""
    yield Finding(WARNING if slow else OK, "attention", f"{taken} ({others})", advice)
    if on_gpu:
        reason = why_not_fused(backbone.model)
        found = "fused" if reason is None else f"plain, which is slower: {reason}"
        yield Finding(OK if reason is None else WARNING, "layer loop", found)


def configured(configuration: Configuration) -> Iterator[Finding]:
    """The file that counts, and every value that it and the environment give."""
    from pdllm_rag.cli.serve import settings_variables

    yield Finding(OK, "configuration", configuration.file or "no file")
    for entry in configuration.entries:
        yield Finding(OK, "configuration", f"{entry.origin} = {entry.value!r}")
    for name, nearest in configuration.strangers:
        if name not in settings_variables():
            advice = f"did you mean {nearest}?" if nearest else "docs/configuration.md says how they are named"
            yield Finding(WARNING, "configuration", f"the variable {name} names no option", advice)


def disk(store: str | None) -> Iterator[Finding]:
    """What is free where the store is, or would be made."""
    from pdllm_store import is_url

    folder = os.path.abspath(store) if store is not None and not is_url(store) else os.getcwd()
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    found = f"{byte_size(free)} free at {folder}"
    if free < LEAST_FREE:
        yield Finding(WARNING, "disk", found, "free some, or cap the store with: pdllm store limit SIZE")
    else:
        yield Finding(OK, "disk", found)
