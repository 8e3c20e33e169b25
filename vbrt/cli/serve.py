"""`vbrt serve`: an OpenAI-compatible server of a wrapped model, with its metrics beside it."""

import argparse
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

from vbrt.cli.open_model import add_talking, add_together, load_model
from vbrt.cli.options import add_command, config_of, integration, number
from vbrt.cli.screen import complain, warnings_as_lines
from vbrt.cli.stats import keep_stats
from vbrt.errors import VBError, describe_os_error

__all__ = ["add"]

_CONTEXT = 2048  # of a config with gpu_memory


def add(commands: Any) -> None:
    """Add `vbrt serve` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "serve",
        _run,
        help="serve a model to OpenAI clients",
        text="Starts transformers' server with the\nmodel in VB layers; requests are generated together. /metrics has "
        "vbrt's counters for Prometheus.\nCtrl-C ends it.",
        examples="  vbrt serve smollm2\n"
        "  vbrt serve ./Llama-3.1-8B-Instruct --gpu-memory 8GB --context 8192\n"
        "  vbrt serve ./Llama-3.1-8B-Instruct --config exact --host 0.0.0.0 --port 9000\n",
    )
    add_talking(parser, context="tokens of a prompt and its answer, at most (8192; 2048 with --gpu-memory)")
    parser.add_argument("--name", help="of the model in requests (that of the directory or file)")
    parser.add_argument("--host", default="localhost", help="address to listen at (localhost)")
    parser.add_argument("--port", type=number, default=8000, help="to listen at; 0: a free one (8000)")
    parser.add_argument("--sample", action="store_true", help="draw tokens, as generation_config.json says")
    add_together(parser)
    parser.add_argument(
        "--one-by-one",
        action="store_true",
        help="answer requests one after the other, each with the temperature that it asks for",
    )


def _run(args: argparse.Namespace) -> int:
    if args.one_by_one and args.kv:
        raise VBError(f"--kv {args.kv} is of the cache that requests share; leave out --one-by-one, or --kv")
    asked = _context(args)  # reports a config's errors, and what follows its own, before any slow work
    server = integration("server")
    server.check_server()
    with _listening(args.host, args.port) as listening:
        named = args.name or _name_of(args.model)
        vb, tokenizer = load_model(args)
        with vb:
            context = server.context_of(vb, asked)
            made = server.server_of(
                vb, tokenizer, named, context=context, sample=args.sample, sequences=args.sequences,
                together=not args.one_by_one, kv_bits=args.kv or 16,
            )  # fmt: skip
            _say_where(args, named, context, listening.getsockname()[1])
            if not getattr(tokenizer, "chat_template", None):
                complain("note", f"{named} has no chat template: /v1/completions continues texts")
            try:
                with _ended_by_signals(), warnings_as_lines():
                    made.run(listening)
            finally:
                keep_stats(vb.stats(experts=True))
    return 0


def _context(args: argparse.Namespace) -> int | None:
    """Tokens asked for, which a config has only with gpu_memory: then those that it has room for."""
    asked, args.context = args.context, None
    config = config_of(args)
    if config.gpu_memory is None:
        return asked
    args.context = asked
    return asked or config.context or _CONTEXT


def _say_where(args: argparse.Namespace, named: str, context: int, port: int) -> None:
    url = f"http://{args.host}:{port}"
    complain("serving", f"{named} at {url}/v1, {context} tokens a conversation; metrics at {url}/metrics")
    body = f'{{"model": "{named}", "messages": [{{"role": "user", "content": "What is the sea?"}}]}}'
    complain("try", f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    if not args.one_by_one:
        drawn = "drawn as generation_config.json says" if args.sample else "the most likely ones"
        complain(
            "note",
            f"tokens are {drawn}: what requests say of temperature, top_p and stop is not followed by transformers' "
            "continuous batching; --one-by-one follows it",
        )


def _name_of(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Bind an address before the model is loaded. Raises VBError that names the option."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise VBError(f"--host {host}, --port {port}: {error}; expected an address of this machine") from error
    with socket.socket(family, kind, protocol) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except (OSError, OverflowError) as error:
            why = describe_os_error(error) if isinstance(error, OSError) else str(error)
            raise VBError(f"--port {port}: {host} cannot be listened at: {why}; choose another, or 0") from error
        yield bound


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Take SIGTERM as Ctrl-C, and both as the end."""

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        complain("stopped", "the server has ended")
    finally:
        signal.signal(signal.SIGTERM, before)
