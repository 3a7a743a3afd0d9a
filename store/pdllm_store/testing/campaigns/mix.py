"""Several processes read and change the same few documents of one store for a while."""

from __future__ import annotations

import faulthandler
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pdllm_store.errors import ChunkNotFoundError, DocumentNotFoundError, StoreError
from pdllm_store.lmdb_store import LMDBStore
from pdllm_store.testing.campaigns.catalogue import Catalogue, Version
from pdllm_store.testing.campaigns.children import Child, Ending, Report
from pdllm_store.testing.campaigns.guarantee import BrokenGuaranteeError, require
from pdllm_store.testing.fakes import tiny_fingerprint

_N_TOKENS = [32] * 14 + [3200] * 2
_DISCARDED = (0, 1, 2)  # chunks whose KV may be dropped at any time; that of all others stays while it is referred to
_N_SHARED = 6  # documents that everybody writes
_N_OWN = 2  # documents of each process that only it writes
_N_ATTEMPTS = 20
_REOPEN_EVERY = 200  # operations
_PATIENCE_S = 60.0


class MixResult(NamedTuple):
    """Figures of a mix campaign."""

    processes: int
    seconds: float
    operations: dict[str, int]  # completed, by kind
    refused: int  # additions that lost a chunk to somebody else between put and add, and were tried again
    absent: int  # reads of what somebody else had deleted or discarded
    chunks_checked: int  # loads compared bit for bit
    documents_checked: int  # reads compared with the only text, references and metadata that they may have


def mix(*, processes: int = 4, seconds: float = 180.0, seed: int = 0) -> MixResult:
    """Let `processes` work on one store for `seconds`, then check everything.

    Raises:
        BrokenGuaranteeError: a process read something that nobody wrote, failed or did not end, or the store they
            left is not clean.
    """
    catalogue = Catalogue(tiny_fingerprint(kv_dtype="float32", n_layers=6), _N_TOKENS)
    with TemporaryDirectory(prefix="pdllm-mix-") as folder:
        path = Path(folder) / "store"
        started = time.monotonic()
        children = [
            Child(partial(_work, path, catalogue, process, processes, seconds, f"{seed}/{process}"))
            for process in range(processes)
        ]
        endings = []
        for child in children:
            endings.append(child.end(max(started + seconds + _PATIENCE_S - time.monotonic(), 0)))
        reports = [_said(f"process {process} of {processes}", ending) for process, ending in enumerate(endings)]
        own = {int(number): version for report in reports for number, version in report["own"].items()}
        ending = Child(partial(_check, path, catalogue, own)).end(_PATIENCE_S)
        _said("checking the store afterwards", ending)
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report["counts"])
    figures = {name: counts.pop(name, 0) for name in ("refused", "absent", "chunks_checked", "documents_checked")}
    return MixResult(processes, seconds, dict(sorted(counts.items())), **figures)


def _said(name: str, ending: Ending) -> dict[str, Any]:
    if ending.timed_out:
        raise BrokenGuaranteeError(f"{name} did not end within {_PATIENCE_S} s: a deadlock or a lost wake-up")
    if ending.error is not None or ending.signal is not None:
        raise BrokenGuaranteeError(f"{name} failed: {ending.error or f'it died of signal {ending.signal}'}")
    report: dict[str, Any] = ending.said[0]
    return report


def _work(
    path: Path, catalogue: Catalogue, process: int, processes: int, seconds: float, seed: str, report: Report
) -> None:
    faulthandler.dump_traceback_later(seconds + _PATIENCE_S - 5)  # says where a deadlock is
    end = time.monotonic() + seconds
    worker = _Worker(catalogue, process, processes, random.Random(seed))
    while time.monotonic() < end:
        with LMDBStore.open(path, kv_dtype="float32") as store:
            for _ in range(_REOPEN_EVERY):
                if time.monotonic() >= end:
                    break
                worker.step(store)
    report({"counts": worker.counts, "own": worker.own})


