"""`pdllm doctor` finds what is in order and what is not, with a tiny random model."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Outcome, Pdllm, one_object, write_texts
from pdllm_store import ChunkKV, LMDBStore
from tiny import save_tiny_model

from pdllm_rag.cli import doctor, doctor_machine, doctor_store
from pdllm_rag.models import LoadedModel

LEVELS = {doctor.OK, doctor.WARNING, doctor.WRONG}


@pytest.fixture
def kb(filled: Path, tmp_path: Path) -> Path:
    """A copy that may be broken."""
    shutil.copytree(filled, tmp_path / "kb")
    return tmp_path / "kb"


def findings(outcome: Outcome, about: str) -> list[dict[str, Any]]:
    return [finding for finding in one_object(outcome)["findings"] if finding["about"] == about]


def levels(outcome: Outcome) -> dict[str, str]:
    """The worst level of each thing."""
    order = (doctor.OK, doctor.WARNING, doctor.WRONG)
    found = one_object(outcome)["findings"]
    return {f["about"]: max((g["level"] for g in found if g["about"] == f["about"]), key=order.index) for f in found}


def wrong(outcome: Outcome) -> list[str]:
    return [about for about, level in levels(outcome).items() if level == doctor.WRONG]


def test_a_sound_store_and_model_are_told_as_such_and_nothing_is_changed(
    pdllm: Pdllm, kb: Path, tiny_model_path: Path
) -> None:
    before = (kb / "data.mdb").read_bytes()
    outcome = pdllm("doctor", "--store", kb, "--model", tiny_model_path, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    report = one_object(outcome)
    assert report["ok"] is True
    for finding in report["findings"]:
        assert set(finding) == {"level", "about", "found", "advice"}
        assert finding["level"] in LEVELS
        assert finding["advice"] or finding["level"] == doctor.OK
    expected = {"python", "torch", "device", "dtype", "threads", "configuration", "disk", "model", "attention"}
    assert expected | {"store", "fingerprint", "records", "stored KV", "answer"} <= levels(outcome).keys()
    assert findings(outcome, "torch")[0]["found"] == version("torch")
    assert "format 2, bfloat16, 2 documents" in findings(outcome, "store")[0]["found"]
    assert "'buoys/gannet.txt'" in findings(outcome, "stored KV")[0]["found"]
    assert (kb / "data.mdb").read_bytes() == before
    shown = pdllm("doctor", "--store", kb, "--model", tiny_model_path)
    assert shown.status == 0
    assert len(shown.out.splitlines()) == len(report["findings"])


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_each_stored_dtype_is_held_against_its_own_rounding(
    kv_dtype: str, pdllm: Pdllm, tmp_path: Path, tiny_model_path: Path
) -> None:
    argv = ("--store", tmp_path / "kb", "--model", tiny_model_path)
    assert pdllm("prefill", write_texts(tmp_path / "docs"), *argv, "--kv-dtype", kv_dtype).status == 0
    outcome = pdllm("doctor", *argv, "--json")
    assert wrong(outcome) == []
    found = findings(outcome, "stored KV")[0]["found"]
    rounding = float(found.partition(f"rounding to {kv_dtype} alone makes about ")[2].partition(",")[0])
    assert rounding <= 0.02
    assert (rounding > 1e-4) == (kv_dtype == "int8")  # float32 is as it was computed


def test_without_a_store_a_text_of_its_own_is_stored_and_read(pdllm: Pdllm, tiny_model_path: Path) -> None:
    outcome = pdllm("doctor", "--model", tiny_model_path, "--json")
    assert outcome.status == 0
    assert "a text of our own" in findings(outcome, "stored KV")[0]["found"]
    assert levels(outcome)["answer"] == doctor.OK
    assert "store" not in levels(outcome)


def test_kv_that_is_not_the_models_is_wrong(pdllm: Pdllm, kb: Path, tiny_model_path: Path) -> None:
    with LMDBStore.open(kb) as store:
        (model,) = store.fingerprints()
        for chunk_id in {ref.chunk_id for ref in store.refs(model)}:
            meta, kv = store.meta(chunk_id), store.load(chunk_id)
            store.discard([chunk_id])
            store.put(model, [(meta, ChunkKV(kv.k, torch.roll(kv.v, 1, dims=1)))])
    outcome = pdllm("doctor", "--store", kb, "--model", tiny_model_path, "--json")
    assert outcome.status == 1
    assert "stored KV" in wrong(outcome)
    assert "records" not in wrong(outcome)  # their checksums are right
    assert "verify --recompute" in findings(outcome, "stored KV")[0]["advice"]


def test_damage_is_found_and_the_rest_is_still_looked_at(pdllm: Pdllm, kb: Path, tiny_model_path: Path) -> None:
    with LMDBStore.open(kb) as store:
        (model,) = store.fingerprints()
        kv = store.load(store.refs(model)[0].chunk_id)
    content = bytearray((kb / "data.mdb").read_bytes())
    content[content.find(kv.v[-1, -2].view(torch.int16).numpy().tobytes()) + 5] ^= 0x10
    (kb / "data.mdb").write_bytes(content)
    outcome = pdllm("doctor", "--store", kb, "--model", tiny_model_path, "--json")
    assert outcome.status == 1
    assert wrong(outcome) == ["records"]
    assert "1 damaged" in findings(outcome, "records")[0]["found"]
    assert levels(outcome)["answer"] == doctor.OK


def test_another_models_store_is_wrong(pdllm: Pdllm, kb: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    outcome = pdllm("doctor", "--store", kb, "--model", other, "--json")
    assert (outcome.status, wrong(outcome)) == (1, ["fingerprint"])


def test_what_cannot_be_opened_is_a_finding(pdllm: Pdllm, tmp_path: Path, kb: Path, tiny_model_path: Path) -> None:
    outcome = pdllm("doctor", "--store", tmp_path / "none", "--model", tiny_model_path, "--json")
    assert (outcome.status, wrong(outcome)) == (1, ["store"])
    outcome = pdllm("doctor", "--store", kb, "--model", "no-such", "--json")
    assert (outcome.status, wrong(outcome)) == (1, ["model"])
    assert levels(outcome)["records"] == doctor.OK
    outcome = pdllm("doctor", "--device", "tpu", "--model", tiny_model_path, "--json")
    assert (outcome.status, wrong(outcome)) == (1, ["device", "model"])


def test_answers_that_differ_and_chunks_that_were_not_read_are_told(
    pdllm: Pdllm, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = doctor_store._answer, []

    def once_otherwise(memory: Any, model: LoadedModel, text: str) -> Any:
        asked.append(text)
        answer = real(memory, model, text)
        if len(asked) == 2:
            object.__setattr__(answer, "text", "otherwise")
        return answer

    monkeypatch.setattr(doctor_store, "_answer", once_otherwise)
    outcome = pdllm("doctor", "--model", tiny_model_path, "--json")
    assert (outcome.status, levels(outcome)["answer"]) == (0, doctor.WARNING)
    monkeypatch.setattr("pdllm_store.MemoryStore.evict", lambda _: 0)
    outcome = pdllm("doctor", "--model", tiny_model_path, "--json")
    assert (outcome.status, wrong(outcome)) == (1, ["answer"])


def test_a_missing_package_a_stray_variable_and_too_many_threads_are_told(
    pdllm: Pdllm, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if name in ("lmdb", "ray"):
            raise PackageNotFoundError(name)
        return version(name)

    for name in [name for name in os.environ if name.startswith("PDLLM_") and name != "PDLLM_CONFIG"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(doctor_machine, "version", installed)
    for name, value in {"STOER": "kb", "K": "3", "API_KEY": "x" * 16, "MAX_JOBS": "3"}.items():
        monkeypatch.setenv(f"PDLLM_{name}", value)
    monkeypatch.setattr("pdllm_rag.bench.machine.torch.get_num_threads", lambda: 10_000)
    outcome = pdllm("doctor", "--model", tiny_model_path, "--json")
    assert (outcome.status, wrong(outcome)) == (1, ["lmdb"])
    assert levels(outcome)["threads"] == doctor.WARNING
    told = findings(outcome, "configuration")
    assert [(f["found"], f["advice"]) for f in told if f["level"] == doctor.WARNING] == [
        ("the variable PDLLM_STOER names no option", "did you mean PDLLM_STORE?")
    ]
    assert "PDLLM_K = '3'" in [f["found"] for f in told]
    assert "x" * 16 not in outcome.out
