"""Weights from safetensors files into the library's modules, whose completeness is checked before any is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pdllm_rag.errors import ModelFormatError
from pdllm_rag.models import shards
from pdllm_rag.models.layout import Layout
from pdllm_rag.models.shards import Entry

_IGNORED = "rotary_emb.inv_freq"  # old checkpoints keep this buffer; it is computed


def check(name: str, model: Any, layout: Layout, folder: Path, entries: dict[str, Entry]) -> None:
    """Refuse weights that would leave a parameter random or be left over.

    Raises:
        ModelFormatError: a tensor is missing, unknown or of another shape; the message names it and its file.
    """
    expected: dict[str, torch.Tensor] = model.state_dict()
    filled: Counter[str] = Counter()
    for tensor, entry in entries.items():
        if tensor.endswith(_IGNORED):
            continue
        where = f"model {name!r}: tensor {tensor} in {entry.file.name} has shape {entry.shape}"
        try:
            pieces = list(layout.pieces(tensor, torch.empty(entry.shape, device="meta")))
        except (RuntimeError, ValueError) as error:
            raise ModelFormatError(f"{where}, which config.json does not fit: {error}") from error
        for target, part, piece in pieces:
            if target not in expected:
                raise ModelFormatError(f"{where} and no place in a model of config.json ({type(model).__name__})")
            room = expected[target] if part is None else expected[target][part]
            if room.shape != piece.shape:
                raise ModelFormatError(f"{where}; config.json gives {tuple(room.shape)} for {target}")
            filled[target] += piece.numel()
    lacking = [target for target, room in expected.items() if filled[target] < room.numel()]
    if model.config.tie_word_embeddings and "lm_head.weight" in lacking:
        lacking.remove("lm_head.weight")
    if lacking:
        files = ", ".join(sorted({entry.file.name for entry in entries.values()}))
        others = shards.unlisted(folder)
        raise ModelFormatError(
            f"model {name!r}: {len(lacking)} tensors are missing from {files}, the first is "
            f"{layout.theirs(lacking[0])}"
            + (f"; {', '.join(others)} is in the folder but not in {shards.INDEX}" if others else "")
            + ". The checkpoint is incomplete or of another family"
        )


def read(entries: dict[str, Entry], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, file by file, on `device`."""
    for file in dict.fromkeys(entry.file for entry in entries.values()):
        with safe_open(file, framework="pt", device=str(device)) as handle:
            for name, entry in entries.items():
                if entry.file == file and not name.endswith(_IGNORED):
                    yield name, handle.get_tensor(name)


def fill(
    model: Any,
    layout: Layout,
    tensors: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Put checked tensors into a model that lies on the meta device."""
    expected: dict[str, torch.Tensor] = model.state_dict()
    exact = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        for target, part, piece in layout.pieces(name, tensor):
            kind = torch.float32 if target.endswith(exact) else dtype
            if part is None:
                state[target] = piece.to(device, kind)
            else:
                if target not in state:
                    state[target] = torch.empty(expected[target].shape, dtype=kind, device=device)
                state[target][part] = piece
    model.load_state_dict(state, strict=False, assign=True)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    model.to(device)
