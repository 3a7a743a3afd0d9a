"""Where models come from: the hub, adapters, quantised weights."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import read_tensors, save_shards, write_checkpoint
from safetensors.torch import save_file

from pdllm_rag.attends import DenseAttend
from pdllm_rag.errors import ModelError, ModelFormatError, UnknownModelError
from pdllm_rag.models import LoadedModel, load_model
from pdllm_rag.models.loader import locate, read_spec

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hidden_of(model: LoadedModel, n: int = 20) -> torch.Tensor:
    ids = torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(0))
    return model.backbone.hidden(ids, DenseAttend(model.backbone.rope, [n], torch.arange(n)))


# -- the hub -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline hub cache that holds own/tiny at one commit, as huggingface_hub lays it out."""
    from huggingface_hub import constants

    repo = tmp_path / "hub" / "models--own--tiny"
    write_checkpoint(repo / "snapshots" / COMMIT, "llada")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repo


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_hub_id_loads_from_the_offline_cache(cache: Path, revision: str | None) -> None:
    model = load_model("own/tiny", revision=revision, dtype=torch.float32)
    assert model.spec.name == "own/tiny"
    assert locate("own/tiny", revision=revision) == cache / "snapshots" / COMMIT
    local = load_model(str(cache / "snapshots" / COMMIT), dtype=torch.float32)
    assert model.fingerprint("bfloat16") == local.fingerprint("bfloat16")


@pytest.mark.usefixtures("cache")
def test_what_the_hub_does_not_give_is_one_sentence() -> None:
    for name, revision in (("own/other", None), ("own/tiny", "v2")):
        with pytest.raises(UnknownModelError, match="HF_HUB_OFFLINE") as caught:
            load_model(name, revision=revision)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_only_data_is_fetched_and_weights_only_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fnmatch import fnmatch

    folder = write_checkpoint(tmp_path, "llada")
    asked: list[tuple[str, Any, list[str]]] = []

    def snapshot_download(name: str, *, revision: Any, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    read_spec("own/tiny", revision="v1")
    load_model("own/tiny", revision="v1")
    assert {(name, revision) for name, revision, _ in asked} == {("own/tiny", "v1")}

    def takes(patterns: list[str], file: str) -> bool:
        return any(fnmatch(file, pattern) for pattern in patterns)

    for file in ("config.json", "model.safetensors.index.json", "tokenizer.json", "merges.txt", "chat_template.jinja",
                 "LICENSE"):  # fmt: skip
        assert all(takes(patterns, file) for *_, patterns in asked)
    for file in ("modeling_llada.py", "pytorch_model.bin", "model.pt", "model.gguf", "training_args.bin"):
        assert not any(takes(patterns, file) for *_, patterns in asked)
    assert [takes(patterns, "model-00001-of-00006.safetensors") for *_, patterns in asked] == [False, False, True]


@pytest.mark.parametrize("name", ["no-such-model", "./own/tiny", "/own/tiny", "own/tiny/more", "../tiny"])
def test_a_name_that_is_no_hub_id_is_never_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(UnknownModelError, match="neither a bundled model"):
        load_model(name)


def test_a_folder_without_a_config_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "tiny").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(UnknownModelError, match=r"config\.json"):
        load_model("own/tiny")


# -- adapters ------------------------------------------------------------------------------------------------------


