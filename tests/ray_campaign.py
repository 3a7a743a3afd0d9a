"""Prefill on Ray workers that are killed: the short form is a test, the long form this script.

    GOMP_SPINCOUNT=10000 python tests/ray_campaign.py --documents 1000 --kills 6 --out docs/numbers/ray_prefill.json
    GOMP_SPINCOUNT=10000 python tests/ray_campaign.py --handbook --kills 6 --out docs/numbers/ray_handbook.json

The first prefills generated documents with a tiny random model by one process and by 1, 2 and 4 workers, then by 2
whose processes are killed, then by 2 nodes of which one is lost, and compares every chunk. The second prefills the
example handbook with the bundled model: the speed, what kills cost there, and how fast the writer is. Everything stays
on this machine. GOMP_SPINCOUNT=10000 is what the command line sets (docs/log.md).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pdllm_store import ChunkKV, ChunkMeta, LMDBStore
from tiny import save_tiny_model

from pdllm_rag import RagEngine, load_model
from pdllm_rag.distributed.cluster import connected
from pdllm_rag.distributed.prefill import RayPrefill, RayReport
from pdllm_rag.distributed.writer import Place, RemoteStore, Writer
from pdllm_rag.models.loader import read_fingerprint
from pdllm_rag.prefill import Progress
from pdllm_rag.sources import find

CHUNK_LEN = 64
CHUNKS_EACH = 16  # with CHUNK_LEN: exactly a batch of a CPU, so that every batch has one shape
COPY_EVERY = 10
HANDBOOK = Path(__file__).parent.parent / "examples" / "handbook"


def write_documents(folder: Path, n_documents: int) -> Path:
    """Texts of random letters, each of whose paragraphs fills a chunk; every tenth is a copy of the one before."""
    folder.mkdir(parents=True)
    generator = random.Random(0)
    text = ""
    for number in range(n_documents):
        if number % COPY_EVERY != COPY_EVERY - 1:
            lines = ("".join(generator.choices("abcdefghij", k=CHUNK_LEN - 3)) for _ in range(CHUNKS_EACH))
            text = "\n\n".join(lines) + "zz"
        (folder / f"{number:04}.txt").write_text(text)
    return folder


def descendants() -> dict[int, tuple[str, float]]:
    """Title and seconds of processor time of each process that this one has started, directly or not."""
    parents, found = {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            title = Path(f"/proc/{entry}/cmdline").read_text().rstrip("\0")
        except OSError:
            continue  # it has ended
        parents[int(entry)] = int(fields[1])
        found[int(entry)] = (title, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))

    def ancestors(pid: int) -> Iterator[int]:
        while pid := parents.get(pid, 0):
            yield pid

    return {pid: entry for pid, entry in found.items() if os.getpid() in ancestors(pid)}


def processes(title: str) -> list[int]:
    """Descendants whose title begins so."""
    return [pid for pid, (its, _) in descendants().items() if its.startswith(title)]


class ProcessorTime:
    """Seconds of processor time that workers, the writer and the rest of Ray take while the block runs.

    On a busy machine it says more than the clock. What a process takes in its last half second is not seen.
    """

    def __enter__(self) -> ProcessorTime:
        self._before = {pid: seconds for pid, (_, seconds) in descendants().items()}
        self._seen: dict[int, tuple[str, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            self._seen |= descendants()

    def seconds(self) -> dict[str, float]:
        """By kind."""
        kinds = {"workers": "ray::MapWorker", "writer": "ray::Writer", "rest of Ray": ""}
        total = dict.fromkeys(kinds, 0.0)
        for pid, (title, seconds) in self._seen.items():
            kind = next(kind for kind, start in kinds.items() if title.startswith(start))
            total[kind] += seconds - self._before.get(pid, 0.0)
        return total


class Killer:
    """Kills one worker, or the writer, each time that a prefill has told of so many more documents."""

    def __init__(self, n_kills: int, every: int, *, title: str = "ray::MapWorker", delay_s: float = 0.0) -> None:
        self.killed: list[int] = []
        self._n_told = 0
        self._n_kills = n_kills
        self._every = every
        self._title = title
        self._delay_s = delay_s
        self._random = random.Random(1)

    def __call__(self, progress: Progress) -> None:
        if self._n_told < self._n_kills and progress.documents >= self._every * (self._n_told + 1):
            self._n_told += 1
            threading.Timer(self._random.uniform(0, self._delay_s), self._kill).start()

    def _kill(self) -> None:
        self.killed.append(self._random.choice(sorted(processes(self._title))))
        os.kill(self.killed[-1], signal.SIGKILL)


def by_one_process(store: Path, folder: Path, model: str, chunk_len: int | None = None) -> dict[str, Any]:
    """The ordinary prefill; its report."""
    with RagEngine.open(store, load_model(model), chunk_len=chunk_len) as engine:
        return engine.prefill([folder]).as_dict()


def by_workers(
    store: Path,
    folder: Path,
    model: str,
    n_workers: int,
    on_progress: Callable[[Progress], None] | None = None,
    chunk_len: int = CHUNK_LEN,
) -> RayReport:
    """The same on workers of the connected cluster."""
    fingerprint = read_fingerprint(model, "bfloat16")
    prefill = RayPrefill(partial(LMDBStore.open, store), model, fingerprint, chunk_len=chunk_len, n_workers=n_workers)
    return prefill(find([folder]).files, on_progress)


def difference(one: Path, other: Path) -> dict[str, Any]:
    """Whether two stores have the same documents and chunk ids, and how far their KV lies apart."""
    with LMDBStore.open(one, create=False) as a, LMDBStore.open(other, create=False) as b:
        (fingerprint,) = a.fingerprints()
        refs = a.refs(fingerprint)
        chunk_ids = {ref.chunk_id for ref in refs}
        pairs = [(x, y) for i in chunk_ids for x, y in zip(a.load(i), b.load(i), strict=True)]
        return {
            "same_ids": refs == b.refs(fingerprint),
            "chunks": len(chunk_ids),
            "tensors_that_differ": sum(not torch.equal(x, y) for x, y in pairs),
            "largest_difference": max(float((x.float() - y.float()).abs().max()) for x, y in pairs),
            "sound": b.verify().ok,
        }


def told(report: RayReport) -> dict[str, Any]:
    """What a run on workers comes to. `working_seconds` begin with the first chunk of any worker."""
    ends = [worker.first + worker.seconds for worker in report.workers]
    working = max(ends) - min(worker.first for worker in report.workers)
    whole = report.as_dict()
    speed = {"working_seconds": working, "working_tokens_per_s": report.tokens / working}
    return {**{key: whole[key] for key in ("chunks", "tokens", "seconds", "ray")}, **speed}


def lose_a_node(store: Path, folder: Path, model: str, n_documents: int) -> RayReport:
    """Two nodes with a worker each; one is killed half way, and another one comes in its place."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    lost = cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    gone = threading.Event()

    def lose(progress: Progress) -> None:
        if progress.documents >= n_documents // 2 and not gone.is_set():
            gone.set()
            cluster.remove_node(lost, allow_graceful=False)
            cluster.add_node(num_cpus=1)

    try:
        ray.init(address=cluster.address, log_to_driver=False)
        report = by_workers(store, folder, model, 2, lose)
        assert gone.is_set()
        return report
    finally:
        ray.shutdown()
        cluster.shutdown()


