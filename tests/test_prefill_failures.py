"""`pdllm prefill` where some files cannot be read: the others go in, each failure is named, and the status tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Pdllm, one_object
from pdllm_store import MemoryStore
from test_readers import pdf

from pdllm_rag import LoadedModel, RagEngine, ingest
from pdllm_rag.errors import UnreadableDocumentError

GOOD = {
    "binary.txt": b"Boats sail at dawn.",
    "empty.html": b"<p>Trains leave at noon.</p>",
    "front.md": b"# Kites fly at dusk.",
    "cut.pdf": pdf("Planes land at night."),
    "good.txt": b"Buses wait at six.",
}
BROKEN = {
    "binary.txt": bytes(range(256)) * 8,
    "empty.html": b"<script>1</script>",
    "front.md": b"---\na: [\n---\n# Kites",
    "cut.pdf": pdf("Planes land at night.")[:200],
}


def fill(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def listed(pdllm: Pdllm, store: Path) -> list[str]:
    return [
        document["doc_id"] for document in one_object(pdllm("store", "list", "--store", store, "--json"))["documents"]
    ]


@pytest.mark.parametrize("n_parts", [1, 3])
def test_files_that_cannot_be_read_any_more_are_named_told_by_the_status_and_kept(
    pdllm: Pdllm, tmp_path: Path, tiny_model_path: Path, n_parts: int
) -> None:
    docs, store = tmp_path / "docs", tmp_path / "kb"
    fill(docs, {**GOOD, "logo.png": b"\x89PNG\r\n\x1a\n"})
    argv = ("prefill", docs, "--store", store, "--model", tiny_model_path, "--prune", "--json")
    first = pdllm(*argv)
    assert first.status == 0  # a picture is no document that failed
    assert [Path(file["path"]).name for file in one_object(first)["documents"]["skipped"]] == ["logo.png"]
    fill(docs, BROKEN)
    (docs / "nowhere.txt").symlink_to("gone")
    (docs / "new.txt").write_text("Ferries cross at one.")
    failed: set[str] = set()
    for part in range(1, n_parts + 1):
        outcome = pdllm(*argv, "--shard", f"{part}/{n_parts}")
        told = one_object(outcome)["documents"]
        names = {Path(failure["path"]).name for failure in told["failed"]}
        went_in = told["added"] + told["updated"] + told["unchanged"]
        assert outcome.status == (3 if went_in or n_parts > 1 else 1)  # the link is everybody's
        assert (told["pruned"], told["missing"]) == ([], [])
        errors = [line for line in outcome.err.splitlines() if line.startswith("pdllm: failed: ")]
        assert len(errors) == len(names)
        assert all(any(name in line for line in errors) for name in names)
        failed |= names
    assert failed == {*BROKEN, "nowhere.txt"}
    assert listed(pdllm, store) == sorted([*GOOD, "new.txt"])


def test_nothing_but_failures_is_an_error_and_nothing_but_other_files_a_warning(
    pdllm: Pdllm, tmp_path: Path, tiny_model_path: Path
) -> None:
    fill(tmp_path / "broken", BROKEN)
    fill(tmp_path / "pictures", {"logo.png": b"\x89PNG\r\n\x1a\n"})
    argv = ("--store", tmp_path / "kb", "--model", tiny_model_path)
    broken = pdllm("prefill", tmp_path / "broken", *argv)
    assert (broken.status, broken.err.count("pdllm: failed: ")) == (1, len(BROKEN))
    pictures = pdllm("prefill", tmp_path / "pictures", *argv)
    assert pictures.status == 0
    assert "warning" in pictures.err
    assert "logo.png:theending'.png'isnotsupported" in "".join(pictures.out.split())


def test_a_file_that_is_away_for_a_moment_failed_and_is_not_gone(
    tiny_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editor that replaces a file, or a share that hangs, while prefill runs."""
    fill(tmp_path, {"a.txt": GOOD["binary.txt"], "b.txt": GOOD["good.txt"]})
    engine = RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64)
    assert engine.prefill([tmp_path]).added == 2

    def vanishing(path: Path) -> None:
        path.unlink()
        raise UnreadableDocumentError(f"{path}: cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(ingest, "read", vanishing)
        report = engine.prefill([tmp_path], prune=True)
    assert [failure.path for failure in report.failed] == ["a.txt", "b.txt"]
    assert (report.pruned, report.missing) == ([], [])
    assert len(engine.documents()) == 2
