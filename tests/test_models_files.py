"""A wrong checkpoint is refused before anything is computed, with the file and the tensor in the message."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import read_tensors, save_shards, write_checkpoint, write_tokenizer
from safetensors.torch import load_file, save_file

from pdllm_rag.errors import ModelError, ModelFormatError
from pdllm_rag.models import load_model
from pdllm_rag.models.loader import check_versions, one_device

Q_PROJ = "model.transformer.blocks.1.q_proj.weight"
FIRST, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def edit_shard(folder: Path, tensor: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = shard_of(folder, tensor)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = read_tensors(folder)
    change(tensors)
    save_shards(folder, tensors, 2)


def drop_tensor(folder: Path) -> list[str]:
    rewrite(folder, lambda tensors: tensors.pop(Q_PROJ))
    return [Q_PROJ, FIRST, "missing"]


def misshape(folder: Path) -> list[str]:
    rewrite(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 31)}))
    return [Q_PROJ, "(32, 31)", "(32, 32)", shard_of(folder, Q_PROJ).name]


def add_tensor(folder: Path) -> list[str]:
    rewrite(folder, lambda tensors: tensors.update({"model.transformer.blocks.0.att_proj.weight": torch.zeros(96, 32)}))
    return ["att_proj", "safetensors"]


def truncate(folder: Path) -> list[str]:
    path = shard_of(folder, Q_PROJ)
    path.write_bytes(path.read_bytes()[:-100])
    return [path.name, "truncated", "tensor model.transformer."]


def cut_header(folder: Path) -> list[str]:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:50])
    return [FIRST, "50 bytes"]


def lying_header(folder: Path) -> list[str]:
    (folder / FIRST).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    return [FIRST, str(1 << 60)]


def no_header(folder: Path) -> list[str]:
    (folder / FIRST).write_bytes(struct.pack("<Q", 4) + b"[1] " + bytes(8))
    return [FIRST]


def lose_shard(folder: Path) -> list[str]:
    (folder / FIRST).unlink()
    return [FIRST, "tensor model.transformer."]


def unlist_shard(folder: Path) -> list[str]:
    name = shard_of(folder, Q_PROJ).name
    edit_index(folder, lambda listed: [listed.pop(t) for t, file in list(listed.items()) if file == name])
    return [name, INDEX, "model.transformer.", "missing"]


def unlist_tensor(folder: Path) -> list[str]:
    name = shard_of(folder, Q_PROJ).name
    edit_index(folder, lambda listed: listed.pop(Q_PROJ))
    return [Q_PROJ, name, INDEX]


def misplace_tensor(folder: Path) -> list[str]:
    edit_shard(folder, Q_PROJ, lambda tensors: tensors.pop(Q_PROJ))
    return [Q_PROJ, "no file", INDEX]


def wander(folder: Path) -> list[str]:
    edit_index(folder, lambda listed: listed.update({Q_PROJ: f"../{folder.name}/{FIRST}"}))
    return [Q_PROJ, "../"]


def break_index(folder: Path) -> list[str]:
    (folder / INDEX).write_text('{"weight_map": [1]}')
    return [INDEX, "weight_map"]


def repeat_tensor(folder: Path) -> list[str]:
    (folder / INDEX).unlink()
    save_file({Q_PROJ: torch.zeros(32, 32)}, folder / "model-copy.safetensors")
    return [Q_PROJ, "model-copy.safetensors", "once"]


def pickled(folder: Path) -> list[str]:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    return ["pytorch_model.bin", "refused"]


def gguf(folder: Path) -> list[str]:
    pickled(folder)
    (folder / "pytorch_model.bin").rename(folder / "model-Q4_0.gguf")
    return ["model-Q4_0.gguf", "GGUF is not read"]


def larger_tokenizer(folder: Path) -> list[str]:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "added_tokens.json").write_text(json.dumps({f"<extra_{n}>": 265 + n for n in range(20)}))
    assert settings
    return ["285 tokens", "280 rows", "tokenizer"]


def smaller_tokenizer(folder: Path) -> list[str]:
    write_checkpoint(folder, "llada", embedding_size=2000, vocab_size=2000)
    return ["265 tokens", "2000 rows", "tokenizer"]


def another_tokenizer(folder: Path) -> list[str]:
    write_tokenizer(folder, "sdar")
    return ["<|mdm_mask|>", "tokenizer", "264"]


def shifted_tokenizer(folder: Path) -> list[str]:
    write_tokenizer(folder, "llada2")  # other texts at the same ids
    return ["<|mdm_mask|>", "<|mask|>", "264"]


def other_ids(folder: Path) -> list[str]:
    path = folder / "tokenizer_config.json"
    token = {"content": "<|mdm_mask|>", "special": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens_decoder": {"263": token}}))
    return ["<|mdm_mask|>", "264", "263"]


BREAKS = [
    drop_tensor, misshape, add_tensor, truncate, cut_header, lying_header, no_header, lose_shard, unlist_shard,
    unlist_tensor, misplace_tensor, wander, break_index, repeat_tensor, pickled, gguf, larger_tokenizer,
    smaller_tokenizer, another_tokenizer, shifted_tokenizer, other_ids,
]  # fmt: skip


@pytest.mark.parametrize("spoil", BREAKS, ids=lambda spoil: spoil.__name__)
def test_a_wrong_checkpoint_is_refused_by_name(tmp_path: Path, spoil: Callable[[Path], list[str]]) -> None:
    told = spoil(write_checkpoint(tmp_path, "llada"))
    with pytest.raises(ModelFormatError) as caught:
        load_model(str(tmp_path), dtype=torch.float32)
    assert [word for word in told if word not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.7.up_proj", "model.layers.2.attention.query_key_value"])
def test_a_missing_or_misshaped_part_of_a_stacked_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, "llada2")
    rewrite(tmp_path, lambda tensors: tensors.update({f"{name}.weight": torch.zeros(23, 32)}))
    with pytest.raises(ModelFormatError, match=name):
        load_model(str(tmp_path))
    rewrite(tmp_path, lambda tensors: tensors.pop(f"{name}.weight"))
    with pytest.raises(ModelFormatError, match=r"missing.*model\.layers\.[12]"):
        load_model(str(tmp_path))


def test_the_tables_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "dream")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load_model(str(tmp_path))


@pytest.mark.parametrize(("package", "version"), [("torch", "2.8.1+cu128"), ("transformers", "4.57.0")])
def test_old_libraries_are_told_when_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str
) -> None:
    import importlib.metadata

    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else real(name))
    with pytest.raises(ModelError, match=rf"{package} is {version.replace('+', '.')}, expected .* or newer"):
        load_model("demo")
    monkeypatch.undo()
    check_versions()


def test_one_device_is_taken_and_several_are_refused() -> None:
    assert str(one_device("cpu", None)) == "cpu"
    assert str(one_device("cpu", {"": "cuda:1"})) == "cuda:1"
    assert str(one_device("cpu", {"model": 0, "lm_head": 0})) == "cuda:0"
    assert one_device("cpu", "auto").type in ("cpu", "cuda")
    with pytest.raises(ValueError, match="cpu, cuda:0"):
        one_device("cpu", {"model.layers.0": "cuda:0", "lm_head": "cpu"})
    with pytest.raises(ValueError, match="device_map"):
        load_model("demo", device_map={})