def generated(top: Path, n_documents: int, n_kills: int) -> dict[str, Any]:
    """Runs over generated documents, each compared with what one process makes."""
    folder, model = write_documents(top / "docs", n_documents), str(save_tiny_model(top / "model"))
    runs: dict[str, Any] = {"one process": by_one_process(top / "one", folder, model, CHUNK_LEN)}

    def ran(what: str, run: Callable[[Path], RayReport], killed: Sequence[int] = ()) -> None:
        store = top / what
        runs[what] = {**told(run(store)), **difference(top / "one", store), "kills": len(killed)}
        shutil.rmtree(store)

    with connected():
        for n in (1, 2, 4):
            ran(f"{n} workers", lambda store, n=n: by_workers(store, folder, model, n))
        killer = Killer(n_kills, n_documents // (n_kills + 2), delay_s=1.0)
        ran("2 workers, killed", lambda store: by_workers(store, folder, model, 2, killer), killer.killed)
    ran("2 nodes, one lost", lambda store: lose_a_node(store, folder, model, n_documents))
    return runs


def writing(top: Path, n_batches: int = 24) -> dict[str, Any]:
    """MB/s of made-up KV of the bundled model's shape, 1,024 tokens a batch, put here and through the writer."""
    import ray

    fingerprint = read_fingerprint("demo", "bfloat16")
    generator = np.random.default_rng(0)
    shape = (fingerprint.n_layers, 256, fingerprint.n_kv_heads, fingerprint.head_dim)
    kv = ChunkKV(*(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) for _ in "kv"))
    metas = []
    for _ in range(8 * n_batches):
        token_ids = generator.integers(1, 4096, 256, dtype=np.int32)
        metas.append(ChunkMeta(fingerprint.chunk_id(token_ids), token_ids))
    n_bytes = 4 * n_batches * 256 * fingerprint.bytes_per_token
    rates = {}
    with LMDBStore.open(top / "here") as store:
        started = time.perf_counter()
        for start in range(0, 4 * n_batches, 4):
            store.put(fingerprint, [(meta, kv) for meta in metas[start : start + 4]])
        rates["here"] = n_bytes / 1e6 / (time.perf_counter() - started)
    writer = ray.remote(Writer).options(num_cpus=0).remote(partial(LMDBStore.open, top / "there"), fingerprint)
    remote = RemoteStore(writer, Place("here", os.getpid()), [], share=1)
    remote.begin(1)
    started = time.perf_counter()
    for start in range(4 * n_batches, 8 * n_batches, 4):
        remote.put(fingerprint, [(meta, kv) for meta in metas[start : start + 4]])
    rates["through the writer"] = n_bytes / 1e6 / (time.perf_counter() - started)
    return {"mb_per_s": rates, "batch_mb": n_bytes / 1e6 / n_batches, "batches": n_batches}


