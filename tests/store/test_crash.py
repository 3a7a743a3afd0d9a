"""A killed writer leaves every document either whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pdllm_store import LMDBStore
from pdllm_store.testing import make_document, random_chunk, tiny_fingerprint

# One process imports everything once and forks a writer per kill; it has no store open when it forks.
CHILD = """
    import json, os, random, signal, sys, time
    from pdllm_store import LMDBStore
    from pdllm_store.testing import make_document, random_chunk, tiny_fingerprint

    path, n_kills = sys.argv[1], int(sys.argv[2])
    fingerprint = tiny_fingerprint(kv_dtype="float32", n_layers=16)
    chance = random.Random(0)

    def write(report, first):
        with LMDBStore.open(path, kv_dtype="float32") as store:
            os.write(report, b"ready\\n")
            for index in range(first, first + 10_000):
                items = [random_chunk(fingerprint, seed=seed, n_tokens=64) for seed in (index, index + 1, index + 2)]
                store.put(fingerprint, items[:2])
                store.put(fingerprint, items[2:])
                store.add_document(fingerprint, make_document(f"d{index}", [meta for meta, _ in items]))
                os.write(report, f"+{index}\\n".encode())
                if index % 3 == 2:
                    os.write(report, f"?{index - 1}\\n".encode())
                    store.delete_document(fingerprint, f"d{index - 1}")
                    os.write(report, f"-{index - 1}\\n".encode())

    lines = []
    for kill in range(n_kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write(writing, 1000 * kill)
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert pipe.readline() == "ready\\n"
            time.sleep(chance.uniform(0.01, 0.15))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            lines += [line.strip() for line in pipe if line.endswith("\\n")]
    print(json.dumps(lines))
"""


def test_killing_the_writer_leaves_every_document_whole_or_absent(
    tmp_path: Path, run_child: Callable[..., str]
) -> None:
    lines = json.loads(run_child(CHILD, str(tmp_path), "10"))
    added = {int(line[1:]) for line in lines if line[0] == "+"}
    doubtful = {int(line[1:]) for line in lines if line[0] == "?"}
    deleted = {int(line[1:]) for line in lines if line[0] == "-"}
    assert len(added) > 10
    fingerprint = tiny_fingerprint(kv_dtype="float32", n_layers=16)
    with LMDBStore.open(tmp_path, create=False) as store:
        report = store.verify()
        assert report.ok, report
        held = {int(info.doc_id[1:]) for info in store.documents(fingerprint)}
        assert added - doubtful <= held
        assert not deleted & held
        for index in held:
            metas = [random_chunk(fingerprint, seed=seed, n_tokens=64)[0] for seed in range(index, index + 3)]
            assert store.document(fingerprint, f"d{index}") == make_document(f"d{index}", metas)
        store.compact()
        assert store.stats().orphans == 0
        assert store.verify().ok
