"""`pdllm prefill --shard` on several machines, and `pdllm store merge` of what they made."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from command_line import Pdllm, one_line, one_object
from pdllm_store import LMDBStore
from tiny import save_tiny_model

from pdllm_rag.ingest import _part_of
from pdllm_rag.models import LoadedModel, load_model
from pdllm_rag.models.loader import read_fingerprint
from pdllm_rag.sources import find

N_SHARDS = 3


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Nine texts, of which two are alike."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"Buoy {number % 8} weighs {number % 8} kilograms and stands in a bay.")
    return folder


def prefill_shards(pdllm: Pdllm, docs: Path, model: Path, top: Path, *options: object) -> list[Path]:
    """Each shard into a store of its own, as if each had its machine."""
    for part in range(1, N_SHARDS + 1):
        argv = ("prefill", docs, "--model", model, "--store", top / f"part{part}", "--shard", f"{part}/{N_SHARDS}")
        assert pdllm(*argv, *options, "--json").status == 0
    return [top / f"part{part}" for part in range(1, N_SHARDS + 1) if (top / f"part{part}").exists()]


def held(store: Path, model: LoadedModel) -> dict[str, str]:
    """Texts by document id."""
    with LMDBStore.open(store, create=False) as opened:
        fingerprint = model.fingerprint(opened.kv_dtype)
        return {i.doc_id: opened.document(fingerprint, i.doc_id).text for i in opened.documents(fingerprint)}


def generation(store: Path) -> int:
    with LMDBStore.open(store, create=False) as opened:
        return opened.generation


def test_each_document_falls_into_one_shard_by_its_content_wherever_it_lies(docs: Path, tmp_path: Path) -> None:
    other = tmp_path / "another" / "mount"
    shutil.copytree(docs, other)
    (other / "8.txt").rename(other / "renamed.txt")
    here = {file.path.read_text(): _part_of(file, 5) for file in find([docs]).files}
    there = {file.path.read_text(): _part_of(file, 5) for file in find([other]).files}
    assert here == there
    assert len(here) == 8  # and so equal texts are in one shard
    assert len(set(here.values())) > 1
    assert set(here.values()) <= set(range(1, 6))


def test_the_shards_together_are_the_whole_and_a_second_run_does_nothing(
    pdllm: Pdllm, docs: Path, tmp_path: Path, tiny_model_path: Path, tiny_model: LoadedModel
) -> None:
    parts = prefill_shards(pdllm, docs, tiny_model_path, tmp_path)
    texts = [held(part, tiny_model) for part in parts]
    assert sum(map(len, texts)) == 9
    assert {doc_id for part in texts for doc_id in part} == {f"{number}.txt" for number in range(9)}
    before = [generation(part) for part in parts]
    prefill_shards(pdllm, docs, tiny_model_path, tmp_path)
    assert [generation(part) for part in parts] == before


def test_merged_shards_hold_what_one_prefill_writes(
    pdllm: Pdllm, docs: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    parts = prefill_shards(pdllm, docs, tiny_model_path, tmp_path)
    pdllm("prefill", docs, "--store", tmp_path / "whole", "--model", tiny_model_path)
    argv = ("store", "merge", tmp_path / "kb", *parts, "--model", tiny_model_path, "--sample", 1, "--json")
    merged = one_object(pdllm(*argv))
    assert (merged["documents"], merged["unchanged"]) == (9, 0)
    assert merged["compared"] == merged["chunks"] > 0
    again = one_object(pdllm("store", "merge", *parts, "--store", tmp_path / "kb", "--sample", 0, "--json"))
    assert again == {"documents": 0, "unchanged": 9, "chunks": 0, "compared": 0, "bytes": 0}
    listed = [one_object(pdllm("store", "list", "--store", tmp_path / kb, "--json")) for kb in ("kb", "whole")]
    assert listed[0] == listed[1]
    with LMDBStore.open(tmp_path / "kb") as kb, LMDBStore.open(tmp_path / "whole") as whole:
        assert kb.verify().ok
        (fingerprint,) = kb.fingerprints()
        for ref in whole.refs(fingerprint):
            for one, other in zip(kb.load(ref.chunk_id), whole.load(ref.chunk_id), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=2**-6)  # batches of other shapes, in bfloat16


def test_a_text_that_was_changed_leaves_the_shard_that_it_no_longer_falls_to(
    pdllm: Pdllm, docs: Path, tmp_path: Path, tiny_model_path: Path, tiny_model: LoadedModel
) -> None:
    parts = prefill_shards(pdllm, docs, tiny_model_path, tmp_path)
    (file,) = find([docs / "0.txt"]).files
    before, text = _part_of(file, N_SHARDS), ""
    while _part_of(file, N_SHARDS) == before:
        file.path.write_text(text := f"{text} Buoy 0 was taken ashore.")
    told = pdllm("prefill", docs, "--store", tmp_path / f"part{before}", "--model", tiny_model_path, "--shard",
                 f"{before}/{N_SHARDS}", "--json")  # fmt: skip
    assert one_object(told)["documents"]["pruned"] == ["0.txt"]
    parts = prefill_shards(pdllm, docs, tiny_model_path, tmp_path)
    assert pdllm("store", "merge", tmp_path / "kb", *parts, "--model", tiny_model_path).status == 0
    assert held(tmp_path / "kb", tiny_model)["0.txt"] == text
    # in a store that all shards share, nothing is taken away that its own shard has brought
    for part in (1, 2, 3):
        argv = ("prefill", docs, "--store", tmp_path / "kb", "--model", tiny_model_path, "--shard", f"{part}/3")
        assert one_object(pdllm(*argv, "--json"))["documents"]["pruned"] == []


def test_a_merge_of_other_stores_ends_with_one_line(pdllm: Pdllm, filled: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    assert "give --model the one that they were prefilled with" in one_line(
        pdllm("store", "merge", tmp_path / "kb", filled, "--model", other)
    )
    assert not (tmp_path / "kb").exists()
    assert "there is no store at" in one_line(pdllm("store", "merge", tmp_path / "kb", tmp_path / "nothing"))
    with pytest.raises(SystemExit) as leaving:
        pdllm("store", "merge", tmp_path / "kb")
    assert leaving.value.code == 2


@pytest.mark.parametrize("options", [{}, {"model_type": "qwen3", "rope_parameters": {"rope_type": "linear",
                                          "factor": 2.0, "rope_theta": 5000.0}}])  # fmt: skip
def test_a_fingerprint_is_known_without_the_weights(tmp_path: Path, options: dict[str, object]) -> None:
    folder = str(save_tiny_model(tmp_path, **options))  # type: ignore[arg-type]
    assert read_fingerprint(folder, "int8") == load_model(folder).fingerprint("int8")


def test_a_shard_without_a_readable_document_has_not_failed(
    pdllm: Pdllm, tmp_path: Path, tiny_model_path: Path
) -> None:
    texts = tmp_path / "docs"
    texts.mkdir()
    (texts / "good.txt").write_text("The boat sails at dawn.")
    (texts / "gone.txt").symlink_to("nowhere.txt")
    statuses = {
        pdllm("prefill", texts, "--store", tmp_path / "kb", "--model", tiny_model_path, "--shard", f"{shard}/3").status
        for shard in (1, 2, 3)
    }
    assert statuses == {3}
