"""Prefill as a Ray Data pipeline: files -> read (tasks) -> cut, dedupe, encode (actors) -> one writer.

- Each actor does an ordinary prefill of a few documents, over a store that it reaches through the writer: what the
  writer holds is not computed again, whoever computed it, and each batch is durable before the next one is asked for.
- So a worker or a node that is killed costs the batch it was at. Ray starts the actor anew and hands it the same
  documents, of which those that are in cost a question each.
- A worker waits for its batch to be written, which is all the back-pressure that KV needs; Ray Data bounds the texts.

Why one writer: docs/scale.md.
"""

from __future__ import annotations

import os
import pickle
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pdllm_store import ChunkStore, ModelFingerprint, StoreError, StoreMismatchError

from pdllm_rag.attends import CaptureAttend
from pdllm_rag.distributed.writer import Place, RemoteStore, Tally, WorkerTally, Writer
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.errors import ClusterError, PdllmError
from pdllm_rag.ingest import read_documents
from pdllm_rag.models.loader import load_model
from pdllm_rag.prefill import Failure, InputDocument, Prefiller, PrefillReport, Progress
from pdllm_rag.sources import SourceFile

MOST_FILES = 256  # of a task, which is what is handed out again when a worker dies
MOST_BYTES = 1 << 18  # of the files of a task, about
TASKS_EACH = 8  # for each worker at least, so that all end at about the same time

Batch = dict[str, Any]


