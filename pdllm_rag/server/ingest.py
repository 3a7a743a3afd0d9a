"""Documents that came over HTTP go into the store in a background thread, one request after the other.

A job is what a client may ask after. Jobs are kept in memory: a server that is stopped forgets them, while every
document that a job has counted stays, and a request sent again costs nothing for those.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdllm_rag.engine import RagEngine
from pdllm_rag.prefill import Failure, InputDocument, PrefillReport, Progress
from pdllm_rag.server.failures import ApiError, as_api_error

logger = logging.getLogger(__name__)

KEPT_JOBS = 1000


class _Stopped(Exception):
    """The server is stopping."""


@dataclass
class Job:
    """Documents on their way into the store.

    Attributes:
        state: queued, running, done, failed (nothing more will go in) or stopped (with the server).
        refused: what could not be read, before the job began.
        n_done, n_tokens: documents dealt with and tokens encoded so far.
    """

    documents: Sequence[InputDocument]
    refused: Sequence[Failure]
    job_id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "queued"
    error: str | None = None
    n_done: int = 0
    n_tokens: int = 0
    report: PrefillReport | None = None
    created: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.doc_ids = [document.doc_id for document in self.documents]

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        report = self.report or PrefillReport()
        failed = [failure._asdict() for failure in (*self.refused, *report.failed)]
        counts = {"added": report.added, "updated": report.updated, "unchanged": report.unchanged}
        return {
            "id": self.job_id,
            "object": "job",
            "state": self.state,
            "error": self.error,
            "created": int(self.created),
            "documents": {"total": len(self.doc_ids), "done": self.n_done, **counts, "failed": failed},
            "doc_ids": self.doc_ids,
            "chunks": {"computed": report.chunks_computed, "reused": report.chunks_reused},
            "tokens": self.n_tokens,
            "seconds": report.seconds,
        }


class Ingest:
    """The thread that prefills, and its jobs."""

    def __init__(self, engine: RagEngine, *, max_jobs: int) -> None:
        self._engine = engine
        self._max_jobs = max_jobs
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pdllm-ingest")

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def check_room(self) -> None:
        """Raises ApiError (429, 503) if no further job is taken now."""
        if self._is_closed:
            raise ApiError(503, "the server is stopping", "stopping", retry_after=5)
        if len(self._waiting) >= self._max_jobs:
            message = f"{len(self._waiting)} requests with documents are waiting, the limit is {self._max_jobs}"
            raise ApiError(429, message, "busy", retry_after=10)

    def submit(self, documents: Sequence[InputDocument], refused: Sequence[Failure] = ()) -> Job:
        """Put documents in line.

        Raises:
            ApiError: 429, the line is full; 503, the server is stopping.
        """
        job = Job(documents, refused)
        with self._changed:
            self.check_room()
            self._waiting.append(job)
            self._jobs[job.job_id] = job
            for old in [key for key, held in self._jobs.items() if held.state not in ("queued", "running")]:
                if len(self._jobs) > KEPT_JOBS:
                    del self._jobs[old]
            self._changed.notify()
        return job

    def job(self, job_id: str) -> Job | None:
        """A job by its id, None if it is not known (any more)."""
        with self._changed:
            return self._jobs.get(job_id)

    @property
    def n_waiting(self) -> int:
        """Jobs in line."""
        return len(self._waiting)

    def close(self) -> None:
        """Stop after the batch in work; what is written stays."""
        with self._changed:
            self._is_closed = True
            for job in self._waiting:
                job.state = "stopped"
            self._waiting.clear()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                job = self._waiting.popleft()
                job.state = "running"
            self._prefill(job)

    def _prefill(self, job: Job) -> None:
        def note(progress: Progress) -> None:
            job.n_done, job.n_tokens = progress.documents, progress.tokens
            if self._is_closed:
                raise _Stopped

        try:
            job.report = self._engine.prefill(list(job.documents), on_progress=note)
            job.state = "done" if len(job.report.failed) < len(job.documents) else "failed"
            job.error = None if job.state == "done" else "no document went in; `documents.failed` says why"
        except _Stopped:
            job.state, job.error = "stopped", "the server was stopped; send the documents again"
        except Exception as error:  # told to whoever asks after the job; the thread outlives it
            job.state, job.error = "failed", str(as_api_error(error))
        finally:
            job.documents = ()
        logger.info("job %s: %s, %d documents", job.job_id, job.state, job.n_done)
