"""Questions over one corpus, answered by several replicas on a Ray cluster, and a new corpus without a pause.

pip install 'pdllm-rag[scale]'; then, on a node of a cluster or on one machine:

    python examples/ray_serve/app.py --store kb --replicas 2            # http://127.0.0.1:8000/v1/qa
    curl -d '{"question": "Who runs the order desk in Porto?"}' -H 'Content-Type: application/json' localhost:8000/v1/qa
    curl -X PUT -d '{"store": "kb-2"}' -H 'Content-Type: application/json' localhost:8000/corpus

- Each replica has the model and opens the store read-only; the folder is the same on every node.
- Each answers one question at a time, others wait at the door. What a client may ask again later, because a replica
  was lost or too many wait, is a 503 with Retry-After; it changes nothing, so it may be asked again.
- A new corpus is another folder, filled beside the old one. Serve moves replica by replica, each between two questions;
  an answer names the corpus that it is from.
- The door is a process of this script, without a key or TLS: put a proxy in front of it, and keep /corpus inside.
"""

from __future__ import annotations

import argparse
import os
import threading
from typing import Any

import ray
import uvicorn
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from pdllm_rag import RagEngine, load_model
from pdllm_rag.distributed.cluster import connected
from pdllm_rag.errors import PdllmError

RETRY = (RayActorError, BackPressureError, DeploymentUnavailableError)
MAX_WAITING = 32


class Question(BaseModel):
    """A question and how many tokens its answer may have."""

    question: str = Field(min_length=1, max_length=8000)
    max_new_tokens: int = Field(default=32, ge=1, le=512)


class Corpus(BaseModel):
    """The folder of a store."""

    store: str


class Answers:
    """A replica: one model, and the store of the corpus that is served now."""

    def __init__(self, model: str) -> None:
        self._model = load_model(model, device="auto")
        self._engine: RagEngine | None = None
        self._turn = threading.Lock()

    def reconfigure(self, corpus: dict[str, str]) -> None:
        """Serve calls this at the start and whenever the corpus is another one."""
        opened = RagEngine.open(corpus["store"], self._model, create=False, store_options={"read_only": True})
        with self._turn:
            before, self._engine = self._engine, opened
        if before is not None:
            before.close()

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._turn:
            assert self._engine is not None
            answer = self._engine.answer(question.pop("question"), **question)
            return {**answer.as_dict(), "corpus": self._engine.store.path}


def deploy(store: str, model: str, *, n_replicas: int, n_cpus: float = 1) -> DeploymentHandle:
    """Start the replicas, or, if they run already, move one after the other to another store; returns when all have."""
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    deployment = serve.deployment(
        Answers,
        num_replicas=n_replicas,
        ray_actor_options={"num_cpus": n_cpus, "num_gpus": int(ray.cluster_resources().get("GPU", 0) >= n_replicas)},
        max_ongoing_requests=1,
        max_queued_requests=MAX_WAITING,
        health_check_period_s=1,
        user_config={"store": os.path.abspath(store)},
    )
    return serve.run(deployment.bind(model), name="answers", route_prefix=None)


def make_door(handle: DeploymentHandle, model: str, **options: Any) -> FastAPI:
    """What clients talk to."""
    door = FastAPI()

    @door.exception_handler(PdllmError)
    @door.exception_handler(ValueError)
    async def refused(_: object, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(getattr(error, "cause", error))}, 422)

    async def busy(_: object, __: Exception) -> JSONResponse:
        return JSONResponse({"error": "no replica is free; ask again"}, 503, {"Retry-After": "1"})

    for kind in RETRY:
        door.add_exception_handler(kind, busy)

    @door.post("/v1/qa")
    async def ask(question: Question) -> dict[str, Any]:
        return await handle.remote(question.model_dump())

    @door.put("/corpus")
    async def roll(corpus: Corpus) -> Corpus:
        await run_in_threadpool(deploy, corpus.store, model, **options)
        return corpus

    return door


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--address", help="of the cluster (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    with connected(args.address):
        handle = deploy(args.store, args.model, n_replicas=args.replicas)
        uvicorn.run(make_door(handle, args.model, n_replicas=args.replicas), port=args.port)


if __name__ == "__main__":
    main()
