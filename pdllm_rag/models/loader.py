"""From a model name to a loaded model: the library's modules, weights from safetensors, no remote code, no pickle."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import torch
from pdllm_store import KVDtype, ModelFingerprint
from safetensors import SafetensorError

from pdllm_rag.errors import ModelError, ModelFormatError
from pdllm_rag.models import lora, packed, quantised, weights
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.models.fused import backbone_for
from pdllm_rag.models.hub import BUNDLED, locate
from pdllm_rag.models.layout import Layout
from pdllm_rag.models.precision import fastest_dtype
from pdllm_rag.models.rope import Rope
from pdllm_rag.models.shards import Entry, read_entries, weight_files
from pdllm_rag.models.spec import ModelSpec
from pdllm_rag.models.tokenizer import Tokenizer
from pdllm_rag.models.vocabulary import read_json
from pdllm_rag.teams import passing_team

__all__ = ["BUNDLED", "LoadedModel", "load_model", "locate", "read_spec", "weight_files", "weights_digest"]

logger = logging.getLogger(__name__)

LEAST_VERSIONS = {"torch": (2, 9), "transformers": (5, 0)}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """Weights, tokenizer and identity of one model in one compute dtype on one device.

    Attributes:
        spec: its family, special ids and limits.
        backbone: the layers, which an attention is given to.
        weights_digest: hex BLAKE3 of the weight files.
        adapter_digest: of an adapter that acts on chunk rows, "" without one.
        canvas_backbone: the same weights with an adapter for canvas rows, None without one. What it computes is never
            stored, so the fingerprint does not know it.
    """

    spec: ModelSpec
    tokenizer: Tokenizer
    backbone: Backbone
    weights_digest: str
    adapter_digest: str = ""
    canvas_backbone: Backbone | None = None

    def fingerprint(self, kv_dtype: KVDtype) -> ModelFingerprint:
        """Identity of KV that this model writes into a store of `kv_dtype`."""
        identity = (self.tokenizer, self.backbone.rope, self.weights_digest, self.adapter_digest)
        return _fingerprint(self.spec, *identity, kv_dtype=kv_dtype)


def read_spec(name: str, *, revision: str | None = None) -> tuple[ModelSpec, Tokenizer, dict[str, Any]]:
    """Spec, tokenizer and config of a model, without its weights.

    Raises:
        UnknownModelError, ModelFormatError.
    """
    folder = locate(name, revision=revision, weights=False)
    config = read_json(folder / "config.json")
    tokenizer = Tokenizer(folder)
    return ModelSpec.from_files(name, config, tokenizer), tokenizer, config


def read_fingerprint(name: str, kv_dtype: KVDtype) -> ModelFingerprint:
    """As `load_model(name).fingerprint(kv_dtype)`, but no weight is loaded: the files are only hashed.

    Raises:
        UnknownModelError, ModelFormatError.
    """
    import transformers

    spec, tokenizer, config = read_spec(name)
    module = getattr(transformers, spec.family.module)
    rope = Rope.from_config(module.config_class.from_dict(dict(spec.library_config)), torch.device("cpu"))
    digest = weights_digest(weight_files(locate(name)), config)
    return _fingerprint(spec, tokenizer, rope, digest, "", kv_dtype=kv_dtype)


@passing_team()
def load_model(
    name: str,
    *,
    revision: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    adapter: str | None = None,
    canvas_adapter: str | None = None,
) -> LoadedModel:
    """Load a model for inference.

    Args:
        name: "demo", the folder of a checkpoint, or a hub id.
        revision: branch, tag or commit of a hub id.
        device: a torch device; "auto" is the first GPU where torch sees one, else the CPU.
        dtype: compute dtype; None takes the faster of float32 and bfloat16 by `fastest_dtype`.
        device_map: instead of `device`, as transformers writes it; it must come down to one device.
        adapter: folder or hub id of a LoRA adapter, merged into the weights.
        canvas_adapter: folder or hub id of a LoRA adapter that was trained for canvas rows only (D2F); decoders made
            for one use it, stored KV does not depend on it.

    Raises:
        UnknownModelError, ModelFormatError; ModelError for a package that is missing or too old; ValueError for a
        `device_map` over several devices.
    """
    started = time.perf_counter()
    check_versions()
    target = check_seen(one_device(device, device_map))
    spec, tokenizer, config = read_spec(name, revision=revision)
    folder = locate(name, revision=revision)
    files = weight_files(folder)
    dtype = dtype or fastest_dtype(target)
    try:
        model, layout = load_modules(spec, folder, target, dtype)
        rope = Rope.from_config(model.config, target)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelFormatError(
            f"model {name!r} does not load: {error}; expected safetensors weights that fit config.json. "
            "Fetch the checkpoint again"
        ) from error
    adapter_digest = ""
    if adapter is not None:
        model, adapter_digest = lora.merge(model, layout, locate(adapter))
    model.requires_grad_(False).eval()
    on_canvas = None
    if canvas_adapter is not None:
        beside = lora.beside(model, layout, locate(canvas_adapter)).requires_grad_(False).eval()
        on_canvas = backbone_for(beside, rope, mask_id=spec.mask_id, forbidden_from=spec.n_tokens)
    backbone = backbone_for(model, rope, mask_id=spec.mask_id, forbidden_from=spec.n_tokens)
    digest = weights_digest(files, config)
    logger.info("loaded %s (%s) in %.2f s", name, dtype, time.perf_counter() - started)
    return LoadedModel(spec, tokenizer, backbone, digest, adapter_digest, on_canvas)


def _fingerprint(
    spec: ModelSpec, tokenizer: Tokenizer, rope: Rope, weights_digest: str, adapter_digest: str, *, kv_dtype: KVDtype
) -> ModelFingerprint:
    return ModelFingerprint(
        family=spec.family.name,
        weights_digest=weights_digest,
        adapter_digest=adapter_digest,
        tokenizer_digest=tokenizer.digest,
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        rope=rope.name,
        kv_dtype=kv_dtype,
        bos_id=spec.bos_id,
        prefill_mask=spec.family.prefill_mask,
    )


def check_versions() -> None:
    """Refuse libraries that are too old, when a model is loaded rather than when something is imported.

    Raises:
        ModelError: one is.
    """
    for package, least in LEAST_VERSIONS.items():
        version = importlib.metadata.version(package)
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < least:
            wanted = ".".join(map(str, least))
            raise ModelError(
                f"{package} is {version}, expected {wanted} or newer; run pip install -U '{package}>={wanted}'"
            )


def one_device(device: str, device_map: str | Mapping[str, Any] | None) -> torch.device:
    """The device that `device_map`, or else `device`, names; "auto" is the first GPU where there is one.

    Raises:
        ValueError: it names several, or one that torch does not know.
    """
    places = (
        {str(place) for place in device_map.values()} if isinstance(device_map, Mapping) else {device_map or device}
    )
    if len(places) != 1:
        raise ValueError(
            f"device_map spreads the layers over {', '.join(sorted(places))}; expected one device, since the layer "
            "loop and the stored KV are on one. Take a quantised checkpoint if the weights do not fit"
        )
    place = places.pop()
    if place == "auto":
        place = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(f"cuda:{place}" if place.isdecimal() else place)
    except RuntimeError:
        raise ValueError(f"device {place!r} is unknown; expected auto, cpu or cuda") from None
    if found.type == "cuda":
        return torch.device("cuda", found.index or 0)
    return torch.device("cpu") if found.type == "cpu" else found


def check_seen(device: torch.device) -> torch.device:
    """The device as it is. Raises ValueError if it is neither the CPU nor a GPU that torch sees."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is '{device}'; expected auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device '{device}' was asked for and torch {torch.__version__} sees no GPU; install a CUDA build of "
            "torch, or ask for auto or cpu"
        )
    return device