@dataclass
class RayReport(PrefillReport):
    """What a prefill on a cluster did; `seconds` has the start of its workers in it.

    Attributes:
        recomputed: chunks that were begun and brought nothing: their worker was killed, or another one was faster.
    """

    workers: list[WorkerTally] = field(default_factory=list)
    recomputed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON form: that of `PrefillReport`, and what the cluster did under `ray`."""
        share = self.recomputed / self.chunks_computed if self.chunks_computed else 0.0
        workers = [worker.as_dict() for worker in self.workers]
        return {**super().as_dict(), "ray": {"recomputed": self.recomputed, "share": share, "workers": workers}}


class RayPrefill:
    """Brings files into a store with the workers of the connected cluster (`ingest.PrefillFiles`).

    Args:
        open_store: opens the store that is to be written, in the writer's process, which is on this node.
        model: name or folder, to be found on every node, as the files are.
        device: "auto" takes a GPU for each worker where the cluster has any, else the CPU.
        n_workers: None takes one for each GPU, or on the CPU one for each core.

    Raises:
        StoreError: the store failed. ClusterError: Ray gave up, or the writer was killed. Both keep what is written.
    """

    def __init__(
        self,
        open_store: Callable[[], ChunkStore],
        model: str,
        fingerprint: ModelFingerprint,
        *,
        chunk_len: int,
        device: str = "auto",
        n_workers: int | None = None,
    ) -> None:
        self._open_store = open_store
        self._model = model
        self._fingerprint = fingerprint
        self._chunk_len = chunk_len
        self._device = device
        self._n_workers = n_workers

    def __call__(self, files: Sequence[SourceFile], on_progress: Callable[[Progress], None] | None) -> RayReport:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        started = time.perf_counter()
        report = RayReport()
        try:
            writer = ray.remote(Writer).options(num_cpus=0, scheduling_strategy=here)
            handle = writer.remote(self._open_store, self._fingerprint)
            ray.get(handle.max_bytes.remote())  # the store opens
            if files:
                self._run(handle, files, report, on_progress)
            _add(report, ray.get(handle.tally.remote()), len(files))
            ray.get(handle.close.remote())
        except ray.exceptions.RayError as error:
            raise _plain(error) from error
        report.seconds = time.perf_counter() - started
        return report

    def _run(
        self,
        writer: Any,
        files: Sequence[SourceFile],
        report: RayReport,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        """Run the pipeline and add up what its tasks report."""
        import ray

        n_workers, device, each = self._workers([node["Resources"] for node in ray.nodes() if node["Alive"]])
        arguments = (writer, self._model, self._fingerprint, device, self._chunk_len, n_workers)
        n_tasks = -(-len(files) // _files_of_a_task(files, n_workers))
        # Reading is given no core, so that it never waits for one that a worker holds.
        rows = (
            ray.data.from_items(
                [{**file._asdict(), "path": os.path.abspath(file.path)} for file in files], override_num_blocks=n_tasks
            )
            .map_batches(_read, batch_size=None, num_cpus=0, compute=ray.data.TaskPoolStrategy(n_workers))
            .map_batches(
                _Worker,
                fn_constructor_args=arguments,
                batch_size=None,
                compute=ray.data.ActorPoolStrategy(size=n_workers),
                **each,
            )
        )
        rows.context.enable_progress_bars = False
        for row in rows.iter_rows():
            done = pickle.loads(row["report"])
            if isinstance(done, PdllmError):
                raise done
            for name in ("failed", "chunks_computed", "chunks_reused", "chunks_blank", "tokens", "text_bytes"):
                setattr(report, name, getattr(report, name) + getattr(done, name))
            report.unchanged += done.added + done.updated + done.unchanged
            if on_progress is not None:
                on_progress(Progress(report.unchanged + len(report.failed), report.tokens, ""))

    def _workers(self, nodes: Sequence[Mapping[str, float]]) -> tuple[int, str, dict[str, float]]:
        """How many there are to be on these nodes, where each computes, and what it is given of a node."""
        n_gpus = int(sum(node.get("GPU", 0) for node in nodes))
        if self._device.startswith("cuda") or (self._device == "auto" and n_gpus):
            if not n_gpus:
                raise ClusterError(
                    f"device {self._device!r} was asked for and the cluster has no GPU; take auto or cpu"
                )
            return self._n_workers or n_gpus, "cuda", {"num_gpus": 1, "num_cpus": 1}
        cores = [int(node.get("CPU", 0)) for node in nodes]
        n_workers = self._n_workers or sum(cores)
        # A worker computes with as many threads as it is given cores, and all of them are on one node.
        each = min(sum(cores) // n_workers, max(cores))
        return n_workers, "cpu", {"num_cpus": each or sum(cores) / n_workers}


def _add(report: RayReport, tally: Tally, n_files: int) -> None:
    """Put in what the writer counted: that of killed workers is in it, and nothing twice."""
    report.workers = tally.workers
    report.updated = sum(tally.replaced.values())
    report.added = len(tally.replaced) - report.updated
    report.unchanged = n_files - len(tally.replaced) - len(report.failed)
    used = report.chunks_computed + report.chunks_reused
    report.chunks_computed = sum(worker.chunks for worker in tally.workers)
    report.chunks_reused = used - report.chunks_computed
    report.recomputed = sum(worker.begun for worker in tally.workers) - report.chunks_computed
    report.tokens = sum(worker.tokens for worker in tally.workers)
    report.bytes_written = tally.bytes_written


def _files_of_a_task(files: Sequence[SourceFile], n_workers: int) -> int:
    """How many files make a task: few enough that every worker gets several tasks."""
    n_bytes = 0
    for file in files:
        with suppress(OSError):
            n_bytes += os.path.getsize(file.path)
    by_size = MOST_BYTES * len(files) // max(n_bytes, 1)
    return max(1, min(MOST_FILES, by_size, len(files) // (TASKS_EACH * n_workers)))


def _read(batch: Batch) -> Batch:
    """Columns path, doc_id, source to documents; pickled, since a column of texts is as free as a text is not."""
    files = (
        SourceFile(Path(path), *names) for path, *names in zip(*(batch[n] for n in SourceFile._fields), strict=True)
    )
    return {"document": [pickle.dumps(document) for document in read_documents(files)]}


class _CountedEncoder(ChunkEncoder):
    """Says how many chunks it is about to encode."""

    def __init__(self, *arguments: Any, begin: Callable[[int], None]) -> None:
        super().__init__(*arguments)
        self._begin = begin

    def capture(self, chunks: Sequence[NDArray[np.int32]]) -> CaptureAttend:
        self._begin(len(chunks))
        return super().capture(chunks)


class _Worker:
    """An actor that prefills the documents of one task after the other."""

    def __init__(
        self, writer: Any, model: str, fingerprint: ModelFingerprint, device: str, chunk_len: int, n_workers: int
    ) -> None:
        import ray

        loaded = load_model(model, device=device)
        if (found := loaded.fingerprint(fingerprint.kv_dtype)) != fingerprint:
            raise StoreMismatchError(
                f"the model {model} on {os.uname().nodename} has the fingerprint {found.digest.hex()}, the run was "
                f"begun with {fingerprint.digest.hex()}; bring the same files to every node"
            )
        place = Place(ray.util.get_node_ip_address(), os.getpid())
        begin = RemoteStore(writer, place, [], share=0).begin
        self._encoder = _CountedEncoder(loaded, fingerprint, begin=begin)
        self._open = partial(RemoteStore, writer, place, share=1 / n_workers)
        self._prefiller = partial(Prefiller, loaded, fingerprint=fingerprint, chunk_len=chunk_len)

    def __call__(self, batch: Batch) -> Batch:
        documents: list[InputDocument | Failure] = [pickle.loads(packed) for packed in batch["document"]]
        store = self._open([document.doc_id for document in documents if isinstance(document, InputDocument)])
        prefiller = self._prefiller(store=cast(ChunkStore, store), encoder=self._encoder, check_held=store.is_whole)
        try:
            return {"report": [pickle.dumps(prefiller.run(documents))]}
        except (StoreError, ClusterError) as error:  # of store or writer: the run ends with it, instead of a retry
            return {"report": [pickle.dumps(error)]}


def _plain(error: Exception) -> ClusterError:
    """What Ray gave up on, without the tracebacks of its processes."""
    raised = re.findall(r"^(?:\w+\.)*(?!UserCode)(\w+(?:Error|Exception): .+)$", str(error), re.MULTILINE)
    reason = raised[-1] if raised else f"{type(error).__name__}: {error}"
    return ClusterError(f"Ray gave up: {reason}; what is written stays, and the same command goes on from there")
