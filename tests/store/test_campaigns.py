"""Short runs of the campaigns (docs/reliability.md has the long ones), and proof that they can fail."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

# A process of its own: campaigns fork, and no store may be open then.
RUN = "import runpy; runpy.run_module('pdllm_store.testing.campaigns', run_name='__main__', alter_sys=True)"


def run(run_child: Callable[..., str], *arguments: str, breakage: str = "") -> dict[str, Any]:
    code = f"{textwrap.dedent(breakage)}\n{RUN}"
    out = run_child(code, *arguments, "--json", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    result: dict[str, Any] = json.loads(out)["result"]
    return result


@pytest.mark.slow
def test_a_killed_writer_leaves_the_state_before_or_after_its_operation(run_child: Callable[..., str]) -> None:
    result = run(run_child, "kill", "--kills", "200")
    assert result["kills"] == 200
    assert result["in_flight"] > 100
    for kind in ("put", "add", "replace", "delete", "re-add", "compact"):
        assert result["undone"][kind] + result["done"][kind] > 0, kind
    assert sum(result["undone"].values()) > 0
    assert sum(result["done"].values()) > 0
    assert result["chunks_checked"] > 500


@pytest.mark.slow
def test_a_flipped_bit_is_found_or_does_no_harm(run_child: Callable[..., str]) -> None:
    result = run(run_child, "flips", "--flips", "200")
    assert sum(result["outcomes"].values()) == 200
    assert result["outcomes"]["WRONG"] == result["outcomes"]["hung"] == 0
    for part, outcomes in result["parts"].items():
        if part.startswith(("row ", "KV ")):
            assert outcomes.keys() <= {"error", "verify", "died"}, part
    assert {"KV payload", "KV header", "row of metas", "row key", "meta page", "free page"} <= result["parts"].keys()


@pytest.mark.slow
def test_processes_on_one_store_never_read_what_nobody_wrote(run_child: Callable[..., str]) -> None:
    result = run(run_child, "mix", "--processes", "4", "--seconds", "8")
    assert all(n > 0 for n in result["operations"].values())
    assert result["refused"] > 0  # there were races
    assert result["chunks_checked"] > 500
    assert result["documents_checked"] > 500


BREAKAGES = {
    # Each chunk in a transaction of its own.
    "kill": """
        from pdllm_store import LMDBStore
        put = LMDBStore.put
        LMDBStore.put = lambda store, model, items: sum(put(store, model, [item]) for item in items)
        """,
    "flips": """
        from functools import partial
        from pdllm_store import LMDBStore
        LMDBStore.open = partial(LMDBStore.open, verify_reads=False)
        """,
    "mix": """
        import lmdb
        open_ = lmdb.open
        lmdb.open = lambda *arguments, **options: open_(*arguments, **{**options, "lock": False})
        """,
}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["kill", "--kills", "100"], "kill: kill .* documents and chunks held are"),
        (["flips", "--flips", "60"], "flips: .* of 60 flips were not found, or gave something false"),
        (["mix", "--seconds", "5"], "mix: process . of 4 failed"),
    ],
)
def test_a_campaign_finds_a_store_that_breaks_its_promise(
    run_child: Callable[..., str], arguments: list[str], sentence: str
) -> None:
    with pytest.raises(AssertionError, match=f"(?s){sentence}"):
        run(run_child, *arguments, breakage=BREAKAGES[arguments[0]])
