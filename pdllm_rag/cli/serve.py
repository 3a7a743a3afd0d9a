"""`pdllm serve`: questions and documents over HTTP, with a web page."""

from __future__ import annotations

import argparse
import gc
import signal
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pdllm_rag.cli.console import say
from pdllm_rag.cli.opening import add_model, add_store, open_engine
from pdllm_rag.cli.options import add_load
from pdllm_rag.cli.values import positive_int

if TYPE_CHECKING:
    from pdllm_rag.engine import RagEngine

# Those settings of the server that no list of options needs to show; a test keeps them equal to the server's.
LIMITS = (
    *("max_waiting", "request_seconds", "shutdown_seconds", "max_question_bytes", "max_question_chars", "max_k"),
    *("max_answer_tokens", "max_history_tokens", "max_json_bytes", "max_upload_bytes", "max_file_bytes"),
    *("max_document_chars", "max_documents", "max_jobs", "parse_seconds", "parse_bytes"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="answer questions over HTTP",
        description="Serve a store: POST /v1/qa, an OpenAI-shaped POST /v1/chat/completions, documents, metrics and a "
        "web page. Further limits are options, too: docs/server.md has them.",
    )
    add_store(parser, help="folder or URL of the store; it is made if there is none", may_read_only=True)
    add_model(parser)
    add_load(parser)
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=_port, help="(default: 8000)")
    access = parser.add_argument_group("access")
    access.add_argument(
        "--api-key-file", metavar="FILE", help="keys, one a line; or set PDLLM_API_KEY (openssl rand -hex 32 > FILE)"
    )
    access.add_argument(
        "--without-key", action="store_true", default=None, help="let everybody in, on a public address too"
    )
    access.add_argument(
        "--allow-host", action="append", metavar="NAME", help="name under which the server may be asked for"
    )
    access.add_argument(
        "--cors-origin", action="append", metavar="ORIGIN", help="other site whose pages may use the server"
    )
    parser.add_argument("--max-batch", type=positive_int, metavar="N", help="questions answered together (default: 8)")
    for name in LIMITS:
        parser.add_argument(f"--{name.replace('_', '-')}", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def settings_variables() -> set[str]:
    """The environment variables of the server's settings."""
    from pdllm_rag.server import ServerSettings

    return {f"PDLLM_{name.upper()}" for name in ServerSettings.model_fields}


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; running answers are finished or given up, and the store is closed."""
    import uvicorn

    from pdllm_rag.server import ServerSettings, create_app

    given = {
        "host": args.host,
        "port": args.port,
        "api_key_file": args.api_key_file,
        "without_key": args.without_key,
        "allowed_hosts": args.allow_host,
        "cors_origins": args.cors_origin,
        "max_batch": args.max_batch,
        **{name: getattr(args, name) for name in LIMITS},
    }
    settings = ServerSettings(**{name: value for name, value in given.items() if value is not None})
    settings.check_bind()
    listening = _bound(settings.host, settings.port)  # before the model is loaded: it may not be to be had
    with listening, open_engine(args, create=not args.read_only, load=args.load) as engine:
        if settings.without_key and not settings.is_loopback and not settings.key_digests():
            say("warning", "anybody who reaches this address can read, add and delete documents")
        _warm_up(engine)
        listening.listen()  # who reads the next line may connect at once
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        say("serving", f"{args.store} with {args.model} on http://{shown}:{port} (Ctrl-C stops it)")
        config = uvicorn.Config(
            create_app(engine, settings),
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=settings.shutdown_seconds,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # uvicorn has its own handlers, and raises them again when it is done
        uvicorn.Server(config).run([listening])
    return 0


def _warm_up(engine: RagEngine) -> None:
    """Load what the first question needs, and spare all that is loaded from garbage collection.

    A full collection looks at every object of torch and transformers, with everything else at a stand: half a second.
    """
    for _ in engine.asked("Is it there?", alone=True, max_new_tokens=1).events():
        pass
    gc.collect()
    gc.freeze()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address; nobody can connect before the server listens."""
    with ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            opened = stack.enter_context(socket.socket(family, kind, protocol))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
        except OSError as error:
            reason = f"{error.strerror}; take another --port or --host"
            raise OSError(f"cannot listen on {host}, port {port}: {reason}") from error
        stack.pop_all()
    return opened


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a port from 0 to 65535")
    return int(text)