def load_modules(spec: ModelSpec, folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Layout]:
    """The library's model of a checkpoint, and where the checkpoint's tensors are in it.

    Raises:
        ModelFormatError, SafetensorError, ValueError: the weights do not fit config.json.
    """
    import transformers

    module = getattr(transformers, spec.family.module)
    config = module.config_class.from_dict(dict(spec.library_config))
    layout = Layout(spec.family, config)
    entries = read_entries(folder)
    if "quantization_config" in spec.library_config:
        return quantised.load(spec.name, module, config, layout, folder, device, dtype), layout
    with torch.device("meta"):
        model = module(config)
    tensors = weights.read(entries, device)
    if packed.is_packed(entries):
        plain = packed.unpack(dict(tensors), dtype)
        stored = {name: entries.get(name) or entries[f"{name}{packed.SUFFIX}"] for name in plain}
        entries = {name: Entry(stored[name].file, tuple(plain[name].shape)) for name in plain}
        tensors = iter(plain.items())
    weights.check(spec.name, model, layout, folder, entries)
    weights.fill(model, layout, tensors, device, dtype)
    return model, layout


def weights_digest(files: list[Path], config: dict[str, Any]) -> str:
    """BLAKE3 over the weight files, in name order, and the config keys that change what they compute."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for file in files:
        hasher.update_mmap(file)
    bookkeeping = {"torch_dtype", "dtype", "transformers_version", "use_cache", "architectures", "auto_map"}
    bookkeeping.add("_name_or_path")
    meaning = {key: value for key, value in sorted(config.items()) if key not in bookkeeping}
    hasher.update(json.dumps(meaning, sort_keys=True).encode())
    return hasher.hexdigest()
