"""Kill a writer at a random moment, look at what it left, go on with that; many times."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pdllm_store.lmdb_store import LMDBStore
from pdllm_store.memory_store import MemoryStore
from pdllm_store.testing.campaigns.catalogue import Catalogue, Version
from pdllm_store.testing.campaigns.children import Child, Report
from pdllm_store.testing.campaigns.guarantee import BrokenGuaranteeError, require
from pdllm_store.testing.fakes import tiny_fingerprint

KINDS = ("put", "add", "replace", "delete", "re-add", "compact")
_N_DOCUMENTS = 8  # at most, so that each check is short
_N_TOKENS = [32] * 20 + [3200] * 2  # 12 KB each; the last two take two layer groups
_EARLIEST_S, _LATEST_S = 0.005, 0.060  # of work before the kill
_OPENING_S = 0.012  # from the fork on, where the kill is to come before any work
_SHARE_OPENING = _SHARE_CREATING = 1 / 20
_SHARE_COMPACT = 1 / 20
_PATIENCE_S = 60.0


class KillResult(NamedTuple):
    """Figures of a kill campaign."""

    kills: int
    in_flight: int  # kills while an operation was announced and not yet acknowledged
    undone: dict[str, int]  # of those, by kind of operation: found in the state before it (or both are the same)
    done: dict[str, int]  # ... found in the state after it
    between: int  # kills between two operations
    opening: int  # kills while the store was being opened
    creating: int  # kills while a new store was being made
    acknowledged: int  # operations that had ended before the kills, all of them found kept
    documents_checked: int
    chunks_checked: int  # each compared bit for bit
    largest_file_bytes: int
    seconds: float


class Operation(NamedTuple):
    """One call of the writer."""

    kind: str
    number: int = 0  # of the document
    revision: int = 0
    seeds: tuple[int, ...] = ()

    @property
    def version(self) -> Version:
        return Version(self.number, self.revision, self.seeds)


class State(NamedTuple):
    """What a store must hold."""

    documents: dict[int, Version]
    held: frozenset[int] = frozenset()  # seeds of chunks with KV
    deleted: tuple[int, ...] = ()  # numbers of the documents deleted last
    unused: int = 0  # no document had this number or a larger one

    @property
    def referred(self) -> frozenset[int]:
        return frozenset(seed for version in self.documents.values() for seed in version.seeds)

    def after(self, operation: Operation) -> State:
        """The state that an operation leads to."""
        if operation.kind == "put":
            return self._replace(held=self.held | set(operation.seeds))
        if operation.kind == "compact":
            return self._replace(held=self.held & self.referred)
        documents, number = dict(self.documents), operation.number
        deleted = tuple(other for other in self.deleted if other != number)
        if operation.kind == "delete":
            del documents[number]
            deleted = (*deleted, number)[-_N_DOCUMENTS:]
        else:
            documents[number] = operation.version
        changed = State(documents, self.held, deleted, max(self.unused, number + 1))
        return changed._replace(held=self.held - (self.referred - changed.referred))


def kill(*, kills: int = 1000, seed: int = 0) -> KillResult:
    """Kill a writer `kills` times; after each kill a fresh process checks the whole store.

    Raises:
        BrokenGuaranteeError: the store is not in the state before or after the operation in flight.
    """
    started = time.monotonic()
    catalogue = Catalogue(tiny_fingerprint(kv_dtype="float32", n_layers=6), _N_TOKENS)
    kv_bytes = [MemoryStore(kv_dtype="float32").put(catalogue.fingerprint, [item]) for item in catalogue.items]
    chance = random.Random(seed)
    counted: Counter[str] = Counter()
    undone, done = Counter(dict.fromkeys(KINDS, 0)), Counter(dict.fromkeys(KINDS, 0))
    state, generation, largest = State({}), 0, 0
    with TemporaryDirectory(prefix="pdllm-kill-") as folder:
        for index in range(kills):
            share = chance.random()
            creating = share < _SHARE_CREATING
            early = share < _SHARE_CREATING + _SHARE_OPENING
            path = Path(folder) / (f"new-{index}" if creating else "store")
            before = State({}) if creating else state
            writer = Child(partial(_write, path, catalogue, before, f"{seed}/{index}"))
            if early:
                time.sleep(chance.uniform(0, _OPENING_S))
            else:
                writer.wait_for_word(_PATIENCE_S)
                time.sleep(chance.uniform(_EARLIEST_S, _LATEST_S))
            ending = writer.kill()
            require(ending.error is None, f"kill {index}: the writer failed before it was killed:\n{ending.error}")

            old, in_flight, n_changes = _replay(before, ending.said)
            candidates = [old] if in_flight is None else [old, old.after(in_flight)]
            where = f"kill {index} of seed {seed}, {'between two operations' if in_flight is None else in_flight}"
            least = (0 if creating else generation) + n_changes
            found = _checked(where, partial(_check, path, catalogue, kv_bytes, candidates, least))
            counted.update({name: found[name] for name in ("documents", "chunks")})
            counted["acknowledged"] += ending.said.count("ended")
            if in_flight is not None:
                (done if found["state"] else undone)[in_flight.kind] += 1
            else:
                counted["between" if ending.said else "creating" if creating else "opening"] += 1
            if creating:
                shutil.rmtree(path)
            else:
                state, generation = candidates[found["state"]], found["generation"]
                largest = max(largest, found["file_bytes"])
    return KillResult(
        kills=kills,
        in_flight=undone.total() + done.total(),
        undone=dict(undone),
        done=dict(done),
        between=counted["between"],
        opening=counted["opening"],
        creating=counted["creating"],
        acknowledged=counted["acknowledged"],
        documents_checked=counted["documents"],
        chunks_checked=counted["chunks"],
        largest_file_bytes=largest,
        seconds=round(time.monotonic() - started, 1),
    )


def _write(path: Path, catalogue: Catalogue, state: State, seed: str, report: Report) -> None:
    """Work for ever; announce each operation before it begins and after it has ended."""
    chance = random.Random(seed)
    with LMDBStore.open(path, kv_dtype="float32") as store:
        report("ready")
        for operation in _operations(chance, state):
            report(operation)
            _perform(store, catalogue, operation)
            report("ended")


def _operations(chance: random.Random, state: State) -> Iterator[Operation]:
    while True:
        for operation in _plan(chance, state):
            yield operation
            state = state.after(operation)


def _plan(chance: random.Random, state: State) -> list[Operation]:
    """One or two operations that belong together."""
    if chance.random() < _SHARE_COMPACT:
        return [Operation("compact")]
    live = sorted(state.documents)
    if len(live) == _N_DOCUMENTS or (live and chance.random() < 0.6):
        kind, number = chance.choice(["delete", "replace"]), chance.choice(live)
    elif state.deleted and chance.random() < 0.5:
        kind, number = "re-add", chance.choice(state.deleted)
    else:
        kind, number = "add", state.unused
    if kind == "delete":
        return [Operation("delete", number)]
    seeds = tuple(chance.choices(range(len(_N_TOKENS)), k=chance.randint(1, 4)))
    write = Operation(kind, number, chance.randrange(1 << 30), seeds)
    absent = sorted(set(seeds) - state.held)
    if not absent:
        return [write]
    spare = chance.choices(range(len(_N_TOKENS)), k=chance.randint(0, 2))  # orphans, or chunks that are held
    return [Operation("put", seeds=(*absent, *spare)), write]


def _perform(store: LMDBStore, catalogue: Catalogue, operation: Operation) -> None:
    fingerprint = catalogue.fingerprint
    if operation.kind == "put":
        catalogue.put(store, operation.seeds)
    elif operation.kind == "compact":
        store.compact()
    elif operation.kind == "delete":
        require(store.delete_document(fingerprint, operation.version.doc_id), f"{operation} found nothing to delete")
    else:
        replaced = store.add_document(fingerprint, catalogue.document(operation.version))
        require(replaced == (operation.kind == "replace"), f"{operation} says replaced={replaced}")


def _replay(state: State, said: list[Any]) -> tuple[State, Operation | None, int]:
    """The last acknowledged state, the operation in flight, and how many documents changed until then."""
    announced: Operation | None = None
    n_changes = 0
    for word in said[1:]:
        if word == "ended":
            assert announced is not None
            state = state.after(announced)
            n_changes += announced.kind not in ("put", "compact")
            announced = None
        else:
            kind, number, revision, seeds = word
            announced = Operation(kind, number, revision, tuple(seeds))
    return state, announced, n_changes


def _checked(where: str, body: Callable[[Report], object]) -> dict[str, int]:
    ending = Child(body).end(_PATIENCE_S)
    if ending.error is not None or not ending.said:
        how = ending.error or ("it did not end" if ending.timed_out else f"it died of signal {ending.signal}")
        raise BrokenGuaranteeError(f"{where}: checking the store failed:\n{how}")
    found: dict[str, int] = ending.said[0]
    return found


def _check(
    path: Path, catalogue: Catalogue, kv_bytes: list[int], candidates: list[State], least: int, report: Report
) -> None:
    """Open the store after a kill and read all of it. Raises BrokenGuaranteeError."""
    with LMDBStore.open(path, kv_dtype="float32") as store:
        verified = store.verify()
        require(verified.ok, f"verify says {verified}")
        documents = catalogue.versions(store)
        every = range(len(catalogue.items))
        held = frozenset(every) - {catalogue.seed_of[chunk_id] for chunk_id in store.missing(catalogue.ids(every))}
        matching = [
            index for index, state in enumerate(candidates) if (documents, held) == (state.documents, state.held)
        ]
        expected = " or ".join(str((state.documents, sorted(state.held))) for state in candidates)
        require(bool(matching), f"documents and chunks held are {(documents, sorted(held))}, expected {expected}")
        state = candidates[matching[0]]

        for version in documents.values():
            catalogue.check_document(store, version)
        for seed in held:
            catalogue.check_chunk(store, seed)
        ids = {meta.chunk_id for meta in store.iter_meta(catalogue.fingerprint)}
        require(ids == set(catalogue.ids(state.referred)), "the metas listed are not those of the documents' chunks")

        stats = store.stats()
        got = (stats.documents, stats.chunks, stats.orphans, stats.tokens, stats.kv_bytes)
        counted = (
            len(documents),
            len(held),
            len(held - state.referred),
            sum(_N_TOKENS[seed] for seed in held),
            sum(kv_bytes[seed] for seed in held),
        )
        require(got == counted, f"stats say {stats}, a recount gives {counted}")
        changed = matching[0] == 1 and candidates[0].documents != candidates[1].documents
        require(stats.generation >= least + changed, f"generation is {stats.generation}, at least {least} was reached")
        left = sorted(set(os.listdir(path)) - {"data.mdb", "lock.mdb", "store.lock", "derived"})
        require(not left, f"{left} was left behind in the store's folder")
        report(
            {
                "state": matching[0],
                "documents": len(documents),
                "chunks": len(held),
                "generation": stats.generation,
                "file_bytes": stats.file_bytes,
            }
        )
