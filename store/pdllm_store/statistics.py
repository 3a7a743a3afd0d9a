"""What the tables say of a store as a whole; what is damaged of it is counted anew and told."""

from __future__ import annotations

from typing import Any

from pdllm_store.counts import State, read_counts, read_state, recount, state_or_new
from pdllm_store.errors import RecordDamagedError
from pdllm_store.fingerprints import fingerprints
from pdllm_store.rows import OnDamage
from pdllm_store.tables import Tables
from pdllm_store.types import ModelStats


def read_state_or_new(tables: Tables, on_damage: OnDamage) -> State:
    """Generation and evictions; of a damaged row, what stands in for them until it is written again."""
    try:
        return read_state(tables)
    except RecordDamagedError as error:
        on_damage(error)
        return state_or_new(tables)


def read_stats(tables: Tables, on_damage: OnDamage) -> dict[str, Any]:
    """The fields of `StoreStats` that are in the tables, but for the cap."""
    try:
        by_model = read_counts(tables)
    except RecordDamagedError as error:
        on_damage(error)
        by_model = recount(tables)
    state, space = read_state_or_new(tables, on_damage), tables.space()
    known = {fingerprint.digest for fingerprint in fingerprints(tables, on_damage)}
    total = ModelStats(*(sum(column) for column in zip(ModelStats(), *by_model.values(), strict=True)))
    return {
        **total._asdict(),
        **space._asdict(),
        "evictions": state.evictions,
        "generation": state.generation,
        "fingerprints": {key.hex(): by_model.get(key, ModelStats()) for key in sorted(known | set(by_model))},
    }
