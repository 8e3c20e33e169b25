"""transformers' OpenAI-compatible server, for one model that this process has loaded.

Requests share a generation loop, in a thread of its own. Left alone, an error in it ends all requests and all later
ones, while the server goes on. Here the loop begins anew, with eager decode steps; an error soon after that ends the
server, so that who supervises the process starts it again.

| feature | without it |
| --- | --- |
| `SERVER` | `vbrt serve` raises |
"""

import asyncio
import contextlib
import importlib.util
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import LibraryError, VBError, first_line
from vbrt.host.logger import warn
from vbrt.libraries.probe import Feature
from vbrt.libraries.transformers_batching import CodedStorage, manager_of
from vbrt.libraries.transformers_flash import flash_batches
from vbrt.libraries.transformers_runner import DecodeSteps

__all__ = ["FEATURES", "SERVER", "Server", "check_server"]

_MANAGER = "cli.serving.model_manager"
_API = "generation.continuous_batching.continuous_api"
_STATE = "cli.serving.utils:GenerationState"
SERVER = Feature(
    "transformers",
    (
        "cli.serve:Serve(continuous_batching, device, log_level, non_blocking)",
        "cli.serve:Serve.start_server",
        f"{_MANAGER}:ModelManager.load_model_and_processor(model_id_and_revision)",
        f"{_MANAGER}:ModelManager.process_model_name(model_id)",
        f"{_MANAGER}:ModelManager.shutdown",
        f"{_MANAGER}:TimedModel(model, timeout_seconds, processor)",
        f"{_STATE}.get_manager(model_id, use_cb)",
        f"{_STATE}.shutdown",
        "cli.serving.utils:CBGenerateManager.init_cb(model, gen_config)",
        "cli.serving.utils:GenerateManager.submit(fn)",
        *(
            f"{_API}:ContinuousBatchingManager.{part}"
            for part in (
                "_fail_all_remaining_requests(error, batch_processor)",
                "_handle_critical_error(error, batch_processor)",
                "add_request(input_ids, request_id)",
                "cancel_request(request_id)",
                "is_running",
                "register_result_handler(request_id, callback)",
                "start",
                "stop(hard_stop)",
            )
        ),
        *(
            f"cli.serving.utils:BaseGenerateManager.{part}(model, processor, inputs, gen_config, request_id)"
            for part in ("generate_streaming", "generate_non_streaming")
        ),
    ),
    without="`vbrt serve` does not start; pip install -U 'vbrt[serve]'",
)
FEATURES = (SERVER,)

_PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")  # of transformers[serving]
_LEAVE_SECONDS = 5  # that requests in flight have to end by themselves when the server is stopped
_READ_SECONDS = 30  # that clients then have to read what there is
_POLL_SECONDS = 0.1
_APART_SECONDS = 60  # errors of the loop that are closer end the server
_STOPPED = "the server has been stopped before this answer ended"


