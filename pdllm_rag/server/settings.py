"""How the server is set: where it listens, who may use it, and every limit.

Each is an argument of `ServerSettings`, or an environment variable of its name: PDLLM_PORT, PDLLM_MAX_BATCH.
"""

from __future__ import annotations

import hashlib
import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from pdllm_rag.history import MAX_TOKENS

LEAST_KEY_CHARS = 16

Names = Annotated[tuple[str, ...], NoDecode]  # separated by commas in the environment


class ServerSettings(BaseSettings):
    """Settings of one server.

    Attributes:
        host, port: where it listens.
        api_key: who brings it may use the server; further ones stand in `api_key_file`, one a line.
        without_key: listen on a public address without any key.
        allowed_hosts: names that a Host header may have, besides localhost and the address listened on; "*" is any.
        cors_origins: origins of other sites' pages that may use the server, such as https://app.example.org.
        max_batch: questions that are answered together.
        max_waiting: questions that wait for their turn; further ones get 429.
        request_seconds: from a question's arrival to the end of its answer.
        shutdown_seconds: that running answers get when the server is stopped.
        max_question_bytes: of the body of a question or conversation.
        max_question_chars, max_k, max_answer_tokens: of one question.
        max_history_tokens: of a conversation before its last question; the oldest turns are left out.
        max_json_bytes, max_upload_bytes: of the body of a request that brings documents, as JSON or as files.
        max_file_bytes: of each file; max_document_chars: of the text of each document.
        max_documents: that one request brings.
        max_jobs: requests with documents that wait to be read in.
        parse_seconds, parse_bytes: time and memory that reading one file may take.
    """

    model_config = SettingsConfigDict(env_prefix="PDLLM_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    without_key: bool = False
    allowed_hosts: Names = ()
    cors_origins: Names = ()
    max_batch: PositiveInt = 8
    max_waiting: PositiveInt = 32
    request_seconds: PositiveFloat = 120.0
    shutdown_seconds: PositiveInt = 10
    max_question_bytes: PositiveInt = 256 * 2**10
    max_question_chars: PositiveInt = 8000
    max_k: PositiveInt = 32
    max_answer_tokens: PositiveInt = 512
    max_history_tokens: Annotated[int, Field(ge=0)] = MAX_TOKENS
    max_json_bytes: PositiveInt = 8 * 2**20
    max_upload_bytes: PositiveInt = 64 * 2**20
    max_file_bytes: PositiveInt = 32 * 2**20
    max_document_chars: PositiveInt = 4 * 2**20
    max_documents: PositiveInt = 100
    max_jobs: PositiveInt = 16
    parse_seconds: PositiveFloat = 30.0
    parse_bytes: PositiveInt = 2**30

    @field_validator("allowed_hosts", "cors_origins", mode="before")
    @classmethod
    def _split(cls, given: object) -> object:
        return tuple(part.strip() for part in given.split(",") if part.strip()) if isinstance(given, str) else given

    def key_digests(self) -> tuple[bytes, ...]:
        """SHA-256 of every key that is admitted.

        Raises:
            OSError: the key file cannot be read.
            ValueError: a key is too short or no plain word, or the file holds none.
        """
        keys = [] if self.api_key is None else [self.api_key.get_secret_value()]
        if self.api_key_file is not None:
            found = [line.strip() for line in self.api_key_file.read_text("utf-8").splitlines() if line.strip()]
            if not found:
                raise ValueError(f"the key file {self.api_key_file} is empty; expected a key a line")
            keys += found
        for key in keys:
            if len(key) < LEAST_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(
                    f"an API key of {len(key)} characters was given; expected {LEAST_KEY_CHARS} or more letters, "
                    "digits and signs. Make one with: openssl rand -hex 32"
                )
        return tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def check_bind(self) -> None:
        """Refuse a public address without a key.

        Raises:
            ValueError: there is none, and `without_key` was not given; OSError for the key file.
        """
        if not self.key_digests() and not self.is_loopback and not self.without_key:
            raise ValueError(
                f"host is {self.host}, which others can reach, and there is no API key; set PDLLM_API_KEY or "
                "--api-key-file, listen on 127.0.0.1, or give --without-key to let everybody in"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        address = _address(self.host)
        return self.host == "localhost" or (address is not None and address.is_loopback)

    def admits_host(self, header: str) -> bool:
        """Whether a Host header is this server's: a name that was listed, or an address, which no DNS can forge."""
        name = header.rsplit(":", 1)[0] if not header.endswith("]") else header
        name = name.lower().rstrip(".").removeprefix("[").removesuffix("]")
        if name in ("localhost", self.host, *map(str.lower, self.allowed_hosts)) or "*" in self.allowed_hosts:
            return True
        address = _address(name)
        return address is not None and (address.is_loopback or not self.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
