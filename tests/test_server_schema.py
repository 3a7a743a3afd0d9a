"""Requests made up from the server's own description: whatever comes, it answers as it says it does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from pdllm_store import MemoryStore
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
)
from serving import Site, served
from test_engine import TEXTS

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, negative_data_rejection]


@pytest.fixture(scope="module")
def site(tiny_model: LoadedModel) -> Iterator[Site]:
    options = AskOptions(threshold=0.01, score_window=float("inf"), abstain=False, candidates=4, max_new_tokens=8)
    with RagEngine.open(MemoryStore(kv_dtype="float32"), tiny_model, chunk_len=64, options=options) as engine:
        engine.prefill([InputDocument(name, text, name) for name, text in TEXTS.items()])
        with served(engine) as running:
            yield running


def test_every_route_answers_as_it_is_described(site: Site) -> None:
    schema = schemathesis.openapi.from_url(f"{site.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 10
    for operation, mode in itertools.product(operations, (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)):
        if mode == GenerationMode.NEGATIVE and not (operation.body or operation.query):
            continue  # nothing can be wrong with it

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
        def answers_as_described(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS)

        answers_as_described()
    for route, status in (("/v1/qa", 200), ("/v1/qa", 422), ("/v1/documents", 422)):
        assert site.metric(f'pdllm_requests_total{{method="POST",route="{route}",status="{status}"}}') > 0
