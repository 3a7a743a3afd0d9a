"""Documents: bring them in as JSON or as files, list, read and delete them; and the jobs that read them in.

An id is data: it is never used as a path, whatever it looks like.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import unicodedata
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from pdllm_store import DocumentNotFoundError, StoreReadOnlyError
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from pdllm_rag.chunking import is_blank
from pdllm_rag.errors import DocumentError
from pdllm_rag.ingest import file_document
from pdllm_rag.metadata import shown
from pdllm_rag.prefill import Failure, InputDocument
from pdllm_rag.server.failures import ApiError, as_api_error
from pdllm_rag.server.services import Services

MAX_ID_BYTES = 480
FORM = "multipart/form-data"
SOURCE = "upload:"  # of documents that came over HTTP: no other source may take over their ids, nor they its

Text = Annotated[StrictStr, Field(max_length=1000)]
Start = Annotated[int, Query(ge=0, le=2**40, description="first code point of the text to return")]
End = Annotated[int | None, Query(ge=0, le=2**40, description="code point behind the last one")]
Offset = Annotated[int, Query(ge=0, le=2**40)]
Limit = Annotated[int, Query(ge=1, le=1000)]


class TextDocument(BaseModel):
    """A document as text."""

    model_config = ConfigDict(extra="forbid")

    doc_id: Annotated[StrictStr, Field(min_length=1)]
    text: StrictStr
    metadata: Annotated[dict[Text, Text | StrictInt | StrictFloat | StrictBool | None], Field(max_length=32)] = {}


class TextDocuments(BaseModel):
    """Documents as JSON."""

    model_config = ConfigDict(extra="forbid")

    documents: Annotated[list[TextDocument], Field(min_length=1)]


def router(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["documents"])
    engine = services.engine

    @routes.post(
        "/v1/documents",
        summary="Add or replace documents",
        status_code=202,
        openapi_extra={"requestBody": {"required": True, "content": _bodies()}},
    )
    async def add(request: Request) -> JSONResponse:
        """Takes JSON (`documents`: doc_id, text, metadata) or files (multipart field `file`; a file's name is its id).

        Files are read at once; what cannot be read is in `documents.failed`, and if nothing can, the status is 422. The
        rest goes in in the background: ask after the job.
        """
        if engine.store.read_only:
            raise as_api_error(StoreReadOnlyError())
        services.ingest.check_room()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == FORM:
            documents, refused = await _from_files(request, services)
        elif kind == "application/json":
            documents, refused = await _from_json(request, services)
        else:
            raise ApiError(415, f"the body is neither application/json nor {FORM}", "unsupported_media_type")
        if not documents:
            raise ApiError(422, "; ".join(f"{name}: {why}" for name, why in refused), "unreadable_documents")
        job = services.ingest.submit(documents, refused)
        return JSONResponse(job.as_dict(), 202, {"Location": f"/v1/jobs/{job.job_id}"})

    @routes.get("/v1/jobs/{job_id}", summary="How far a job is")
    async def job(job_id: str) -> dict[str, Any]:
        """States: queued, running, done, failed, stopped."""
        found = services.ingest.job(job_id)
        if found is None:
            raise ApiError(404, "there is no such job; the server forgets old ones and those of its last run", "no_job")
        return found.as_dict()

    @routes.get("/v1/documents", summary="List documents")
    def documents(offset: Offset = 0, limit: Limit = 100) -> dict[str, Any]:
        """By doc_id, with what the store takes and holds."""
        infos, stats = engine.documents(), engine.store.stats()
        store = {name: getattr(stats, f"{name}_bytes") for name in ("used", "free", "file", "max", "kv")}
        on_disk = os.path.isdir(engine.store.path)
        store["disk_free"] = shutil.disk_usage(engine.store.path).free if on_disk else None
        listed = [
            {
                "doc_id": info.doc_id,
                "chunks": len(info.chunk_ids),
                "tokens": info.n_tokens,
                "bytes": info.n_bytes,
                "pinned": info.pinned,
                "metadata": shown(info.metadata),
            }
            for info in infos[offset : offset + limit]
        ]
        about = {"bytes": store, "chunks": stats.chunks, "evicted": stats.evicted, "kv_dtype": stats.kv_dtype}
        return {"documents": listed, "total": len(infos), "store": {**about, "read_only": engine.store.read_only}}

    @routes.get("/v1/documents/{doc_id:path}", summary="Read a document")
    def read(doc_id: str, start: Start = 0, end: End = None) -> dict[str, Any]:
        """Its text between two code points (all of it by default), and where its chunks stand."""
        try:
            document = engine.store.document(engine.fingerprint, doc_id)
        except DocumentNotFoundError:
            raise _unknown() from None
        text = document.text[start:end]
        chunks = [
            {"ordinal": ref.ordinal, "char_start": ref.char_start, "char_end": ref.char_end, "page": ref.page}
            for ref in document.chunks
            if ref.char_end > start and (end is None or ref.char_start < end)
        ]
        place = {"doc_id": doc_id, "start": start, "end": start + len(text), "chars": len(document.text)}
        return {**place, "text": text, "chunks": chunks, "metadata": dict(document.metadata)}

    @routes.delete("/v1/documents/{doc_id:path}", summary="Delete a document")
    def delete(doc_id: str) -> dict[str, Any]:
        """Its text, chunks, KV and index entries; answers that are running keep what they have loaded."""
        if not engine.delete(doc_id):
            raise _unknown()
        return {"doc_id": doc_id, "deleted": True}

    return routes


async def _from_json(request: Request, services: Services) -> tuple[list[InputDocument], list[Failure]]:
    try:
        body = await request.body()
        given = (await asyncio.to_thread(TextDocuments.model_validate_json, body)).documents
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ApiError(422, f"{place or 'body'}: {first['msg']}", "bad_request", param=place or None) from None
    services.check_limit("the number of documents", len(given), services.settings.max_documents)
    documents, refused = [], []
    for entry in given:
        doc_id = _checked_id(entry.doc_id)
        services.check_limit("a document's length", len(entry.text), services.settings.max_document_chars)
        if is_blank(entry.text):
            refused.append(Failure(doc_id, "holds only white space or invisible characters"))
        else:
            documents.append(InputDocument(doc_id, entry.text, SOURCE + doc_id, metadata=entry.metadata))
    return documents, refused


async def _from_files(request: Request, services: Services) -> tuple[list[InputDocument], list[Failure]]:
    settings = services.settings
    documents: list[InputDocument] = []
    refused: list[Failure] = []
    try:
        async with request.form(max_files=settings.max_documents, max_fields=0) as form:
            files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
            if not files:
                raise ApiError(422, "the form has no file; expected one or more in the field `file`", "bad_request")
            for file in files:
                doc_id = _checked_id(file.filename or "")
                try:
                    documents.append(await _read(file, doc_id, services))
                except DocumentError as error:
                    refused.append(Failure(doc_id, str(error).removeprefix(f"{doc_id}: ")))
    except HTTPException as error:
        if error.status_code != 400:
            raise
        raise ApiError(422, f"the form cannot be read: {error.detail}", "bad_request") from None
    return documents, refused


async def _read(file: UploadFile, doc_id: str, services: Services) -> InputDocument:
    """A file's document. Raises DocumentError, or ApiError 413 for a file that is too large."""
    limit = services.settings.max_file_bytes
    if file.size is None or file.size > limit:
        raise ApiError(413, f"a file is larger than the limit of {limit:,} bytes", "too_large")
    async with services.reader.turn:
        content = await asyncio.to_thread(services.reader.read, await file.read(), doc_id)
    services.check_limit("a document's length", len(content.text), services.settings.max_document_chars)
    return file_document(doc_id, SOURCE + doc_id, content)


def _checked_id(given: str) -> str:
    """An id in NFC. Raises ApiError 422 for one that is empty, too long or not printable."""
    doc_id = unicodedata.normalize("NFC", given)
    try:
        n_bytes = len(doc_id.encode())
    except UnicodeEncodeError:
        n_bytes = 0
    if not 1 <= n_bytes <= MAX_ID_BYTES or not doc_id.isprintable() or doc_id in (".", ".."):  # no URL can name those
        expected = f"expected 1 to {MAX_ID_BYTES} bytes of printable UTF-8, not . or .."
        raise ApiError(422, f"a document's id (a file's name) is {n_bytes} bytes; {expected}", "bad_id")
    return doc_id


def _unknown() -> ApiError:
    return ApiError(404, "there is no document of that id", "no_document")


def _bodies() -> dict[str, Any]:
    """What POST takes, for the schema."""
    file = {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
    form = {"type": "object", "required": ["file"], "properties": {"file": file}}
    as_json = TextDocuments.model_json_schema()
    as_json["properties"]["documents"]["items"] = as_json.pop("$defs")["TextDocument"]
    return {"application/json": {"schema": as_json}, FORM: {"schema": form}}
