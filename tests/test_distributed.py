"""Prefill on Ray workers: the same store as one process makes, whoever is killed; and what it says when it cannot."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from command_line import Pdllm, one_line, one_object
from pdllm_store import ChunkStore, LMDBStore, StoreMismatchError
from ray_campaign import CHUNK_LEN, CHUNKS_EACH, Killer, by_one_process, by_workers, difference, write_documents

from pdllm_rag import InputDocument
from pdllm_rag.distributed.prefill import RayPrefill, _CountedEncoder, _Worker
from pdllm_rag.distributed.writer import Place, RemoteStore, Writer
from pdllm_rag.errors import ClusterError
from pdllm_rag.models import LoadedModel
from pdllm_rag.prefill import Prefiller

N_DOCUMENTS = 60


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("ray") / "docs", N_DOCUMENTS)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\..*")
def test_a_run_whose_processes_are_killed_ends_with_the_store_of_one_process(
    docs: Path, tmp_path: Path, tiny_model_path: Path, pdllm: Pdllm
) -> None:
    model = str(tiny_model_path)
    by_one_process(tmp_path / "one", docs, model, CHUNK_LEN)
    with pytest.raises(ClusterError, match="what is written stays"):
        by_workers(tmp_path / "kb", docs, model, 2, Killer(1, 10, title="ray::Writer"))
    with LMDBStore.open(tmp_path / "kb", create=False) as store:
        n_before = store.stats().chunks
    assert n_before >= 10 * CHUNKS_EACH // 2  # the rest are copies

    killer = Killer(2, 15)
    report = by_workers(tmp_path / "kb", docs, model, 2, killer)
    assert len(killer.killed) == 2
    assert report.added + report.unchanged == N_DOCUMENTS
    n_copies = N_DOCUMENTS // 10
    n_distinct = CHUNKS_EACH * (N_DOCUMENTS - n_copies)
    assert report.chunks_computed == n_distinct - n_before
    assert report.recomputed == sum(worker.begun for worker in report.workers) - report.chunks_computed
    assert 0 <= report.recomputed <= CHUNKS_EACH * (2 + n_copies)  # a batch a kill, and copies that two encode at once
    found = difference(tmp_path / "one", tmp_path / "kb")
    assert found["same_ids"]
    assert found["sound"]
    assert found["chunks"] == n_distinct
    assert (found["tensors_that_differ"], found["largest_difference"]) == (0, 0.0)  # one thread, batches of one shape

    # the command, on what is there: nothing is computed but what was changed, and the report is that of any prefill
    (docs / "0000.txt").write_text("Buoy 1 weighs 310 kilograms.")
    (docs / "empty.txt").write_text("")
    argv = ("prefill", docs, "--store", tmp_path / "kb", "--model", model, "--chunk-len", CHUNK_LEN, "--json")
    outcome = pdllm(*argv, "--ray", "--workers", 1)
    assert outcome.status == 3
    told = one_object(outcome)
    assert {name: told["documents"][name] for name in ("added", "updated", "unchanged")} == {
        "added": 0,
        "updated": 1,
        "unchanged": N_DOCUMENTS - 1,
    }
    assert [failure["path"] for failure in told["documents"]["failed"]] == ["empty.txt"]
    assert told["chunks"]["computed"] == told["ray"]["workers"][0]["begun"] == 1
    assert told["ray"]["recomputed"] == 0
    again = one_object(pdllm(*argv))
    assert again["chunks"]["computed"] == 0
    assert set(told) == {*again, "ray"}


@pytest.fixture
def ray_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's calls, in this process."""

    class Ray:
        exceptions = type("Errors", (), {"RayTaskError": KeyError, "RayActorError": ConnectionError})

        @staticmethod
        def get(call: Any) -> Any:
            return call()

    monkeypatch.setitem(sys.modules, "ray", Ray)  # type: ignore[arg-type]