class _Worker:
    """One process: a random operation at each step, and what it expects of it."""

    def __init__(self, catalogue: Catalogue, process: int, processes: int, chance: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.own: dict[int, Version] = {}  # the documents that only this process writes, as they must read
        self._catalogue = catalogue
        self._fingerprint = catalogue.fingerprint
        self._chance = chance
        self._process, self._processes = process, processes
        self._revision = 0
        self._shared = range(_N_SHARED)
        first = _N_SHARED + process * _N_OWN
        self._mine = range(first, first + _N_OWN)
        self._steps: list[tuple[str, int, Callable[[LMDBStore], None]]] = [
            ("put", 10, self._put),
            ("add", 20, self._add),
            ("add_own", 8, self._add_own),
            ("delete", 10, self._delete),
            ("delete_own", 4, self._delete_own),
            ("load", 60, self._load),
            ("document", 40, self._document),
            ("documents", 20, self._documents),
            ("refs", 10, self._refs),
            ("metas", 10, self._metas),
            ("discard", 8, self._discard),
            ("stats", 10, self._stats),
            ("verify", 2, self._verify),
            ("compact", 1, self._compact),
        ]

    def step(self, store: LMDBStore) -> None:
        name, _, body = self._chance.choices(self._steps, [weight for _, weight, _ in self._steps])[0]
        body(store)
        self.counts[name] += 1

    def _put(self, store: LMDBStore) -> None:
        self._catalogue.put(store, self._seeds())

    def _add(self, store: LMDBStore) -> None:
        self._write(store, self._chance.choice(self._shared))

    def _add_own(self, store: LMDBStore) -> None:
        number = self._chance.choice(self._mine)
        version = self._write(store, number)
        if version is not None:
            self.own[number] = version
        self._check_own(store)

    def _write(self, store: LMDBStore, number: int) -> Version | None:
        """Put the chunks and add the document until nobody is faster; None after too many attempts."""
        self._revision += 1
        version = Version(number, self._revision * self._processes + self._process, self._seeds())
        for _ in range(_N_ATTEMPTS):
            self._catalogue.put(store, version.seeds)
            try:
                replaced = store.add_document(self._fingerprint, self._catalogue.document(version))
            except ChunkNotFoundError as error:
                require(bool(error.chunk_ids), f"no chunk is named by {error}")
                self.counts["refused"] += 1
                continue
            if number in self._mine:
                require(replaced == (number in self.own), f"adding {version} says replaced={replaced}")
            return version
        return None

    def _delete(self, store: LMDBStore) -> None:
        store.delete_document(self._fingerprint, Version(self._chance.choice(self._shared), 0, ()).doc_id)

    def _delete_own(self, store: LMDBStore) -> None:
        number = self._chance.choice(self._mine)
        was_there = store.delete_document(self._fingerprint, Version(number, 0, ()).doc_id)
        require(was_there == (number in self.own), f"deleting {number} says {was_there}, it was {self.own.get(number)}")
        self.own.pop(number, None)
        self._check_own(store)

    def _load(self, store: LMDBStore) -> None:
        self._check_chunk(store, self._chance.randrange(len(_N_TOKENS)))

    def _document(self, store: LMDBStore) -> None:
        number = self._chance.choice(self._shared)
        try:
            document = store.document(self._fingerprint, Version(number, 0, ()).doc_id)
        except DocumentNotFoundError:
            self.counts["absent"] += 1
            return
        version = Version(number, document.metadata["revision"], tuple(document.metadata["seeds"]))
        expected = self._catalogue.document(version)
        require(document == expected, f"a document has parts of two states: {document}, expected {expected}")
        self.counts["documents_checked"] += 1
        for seed in version.seeds:
            self._check_chunk(store, seed)

    def _documents(self, store: LMDBStore) -> None:
        listed = self._catalogue.versions(store)
        self.counts["documents_checked"] += len(listed)
        mine = {number: version for number, version in listed.items() if number in self._mine}
        require(mine == self.own, f"process {self._process} wrote {self.own}, listed are {mine}")

    def _refs(self, store: LMDBStore) -> None:
        seen = [(ref.doc_id, ref.ordinal) for ref in store.refs(self._fingerprint)]
        require(seen == sorted(set(seen)), f"references are listed twice or in disorder: {seen}")

    def _metas(self, store: LMDBStore) -> None:
        for meta in store.iter_meta(self._fingerprint):
            self._catalogue.check_meta(meta, self._catalogue.seed_of[meta.chunk_id])

    def _discard(self, store: LMDBStore) -> None:
        store.discard(self._catalogue.ids(self._chance.choices(_DISCARDED, k=2)))

    def _stats(self, store: LMDBStore) -> None:
        stats = store.stats()
        n_documents = _N_SHARED + self._processes * _N_OWN
        possible = (
            0 <= stats.orphans <= stats.chunks <= len(_N_TOKENS)
            and stats.documents <= n_documents
            and stats.tokens <= sum(_N_TOKENS)
        )
        require(possible and not stats.damaged, f"stats cannot be: {stats}")

    def _verify(self, store: LMDBStore) -> None:
        _verify(store, self._catalogue)

    def _compact(self, store: LMDBStore) -> None:
        try:
            store.compact()
        except StoreError as error:
            require("is open in another process" in str(error), f"compact failed: {error}")
        else:
            self.counts["compact_alone"] += 1

    def _check_own(self, store: LMDBStore) -> None:
        for number in self._mine:
            if number in self.own:
                self._catalogue.check_document(store, self.own[number])
                self.counts["documents_checked"] += 1

    def _check_chunk(self, store: LMDBStore, seed: int) -> None:
        try:
            self._catalogue.check_chunk(store, seed)
        except ChunkNotFoundError:
            self.counts["absent"] += 1
        else:
            self.counts["chunks_checked"] += 1

    def _seeds(self) -> tuple[int, ...]:
        return tuple(self._chance.choices(range(len(_N_TOKENS)), k=self._chance.randint(1, 4)))


def _verify(store: LMDBStore, catalogue: Catalogue) -> set[int]:
    """Chunks without KV, which only a discard can have dropped. Raises BrokenGuaranteeError."""
    report = store.verify()
    missing = {catalogue.seed_of[chunk_id] for chunk_id in report.missing}
    require(not (report.damaged or report.problems), f"verify says {report}")
    require(missing <= set(_DISCARDED), f"documents lack the KV of chunks {sorted(missing)}, which nobody discarded")
    return missing


def _check(path: Path, catalogue: Catalogue, own: dict[int, list[Any]], report: Report) -> None:
    """Look at what all the processes left. Raises BrokenGuaranteeError."""
    with LMDBStore.open(path, create=False) as store:
        catalogue.put(store, _verify(store, catalogue))
        require(store.verify().ok, f"after putting again what was discarded verify says {store.verify()}")
        versions = catalogue.versions(store)
        mine = {number: version for number, version in versions.items() if number >= _N_SHARED}
        written = {number: Version(n, revision, tuple(seeds)) for number, (n, revision, seeds) in own.items()}
        require(mine == written, f"the documents of one writer are {mine}, expected {written}")
        store.compact()
        for version in versions.values():
            catalogue.check_document(store, version)
            for seed in version.seeds:
                catalogue.check_chunk(store, seed)
        stats = store.stats()
        n_chunks = len({seed for version in versions.values() for seed in version.seeds})
        got = (stats.documents, stats.chunks, stats.orphans)
        require(got == (len(versions), n_chunks, 0), f"after compacting stats say {stats}")
        require(store.verify().ok, f"after compacting verify says {store.verify()}")
        report({})