def handbook(top: Path, n_kills: int) -> dict[str, Any]:
    """Runs over the example handbook with the bundled model."""
    runs: dict[str, Any] = {}
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        before = time.process_time()
        report = by_one_process(top / str(n_threads), HANDBOOK, "demo")
        runs[f"one process, {n_threads} threads"] = {**report, "processor_seconds": time.process_time() - before}
    torch.set_num_threads(1)
    with connected():
        for n in (1, 2):
            with ProcessorTime() as taken:
                run = by_workers(top / f"ray{n}", HANDBOOK, "demo", n, chunk_len=160)
            runs[f"{n} workers"] = {**told(run), "processor_seconds": taken.seconds()}
        killer = Killer(n_kills, 34 // (n_kills + 2), delay_s=1.0)
        run = by_workers(top / "killed", HANDBOOK, "demo", 2, killer, chunk_len=160)
        runs["2 workers, killed"] = {**told(run), "kills": len(killer.killed)}
        runs["writing"] = writing(top)
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--handbook", action="store_true", help="the speed with the bundled model instead")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # of each worker, as of the ordinary prefill
    torch.set_num_threads(1)
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as name:
        os.environ["RAY_TMPDIR"] = name
        top = Path(name)
        runs = handbook(top, args.kills) if args.handbook else generated(top, args.documents, args.kills)
    options = f"{'--handbook' if args.handbook else f'--documents {args.documents}'} --kills {args.kills}"
    text = json.dumps(
        {"command": f"GOMP_SPINCOUNT=10000 python tests/ray_campaign.py {options}", "machine": machine, "runs": runs},
        indent=1,
    )
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
