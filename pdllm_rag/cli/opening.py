"""The store of a command: the arguments that say which, its key file, and opening it."""

from __future__ import annotations

import argparse
import os
import re
import stat
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.console import say
from pdllm_rag.cli.values import size

if TYPE_CHECKING:
    from pdllm_store import KVDtype, LMDBStore, ObjectChunkStore

    from pdllm_rag.engine import RagEngine

KEY_BYTES = 32
STORE_OPTIONS = ("store", "cache", "cache_bytes", "key_file", "read_only")
_MOST_BYTES = 4096  # that are read of a key file


def add_store(
    parser: argparse.ArgumentParser,
    *,
    help: str = "folder or URL of the store",
    required: bool = True,
    may_read_only: bool = False,
    shared: bool = True,
) -> None:
    """Add `--store`, its cache and `--key-file`, and `--read-only` to a command that needs to change nothing.

    With `shared` False a store that is configured for several commands is not for this one.
    """
    if not shared:
        parser.set_defaults(own_options=STORE_OPTIONS)
    parser.add_argument("--store", required=required, metavar="DIR", help=help)
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="of a store given by URL (s3, gs, az, file:///): local folder that keeps what is read and written",
    )
    parser.add_argument("--cache-bytes", type=size, metavar="SIZE", help="cap of that folder, such as 20GB")
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="key that the store is made with: 32 bytes, or 64 hex digits (umask 077; openssl rand -hex 32 > FILE)",
    )
    if not may_read_only:
        parser.set_defaults(read_only=None)
        return
    parser.add_argument(
        "--read-only",
        action="store_true",
        help="change nothing in the store, not even the order of use; where its folder cannot be written, nobody may "
        "write to the store meanwhile",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, its adapters, and `--device`."""
    parser.add_argument("--model", default="demo", help="bundled model or checkpoint folder (default: demo)")
    parser.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="where the model computes: auto (the first GPU if there is one), cpu or cuda (default: auto)",
    )
    add_adapters(parser)


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """Add `--adapter` and `--canvas-adapter`."""
    parser.add_argument(
        "--adapter", metavar="NAME", help="LoRA for every row; KV stored without it is not read with it"
    )
    parser.add_argument("--canvas-adapter", metavar="NAME", help="LoRA for decoder d2f, on question and answer only")


def adapters(args: argparse.Namespace) -> dict[str, Any]:
    """The adapters of a command line, for `load_model` and `RagEngine.open`."""
    return {"adapter": args.adapter, "canvas_adapter": args.canvas_adapter}


def is_store_given(args: argparse.Namespace) -> bool:
    """Whether `--store` was given, where it need not be.

    Raises:
        ValueError: it was not, but something that says how to open it.
    """
    options = (args.key_file, args.read_only or None, args.cache, args.cache_bytes)
    if args.store is None and any(option is not None for option in options):
        raise ValueError("--key-file, --read-only and --cache say how a store is opened, and --store is missing")
    return args.store is not None


def open_store(
    args: argparse.Namespace, *, create: bool = False, kv_dtype: KVDtype | None = None, max_bytes: int | None = None
) -> LMDBStore | ObjectChunkStore:
    """The store of a command line; it must be there unless `create`.

    Raises:
        StoreError; OSError and ValueError for the key file.
    """
    from pdllm_store import open_store as open_at

    options = {**_options(args), "max_bytes": max_bytes}
    return open_at(args.store, create=create, kv_dtype=kv_dtype, **options)


def open_engine(
    args: argparse.Namespace,
    *,
    create: bool = False,
    kv_dtype: KVDtype | None = None,
    chunk_len: int | None = None,
    max_bytes: int | None = None,
    load: str = "store",
) -> RagEngine:
    """The model of a command line over its store.

    Raises:
        StoreError, ModelError; OSError and ValueError for the key file.
    """
    from pdllm_rag.engine import RagEngine

    options = {**_options(args), "max_bytes": max_bytes}
    return RagEngine.open(
        args.store,
        args.model,
        device=args.device,
        create=create,
        kv_dtype=kv_dtype,
        chunk_len=chunk_len,
        store_options=options,
        load=load,
        **adapters(args) if isinstance(args.model, str) else {},
    )


def read_key(path: str) -> bytes:
    """The key in a file: 32 bytes, or 64 hex digits and perhaps a line end.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        content = file.read(_MOST_BYTES)
    if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_IRGRP | stat.S_IROTH):
        say("warning", f"the key in {path} can be read by others: chmod 600 {path}")
    if len(content) == KEY_BYTES:
        return content
    if found := re.fullmatch(rb"([0-9A-Fa-f]{64})\r?\n?", content):
        return bytes.fromhex(found[1].decode("ascii"))
    got = f"{len(content):,} bytes" + (" or more" if len(content) == _MOST_BYTES else "")
    if 64 <= len(content) <= 66 and re.search(rb"[^0-9A-Fa-f\s]", content):
        got += " that are not all hex digits"
    raise ValueError(
        f"the key file {path} holds {got}, expected 32 bytes or 64 hex digits; make one with: "
        "(umask 077; openssl rand -hex 32 > FILE)"
    )


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What `pdllm_store.open_store` is to be told. Raises StoreError if it would have to write where nobody may."""
    from pdllm_store import StoreError

    if args.read_only is False and not _is_writable(args.store):
        raise StoreError(f"the store {args.store} cannot be written here; --read-only reads it and changes nothing")
    key = None if args.key_file is None else read_key(args.key_file)
    given = {"key": key, "cache": args.cache, "cache_bytes": args.cache_bytes}
    return {"read_only": bool(args.read_only), **{name: value for name, value in given.items() if value is not None}}


def _is_writable(folder: str) -> bool:
    """Whether the store in a folder can be changed; True if there is none."""
    data, *others = (os.path.join(folder, name) for name in ("data.mdb", "lock.mdb", "store.lock"))
    if not os.path.exists(data):
        return True
    return all(os.access(name, os.W_OK) for name in (folder, data, *filter(os.path.exists, others)))