def check_server() -> None:
    """Raise LibraryError: a package that the server needs is not installed, or transformers lacks a part."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise LibraryError(f"transformers' server needs {', '.join(missing)}; pip install 'vbrt[serve]'")
    SERVER.check()


class Server:
    """HTTP server of one model, whose other requests are refused. Raises LibraryError as `check_server` does.

    Args:
        model: a causal language model.
        tokenizer: its own.
        name: under which requests ask for it; those that name none get it, too.
        context: tokens of a prompt and its answer: longer prompts are refused, answers end there.
        sample: draw tokens as the model's generation config says, else greedily; for all requests of a batch.
        cache: of transformers' ContinuousBatchingConfig; None: one request after the other.
        storage: of a KV cache of many requests; None: the model's dtype.
        steps: context of what runs decode steps of many requests; of None: they are eager.
        metrics: text and content type of `/metrics`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        name: str,
        *,
        context: int,
        sample: bool,
        cache: dict[str, Any] | None,
        storage: CodedStorage | None,
        steps: AbstractContextManager[DecodeSteps | None],
        metrics: Callable[[], tuple[str, str]],
    ) -> None:
        check_server()
        self._made = _unstarted(continuous_batching=cache is not None, device=model.device.type)
        self._together, self._ended = cache is not None, threading.Event()
        manager, state = self._made._model_manager, self._made._generation_state
        key = manager.process_model_name(name)
        _pin(manager, SERVER.part(f"{_MANAGER}:TimedModel"), name, (model, tokenizer))
        self._generation = state.get_manager(key, use_cb=self._together)
        self._within(context)
        self._held = contextlib.ExitStack()
        self._failed: VBError | None = None
        if cache is not None:  # instead of what its init_cb would make with the first request
            self._held.enter_context(flash_batches(model))
            runs = self._held.enter_context(steps)
            how = {"sample": sample, "cache": cache, "storage": storage, "steps": runs, "use_cache": False}
            self._loop = _Loop(self._generation, lambda: manager_of(model, **how), runs)
            self._loop.start()
        self._made.server.config.app.add_api_route("/metrics", _metrics_route(metrics), include_in_schema=False)
        self._made.server.config.timeout_graceful_shutdown = _LEAVE_SECONDS + _READ_SECONDS

    def run(self, listening: socket.socket) -> None:
        """Serve on a bound socket until SIGINT or SIGTERM, then end requests, and raise the signal again.

        Raises:
            VBError: the loop that generates has failed twice in a minute.
        """
        server = self._made.server
        shut_down = server.shutdown

        async def shut_down_in_time(sockets: list[socket.socket] | None = None) -> None:
            loop = asyncio.get_running_loop()
            loop.call_later(_LEAVE_SECONDS, loop.run_in_executor, None, self._end)
            await shut_down(sockets)

        server.shutdown = shut_down_in_time
        watching = threading.Thread(target=self._watch, daemon=True)
        with self._held:
            watching.start()
            try:
                server.run(sockets=[listening])
            finally:
                self._end()
                watching.join()
        if self._failed is not None:
            raise self._failed

    def _watch(self) -> None:
        """Begin the loop anew when it has died; end the server when that does not help."""
        try:
            while self._together and not self._ended.wait(_POLL_SECONDS):
                self._loop.revive(self._ended)
        except Exception as error:  # noqa: BLE001 - `run` raises it
            why = str(error) if isinstance(error, VBError) else _named(error)
            self._failed = VBError(f"{why}; the server has ended, start it again")
            self._failed.__cause__ = error
            self._made.server.should_exit = True

    def _end(self) -> None:
        """End requests, which get an error, and wait for the pass that runs."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._together:
            self._loop.stop()
        else:
            self._generation.submit(lambda: None).result()  # it has one thread

    def _within(self, context: int) -> None:
        """Refuse prompts that fill the context, end answers in it, and say so of those that a stop ends."""
        from fastapi import HTTPException

        made, numbers = self._generation, itertools.count()
        stream, answer = made.generate_streaming, made.generate_non_streaming

        def go_on(ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            if self._ended.is_set():
                raise VBError(_STOPPED)
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        def checked(inputs: Any, gen_config: Any) -> Any:
            ids = inputs["input_ids"]
            prompt = len(ids) if isinstance(ids, list) else ids.shape[-1]
            if prompt >= context:
                raise HTTPException(
                    400, f"the prompt has {prompt} tokens; this server has room for {context}, answer included"
                )
            gen_config.max_new_tokens = min(gen_config.max_new_tokens or context, context - prompt)
            return inputs if self._together else {**inputs, "stopping_criteria": [go_on]}

        def own(request_id: str) -> str:
            """Make an id, which a client may give to several requests, one of this request alone."""
            return f"{request_id}-{next(numbers)}"

        def stream_within(
            model: nn.Module, processor: Any, inputs: Any, gen_config: Any, request_id: str, **kwargs: Any
        ) -> Any:
            kwargs["request_id"] = own(request_id)
            return stream(model, processor, checked(inputs, gen_config), gen_config, **kwargs)

        async def answer_within(
            model: nn.Module, processor: Any, inputs: Any, gen_config: Any, request_id: str, **kwargs: Any
        ) -> Any:
            kwargs["request_id"] = own(request_id)
            inputs, manager = checked(inputs, gen_config), made._cb if self._together else None
            try:
                return await answer(model, processor, inputs, gen_config, **kwargs)
            except Exception as error:
                if why := _STOPPED if self._ended.is_set() else getattr(manager, "why", ""):
                    raise HTTPException(503, why) from error
                raise

        made.generate_streaming, made.generate_non_streaming = stream_within, answer_within


class _Loop:
    """Generation loop of many requests, of which one runs at a time.

    Args:
        generation: transformers' CBGenerateManager, whose requests it takes.
        make: returns a batching manager, not started.
        steps: see `DecodeSteps`.
    """

    def __init__(self, generation: Any, make: Callable[[], Any], steps: DecodeSteps | None) -> None:
        self._generation, self._make, self._steps = generation, make, steps
        self._revived, self._lock = -math.inf, threading.Lock()

    def start(self) -> None:
        """Start a loop for the requests to come."""
        manager = self._make()
        _name_its_errors(manager)
        _lose_no_request(manager)
        manager.start()
        self._generation._cb = manager
        self._generation.is_alive = lambda: manager.is_running() and not manager.why

    def revive(self, ended: threading.Event) -> None:
        """Start another loop, whose steps are eager, if this one has died and the server has not `ended`.

        Raises:
            VBError: the one before has died a short time ago.
        """
        with self._lock:
            dead = self._generation._cb
            if ended.is_set() or dead.is_running():
                return
            dead.why = dead.why or "the thread that generates has ended"
            dead._fail_all_remaining_requests(VBError(dead.why), dead.batch_processor)  # those that came meanwhile
            if time.monotonic() - self._revived < _APART_SECONDS:
                raise VBError(f"{dead.why}, the second time in {_APART_SECONDS} seconds")
            warn(f"vbrt: {dead.why}; all requests got an error, and generation begins anew, with eager decode steps")
            if self._steps is not None:
                self._steps.refuse(f"an earlier batch has failed: {dead.why}")
            dead.stop()  # frees its cache
            self.start()
            self._revived = time.monotonic()

    def stop(self) -> None:
        """End all requests."""
        with self._lock:
            if self._generation._cb.is_running():
                self._generation._cb.stop(hard_stop=True)


def _name_its_errors(manager: Any) -> None:
    """Have requests of a loop that dies get the error by name, which is its `why` from then on."""
    manager.why, handle = "", manager._handle_critical_error

    def handle_by_name(error: Exception, batch_processor: Any) -> None:
        manager.why = _named(error)
        named = VBError(manager.why)
        named.__cause__, error.__traceback__ = error, None  # it has been logged, and holds the cache
        handle(named, batch_processor)

    manager._handle_critical_error = handle_by_name


def _lose_no_request(manager: Any) -> None:
    """Have a manager take a request once its results have somewhere to go, refuse it if it is about to end, and forget
    one that is cancelled."""
    from fastapi import HTTPException

    add, register, cancel = manager.add_request, manager.register_result_handler, manager.cancel_request
    handlers, unheard = manager.output_router.result_handlers, dict[str, dict[str, Any]]()

    def add_request(input_ids: list[int], request_id: str, **how: Any) -> str:
        if request_id not in handlers:  # of a stream, which is registered next
            unheard[request_id] = {"input_ids": input_ids, **how}
        elif add(input_ids, request_id=request_id, **how) is None:
            handlers.pop(request_id)
            raise HTTPException(503, manager.why or _STOPPED)
        return request_id

    def register_result_handler(request_id: str, callback: Callable[[Any], None]) -> None:
        register(request_id, callback)
        if asked := unheard.pop(request_id, None):
            add_request(request_id=request_id, **asked)

    def cancel_request(request_id: str) -> None:
        handlers.pop(request_id, None)
        cancel(request_id)

    manager.add_request, manager.cancel_request = add_request, cancel_request
    manager.register_result_handler = register_result_handler


def _named(error: BaseException) -> str:
    """Return why a loop has died; transformers puts it into JSON between quotes."""
    why = f"the batch of all requests failed: {type(error).__name__}: {first_line(error)}"
    return why.replace("\\", "/").replace('"', "'")


def _unstarted(**how: Any) -> Any:
    """Make transformers' server without starting it."""
    plain = SERVER.part("cli.serve:Serve")

    class Unstarted(plain):
        def start_server(self) -> None:
            pass

    return Unstarted(log_level="warning", non_blocking=True, **how)


def _pin(manager: Any, timed: Any, name: str, loaded: tuple[nn.Module, Any]) -> None:
    """Have a model manager answer with one model, which it never unloads."""
    key = manager.process_model_name(name)

    def load(model_id_and_revision: str, *args: Any, **kwargs: Any) -> tuple[nn.Module, Any]:
        if model_id_and_revision != key:
            raise ValueError(f"this server has one model: {name}; requested {model_id_and_revision}")
        return loaded

    manager.force_model, manager.loaded_models = name, {key: timed(loaded[0], -1, loaded[1])}
    manager.load_model_and_processor, manager.shutdown = load, lambda: None


def _metrics_route(metrics: Callable[[], tuple[str, str]]) -> Callable[[], Any]:
    from fastapi import Response

    def respond() -> Any:
        text, content_type = metrics()
        return Response(text, media_type=content_type)

    return respond