def write_adapter(folder: Path, modules: dict[str, tuple[int, int]], **changes: Any) -> dict[str, torch.Tensor]:
    """Write a rank-2 LoRA of modules (their out and in sizes); returns what it adds to each weight."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 6, "lora_dropout": 0.1,
                "target_modules": sorted({name.rsplit(".", 1)[1] for name in modules}), "bias": "none"}  # fmt: skip
    tensors, added = {}, {}
    for name, (n_out, n_in) in modules.items():
        a, b = torch.randn(2, n_in, generator=generator), torch.randn(n_out, 2, generator=generator)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        added[f"{name}.weight"] = 3.0 * b @ a
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return added


ADAPTED = {
    "llada": {
        "model.transformer.blocks.0.q_proj": (32, 32),
        "model.transformer.blocks.1.ff_out": (32, 48),
        "model.transformer.blocks.1.attn_out": (32, 32),
    },
    "dream": {"model.layers.0.self_attn.q_proj": (32, 32), "model.layers.1.mlp.gate_proj": (48, 32)},
}


@pytest.mark.parametrize("kind", list(ADAPTED))
def test_an_adapter_is_merged_into_the_weights_under_the_checkpoints_names(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("peft")
    folder = write_checkpoint(tmp_path / "base", kind)
    added = write_adapter(tmp_path / "lora", ADAPTED[kind])
    plain = load_model(str(folder), dtype=torch.float32)
    adapted = load_model(str(folder), dtype=torch.float32, adapter=str(tmp_path / "lora"))
    by_hand = write_checkpoint(tmp_path / "merged", kind)
    save_shards(by_hand, {k: v + added.get(k, 0) for k, v in read_tensors(folder).items()}, 2)
    expected = hidden_of(load_model(str(by_hand), dtype=torch.float32))
    torch.testing.assert_close(hidden_of(adapted), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(hidden_of(plain), expected, atol=1e-2)
    one, other = plain.fingerprint("bfloat16"), adapted.fingerprint("bfloat16")
    assert (one.adapter_digest, one.weights_digest) == ("", other.weights_digest)
    assert len(other.adapter_digest) == 64
    assert one.digest != other.digest
    write_adapter(tmp_path / "lora", ADAPTED[kind], lora_alpha=8)
    again = load_model(str(folder), dtype=torch.float32, adapter=str(tmp_path / "lora"))
    assert again.adapter_digest != adapted.adapter_digest


def test_the_bundled_adapter_goes_with_the_bundled_model(demo_model: LoadedModel) -> None:
    pytest.importorskip("peft")
    beside = load_model("demo", canvas_adapter="demo-d2f")
    assert beside.canvas_backbone is not None
    assert beside.fingerprint("bfloat16") == demo_model.fingerprint("bfloat16")
    one, other = hidden_of(beside).float(), hidden_of(replace(beside, backbone=beside.canvas_backbone)).float()
    assert 0.01 < float((one - other).norm() / one.norm()) < 1


@pytest.mark.parametrize("kind", list(ADAPTED))
def test_an_adapter_for_canvas_rows_leaves_the_model_as_it_is(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("peft")
    folder = write_checkpoint(tmp_path / "base", kind)
    write_adapter(tmp_path / "lora", ADAPTED[kind])
    plain = load_model(str(folder), dtype=torch.float32)
    merged = load_model(str(folder), dtype=torch.float32, adapter=str(tmp_path / "lora"))
    beside = load_model(str(folder), dtype=torch.float32, canvas_adapter=str(tmp_path / "lora"))
    assert beside.canvas_backbone is not None
    on_canvas = replace(beside, backbone=beside.canvas_backbone)
    torch.testing.assert_close(hidden_of(beside), hidden_of(plain), rtol=0, atol=0)
    torch.testing.assert_close(hidden_of(on_canvas), hidden_of(merged), rtol=0, atol=1e-4)  # summed in another order
    assert beside.fingerprint("bfloat16") == plain.fingerprint("bfloat16")
    own, shared = (
        {tensor.data_ptr() for tensor in one.model.parameters()} for one in (beside.canvas_backbone, beside.backbone)
    )
    assert shared <= own  # no weight is held twice


@pytest.mark.parametrize(
    ("kind", "modules", "changes", "told"),
    [
        ("llada", {"model.layers.9.self_attn.q_proj": (32, 32)}, {}, "model.layers.9.self_attn.q_proj"),
        ("llada", {"model.transformer.blocks.0.q_proj": (32, 31)}, {}, "does not fit"),
        ("llada", ADAPTED["llada"], {"peft_type": "LOHA"}, "LOHA"),
        ("llada", ADAPTED["llada"], {"alpha_pattern": {"q_proj": 1}}, "alpha_pattern"),
        ("llada2", {"model.layers.0.attention.dense": (32, 64)}, {}, "family"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, kind: str, modules: dict[str, tuple[int, int]], changes: dict[str, Any], told: str
) -> None:
    pytest.importorskip("peft")
    write_adapter(tmp_path / "lora", modules, **changes)
    with pytest.raises(ModelFormatError, match=told):
        load_model(str(write_checkpoint(tmp_path / "base", kind)), adapter=str(tmp_path / "lora"))


def test_a_pickled_adapter_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    write_adapter(tmp_path / "lora", ADAPTED["llada"])
    (tmp_path / "lora" / "adapter_model.safetensors").rename(tmp_path / "lora" / "adapter_model.bin")
    with pytest.raises(ModelFormatError, match=r"adapter_model\.bin.*refused"):
        load_model(str(write_checkpoint(tmp_path / "base", "llada")), adapter=str(tmp_path / "lora"))


# -- optional packages ---------------------------------------------------------------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))


def test_an_adapter_without_peft_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "peft")
    write_adapter(tmp_path / "lora", ADAPTED["llada"])
    with pytest.raises(ModelError, match=r"pdllm-rag\[lora\]"):
        load_model(str(write_checkpoint(tmp_path / "base", "llada")), adapter=str(tmp_path / "lora"))


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao"])
def test_quantised_weights_without_their_package_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    without(monkeypatch, method)
    folder = write_checkpoint(tmp_path, "dream", quantization_config={"quant_method": method, "load_in_4bit": True})
    with pytest.raises(ModelError, match=rf"{method}.*pdllm-rag\[quantised\]"):
        load_model(str(folder))


@pytest.mark.parametrize(("kind", "method"), [("dream", "awq"), ("llada2", "bitsandbytes"), ("llada", "torchao")])
def test_a_kind_of_quantisation_that_is_not_supported_is_named(tmp_path: Path, kind: str, method: str) -> None:
    folder = write_checkpoint(tmp_path, kind, quantization_config={"quant_method": method})
    with pytest.raises(ModelFormatError, match=method):
        load_model(str(folder))


@pytest.mark.filterwarnings("ignore")  # the packages' own
@pytest.mark.parametrize("kind", ["dream", "llada"])
def test_four_bit_weights_load_under_the_checkpoints_names(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    from safetensors import safe_open
    from transformers import BitsAndBytesConfig

    wide = {"d_model": 64, "mlp_hidden_size": 128} if kind == "llada" else {"hidden_size": 64, "intermediate_size": 128}
    folder = write_checkpoint(tmp_path / "plain", kind, **wide)
    plain = load_model(str(folder), dtype=torch.float32).backbone.model
    plain.save_pretrained(tmp_path / "library")
    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=["lm_head"]
    )
    quantised = type(plain).from_pretrained(tmp_path / "library", quantization_config=four, device_map={"": "cpu"})
    quantised.save_pretrained(tmp_path / "quantised")
    settings = json.loads((tmp_path / "quantised" / "config.json").read_text())["quantization_config"]
    write_checkpoint(tmp_path / "quantised", kind, **wide, quantization_config=settings)
    for path in (tmp_path / "quantised").glob("model-*"):
        path.unlink()
    (tmp_path / "quantised" / "model.safetensors.index.json").unlink()
    names = {} if kind == "dream" else {
        "model.embed_tokens.": "model.transformer.wte.", "model.norm.": "model.transformer.ln_f.",
        "lm_head.": "model.transformer.ff_out.", "model.layers.": "model.transformer.blocks.",
        ".input_layernorm.": ".attn_norm.", ".self_attn.o_proj.": ".attn_out.", ".self_attn.": ".",
        ".post_attention_layernorm.": ".ff_norm.", ".mlp.gate_proj.": ".ff_proj.", ".mlp.up_proj.": ".up_proj.",
        ".mlp.down_proj.": ".ff_out.",
    }  # fmt: skip
    tensors = {}
    with safe_open(tmp_path / "quantised" / "model.safetensors", framework="pt") as handle:
        for name in list(handle.keys()):
            renamed = name
            for ours, theirs in names.items():
                renamed = renamed.replace(ours, theirs)
            tensors[renamed] = handle.get_tensor(name)
    save_file(tensors, tmp_path / "quantised" / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(tmp_path / "quantised"), dtype=torch.float32)
    assert type(model.backbone.model.model.layers[0].mlp.down_proj).__name__ == "Linear4bit"
    ours = hidden_of(model)
    ids = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
        theirs = model.backbone.model.model(ids[None], attention_mask=mask).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    exact = hidden_of(load_model(str(folder), dtype=torch.float32))
    assert torch.corrcoef(torch.stack([ours.flatten(), exact.flatten()]))[0, 1] > 0.7