class Handle:
    """An actor's handle: `handle.method.remote(...)` is asked by `ray.get`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return type("Method", (), {"remote": staticmethod(lambda *given: lambda: method(*given))})


@pytest.mark.usefixtures("ray_answers")
def test_the_writer_counts_each_chunk_and_document_once_and_shares_out_the_cap(
    tmp_path: Path, tiny_model: LoadedModel
) -> None:
    fingerprint = tiny_model.fingerprint("float32")
    writer = Writer(lambda: LMDBStore.open(tmp_path / "kb", kv_dtype="float32", max_bytes=8 << 20), fingerprint)
    first, second = (RemoteStore(Handle(writer), Place("here", pid), ["a"], share=0.25) for pid in (1, 2))
    assert first.max_bytes == 2 << 20
    document = InputDocument("a", "Buoy 1 weighs 310 kilograms and stands in a bay.", "src")
    for store in (first, second):
        encoder = _CountedEncoder(tiny_model, fingerprint, begin=store.begin)
        prefiller = Prefiller(
            tiny_model,
            cast(ChunkStore, store),
            fingerprint,
            chunk_len=64,
            encoder=encoder,
            check_held=store.is_whole,
        )
        report = prefiller.run([document])
    assert (report.unchanged, report.chunks_computed) == (1, 0)
    ((item,),) = encoder.batches([next(iter(writer._store.iter_meta(fingerprint))).token_ids])  # by both at once
    second.put(fingerprint, [item])
    assert torch.equal(writer._store.load(item[0].chunk_id).k, item[1].k)
    tally = writer.tally()
    assert [(worker.begun, worker.chunks) for worker in tally.workers] == [(1, 1), (1, 0)]
    assert tally.replaced == {"a": False}
    writer.close()


@pytest.mark.parametrize(
    ("asked", "n_workers", "nodes", "expected"),
    [
        ("auto", None, [{"CPU": 8.0}], (8, "cpu", {"num_cpus": 1})),
        ("auto", 2, [{"CPU": 9.0}, {}], (2, "cpu", {"num_cpus": 4})),
        ("auto", 2, [{"CPU": 2.0}] * 4, (2, "cpu", {"num_cpus": 2})),
        ("auto", 4, [{"CPU": 2.0}], (4, "cpu", {"num_cpus": 0.5})),
        (
            "auto",
            None,
            [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 2.0}],
            (3, "cuda", {"num_gpus": 1, "num_cpus": 1}),
        ),
        ("cpu", None, [{"CPU": 8.0, "GPU": 3.0}], (8, "cpu", {"num_cpus": 1})),
        ("cuda", None, [{"CPU": 8.0}], None),
    ],
)
def test_workers_are_one_for_each_gpu_or_share_the_cores(
    tiny_model: LoadedModel, asked: str, n_workers: int | None, nodes: list[dict[str, float]], expected: Any
) -> None:
    fingerprint = tiny_model.fingerprint("bfloat16")
    prefill = RayPrefill(LMDBStore.open, "m", fingerprint, chunk_len=64, device=asked, n_workers=n_workers)  # type: ignore[arg-type]
    if expected is not None:
        assert prefill._workers(nodes) == expected
        return
    with pytest.raises(ClusterError, match="has no GPU"):
        prefill._workers(nodes)


@pytest.mark.usefixtures("ray_answers")
def test_a_node_with_other_weights_is_refused(tiny_model: LoadedModel) -> None:
    wrong = replace(tiny_model.fingerprint("bfloat16"), weights_digest="00")
    with pytest.raises(StoreMismatchError, match="bring the same files to every node"):
        _Worker(None, tiny_model.spec.name, wrong, "cpu", 64, 1)


def test_without_ray_the_error_names_the_extra(
    pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    argv = ("prefill", folder, "--store", tmp_path / "kb", "--model", tiny_model_path, "--ray")
    assert "pip install 'pdllm-rag[scale]'" in one_line(pdllm(*argv))
    assert not (tmp_path / "kb").exists()
