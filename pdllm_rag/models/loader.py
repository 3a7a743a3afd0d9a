"""From a model name to a loaded model: weights by the library's own classes, never by remote code or pickle."""

from __future__ import annotations

import importlib
import json
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import torch
from pdllm_store import KVDtype, ModelFingerprint
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from pdllm_rag.errors import ModelFormatError, UnknownModelError
from pdllm_rag.models import packed
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.models.precision import fastest_dtype
from pdllm_rag.models.rope import Rope
from pdllm_rag.models.spec import ModelSpec
from pdllm_rag.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BUNDLED = {"demo": Path(__file__).parent / "demo"}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """Weights, tokenizer and identity of one model in one compute dtype on one device."""

    spec: ModelSpec
    tokenizer: Tokenizer
    backbone: Backbone
    weights_digest: str

    def fingerprint(self, kv_dtype: KVDtype) -> ModelFingerprint:
        """Identity of KV that this model writes into a store of `kv_dtype`."""
        spec = self.spec
        return ModelFingerprint(
            family=spec.family.name,
            weights_digest=self.weights_digest,
            adapter_digest="",
            tokenizer_digest=self.tokenizer.digest,
            n_layers=spec.n_layers,
            n_kv_heads=spec.n_kv_heads,
            head_dim=spec.head_dim,
            rope=self.backbone.rope.name,
            kv_dtype=kv_dtype,
            bos_id=spec.bos_id,
            prefill_mask=spec.family.prefill_mask,
        )


def locate(name: str) -> Path:
    """Folder of a bundled model's name or of a local checkpoint.

    Raises:
        UnknownModelError: neither.
    """
    if name in BUNDLED:
        return BUNDLED[name]
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise UnknownModelError(
            f"model {name!r} is neither a bundled model ({', '.join(sorted(BUNDLED))}) nor a folder with config.json; "
            "pass --model demo or a checkpoint's folder"
        )
    return folder


def read_spec(name: str) -> tuple[ModelSpec, Tokenizer, dict[str, Any]]:
    """Spec, tokenizer and config of a model, without its weights."""
    folder = locate(name)
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ModelFormatError(f"{folder / 'config.json'} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelFormatError(f"{folder / 'config.json'} holds a {type(config).__name__}, expected a JSON object")
    tokenizer = Tokenizer(folder)
    return ModelSpec.from_files(name, config, tokenizer), tokenizer, config


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files.

    Raises:
        ModelFormatError: there are none (pickled weights are refused).
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
        raise ModelFormatError(
            f"{folder} holds no *.safetensors file"
            + (f" but {', '.join(pickled)}" if pickled else "")
            + "; expected safetensors weights (pickled ones can run code and are refused). Convert them with "
            "save_pretrained(folder, safe_serialization=True)"
        )
    return files


def load_model(name: str, *, device: str = "cpu", dtype: torch.dtype | None = None) -> LoadedModel:
    """Load a model for inference.

    Args:
        name: "demo" or the folder of a checkpoint.
        device: a torch device.
        dtype: compute dtype; None takes the faster of float32 and bfloat16 by `fastest_dtype`.

    Raises:
        UnknownModelError, ModelFormatError.
    """
    started = time.perf_counter()
    spec, tokenizer, config = read_spec(name)
    folder = locate(name)
    files = weight_files(folder)
    target = torch.device(device)
    dtype = dtype or fastest_dtype(target)
    try:
        model = _load_modules(spec, folder, files, config, target, dtype)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelFormatError(
            f"model {name!r} does not load: {error}; expected safetensors weights that fit config.json. "
            "Fetch the checkpoint again"
        ) from error
    model.requires_grad_(False).eval()
    try:
        rope = Rope.from_config(model.config, target)
    except (ValueError, KeyError) as error:
        raise ModelFormatError(f"model {name!r}: {error}") from error
    backbone = Backbone(model, rope, mask_id=spec.mask_id, forbidden_from=spec.n_tokens)
    digest = weights_digest(files, config)
    logger.info("loaded %s (%s) in %.2f s", name, dtype, time.perf_counter() - started)
    return LoadedModel(spec, tokenizer, backbone, digest)


def _load_modules(
    spec: ModelSpec, folder: Path, files: list[Path], config: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> Any:
    family = spec.family
    modeling = importlib.import_module(f"transformers.models.{family.model_type}")
    module = getattr(modeling, family.module)
    if not packed.is_packed(dict.fromkeys(_tensor_names(files))):
        from transformers.utils import logging as library_logging

        library_logging.disable_progress_bar()
        with _quiet("transformers"):
            model, found = module.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
        _check_complete(spec, found["missing_keys"], found["unexpected_keys"], found["mismatched_keys"])
        return model.to(device)
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    plain = packed.unpack(tensors, dtype)
    model_config = module.config_class.from_dict(config)
    with torch.device("meta"):
        model = module(model_config)
    missing, unexpected = model.load_state_dict(plain, strict=False, assign=True)
    if model_config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
        missing = set(missing) - {"lm_head.weight"}
    _check_complete(spec, missing, unexpected)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model_config)
    return model.to(device)


def _check_complete(
    spec: ModelSpec, missing: Iterable[str], unexpected: Iterable[str], misfits: Iterable[Any] = ()
) -> None:
    """Refuse a checkpoint that would leave weights random or unused."""
    lacking, extra, wrong = sorted(missing), sorted(unexpected), sorted(map(str, misfits))
    if lacking or extra or wrong:
        raise ModelFormatError(
            f"model {spec.name!r}: weights do not fit config.json; {len(lacking)} missing {lacking[:2]}, "
            f"{len(extra)} unexpected {extra[:2]}, {len(wrong)} of another shape {wrong[:2]}. "
            "The checkpoint is incomplete or of another family"
        )


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


def _tensor_names(files: list[Path]) -> Iterator[str]:
    for file in files:
        with safe_open(file, framework="pt") as handle:
            yield from handle.keys()


def weights_digest(files: list[Path], config: dict[str, Any]) -> str:
    """BLAKE3 over the weight files, in name order, and the config keys that change what they compute."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for file in files:
        hasher.update_mmap(file)
    bookkeeping = {"torch_dtype", "dtype", "transformers_version", "use_cache", "architectures", "_name_or_path"}
    meaning = {key: value for key, value in sorted(config.items()) if key not in bookkeeping}
    hasher.update(json.dumps(meaning, sort_keys=True).encode())
    return hasher.hexdigest()
