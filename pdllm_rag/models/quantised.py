"""Checkpoints with quantised weights, which the library loads: their modules are not the plain ones."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pdllm_rag.errors import ModelError, ModelFormatError
from pdllm_rag.models.layout import Layout

_PACKAGES = {"bitsandbytes": ("bitsandbytes", "accelerate"), "torchao": ("torchao", "accelerate")}


def load(
    name: str, module: Any, config: Any, layout: Layout, folder: Path, device: torch.device, dtype: torch.dtype
) -> Any:
    """The library's model of a folder whose config.json has a quantization_config.

    Raises:
        ModelError: a package that the kind of quantisation needs is not installed.
        ModelFormatError: the kind is not supported, or the weights do not fit.
    """
    settings = config.quantization_config
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(settings.get("quant_method"))
    if method not in _PACKAGES or not layout.only_renames or (method == "torchao" and layout.modules):
        raise ModelFormatError(
            f"model {name!r} has weights quantised by {method!r} in {type(config).__name__}; supported are "
            f"{', '.join(_PACKAGES)}, the latter only under the library's own names. Take the plain checkpoint"
        )
    lacking = [package for package in _PACKAGES[method] if importlib.util.find_spec(package) is None]
    if lacking:
        raise ModelError(
            f"model {name!r} has weights quantised by {method}, which needs {' and '.join(lacking)}; install with "
            "pip install 'pdllm-rag[quantised]'"
        )
    from transformers.utils import logging as library_logging

    library_logging.disable_progress_bar()
    with _quiet("transformers"):
        model, found = module.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map={"": device},
            key_mapping={rf"^{re.escape(theirs)}\.": f"{ours}." for theirs, ours in layout.modules.items()},
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    wrong = {kind: sorted(map(str, found[f"{kind}_keys"])) for kind in ("missing", "unexpected", "mismatched")}
    if any(wrong.values()):
        told = ", ".join(f"{len(keys)} {kind} {keys[:2]}" for kind, keys in wrong.items())
        raise ModelFormatError(f"model {name!r}: the weights in {folder} do not fit config.json: {told}")
    return model


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a library's report out of the terminal; what it reports is raised as an error instead."""
    library = logging.getLogger(name)
    before = library.level
    library.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        library.setLevel(before)
