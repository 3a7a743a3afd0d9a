"""On a GPU everything is what it is on the CPU (`pytest -m gpu`; skipped where there is none)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import KINDS, write_checkpoint
from pdllm_store import MemoryStore

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine, load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TEXT = "\n\n".join(f"Paragraph {i} says that codeword p{i} opens door number {i * 7}." for i in range(8))
OPTIONS = AskOptions(threshold=0.05, score_window=float("inf"), abstain=False, k=3)


def answers(model: LoadedModel, device_model: LoadedModel) -> list[list[str]]:
    """Answers of both models, each over KV of its own."""
    found = []
    for one in (model, device_model):
        engine = RagEngine.open(MemoryStore(kv_dtype="float32"), one, chunk_len=72, options=OPTIONS)
        report = engine.prefill([InputDocument("d", TEXT, "d")])
        assert not report.failed
        found.append([engine.answer(f"Which codeword opens door {7 * n}?").text for n in range(3)])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_answers_alike_on_both_devices(tmp_path: Path, kind: str) -> None:
    folder = str(write_checkpoint(tmp_path / kind, kind))
    on_cpu, on_gpu = (load_model(folder, device=device, dtype=torch.float32) for device in ("cpu", "cuda"))
    cpu, gpu = answers(on_cpu, on_gpu)
    assert cpu == gpu


@pytest.mark.parametrize("kind", KINDS)
def test_chunk_kv_is_the_same_on_both_devices(tmp_path: Path, kind: str) -> None:
    folder = str(write_checkpoint(tmp_path / kind, kind))
    stores = []
    for device in ("cpu", "cuda"):
        store = MemoryStore(kv_dtype="float32")
        model = load_model(folder, device=device, dtype=torch.float32)
        RagEngine.open(store, model, chunk_len=72).prefill([InputDocument("d", TEXT, "d")])
        stores.append((store, model.fingerprint("float32")))
    (cpu, fingerprint), (gpu, same) = stores
    assert fingerprint == same
    for ref in cpu.refs(fingerprint):
        for a, b in zip(cpu.load(ref.chunk_id), gpu.load(ref.chunk_id), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_bundled_model_answers_alike_on_both_devices() -> None:
    on_cpu, on_gpu = (load_model("demo", device=device, dtype=torch.float32) for device in ("cpu", "cuda"))
    cpu, gpu = answers(on_cpu, on_gpu)
    assert cpu == gpu
