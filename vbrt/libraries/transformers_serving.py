"""transformers' OpenAI-compatible server, for one model that this process has loaded.

| feature | without it |
| --- | --- |
| `SERVER` | `vbrt serve` raises |
"""

import asyncio
import contextlib
import importlib.util
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import LibraryError, VBError
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
        f"{_API}:ContinuousBatchingManager.stop(hard_stop)",
        "cli.serving.utils:BaseGenerateManager.generate_streaming(model, processor, inputs, gen_config)",
        "cli.serving.utils:BaseGenerateManager.generate_non_streaming(model, processor, inputs, gen_config)",
    ),
    without="`vbrt serve` does not start; pip install -U 'vbrt[serve]'",
)
FEATURES = (SERVER,)

_PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")  # of transformers[serving]
_LEAVE_SECONDS = 5  # that requests in flight have to end by themselves when the server is stopped
_READ_SECONDS = 30  # that clients then have to read what there is


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
        if cache is not None:  # instead of what its init_cb would make with the first request
            self._held.enter_context(flash_batches(model))
            how = {"sample": sample, "cache": cache, "storage": storage, "steps": self._held.enter_context(steps)}
            self._generation._cb = manager_of(model, **how, use_cache=False)
            self._generation._cb.start()
        self._made.server.config.app.add_api_route("/metrics", _metrics_route(metrics), include_in_schema=False)
        self._made.server.config.timeout_graceful_shutdown = _LEAVE_SECONDS + _READ_SECONDS

    def run(self, listening: socket.socket) -> None:
        """Serve on a bound socket until SIGINT or SIGTERM, then end requests, and raise the signal again."""
        server = self._made.server
        shut_down = server.shutdown

        async def shut_down_in_time(sockets: list[socket.socket] | None = None) -> None:
            loop = asyncio.get_running_loop()
            loop.call_later(_LEAVE_SECONDS, loop.run_in_executor, None, self._end)
            await shut_down(sockets)

        server.shutdown = shut_down_in_time
        with self._held:
            try:
                server.run(sockets=[listening])
            finally:
                self._end()

    def _end(self) -> None:
        """End requests, which get an error, and wait for the pass that runs."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._together:
            self._generation._cb.stop(hard_stop=True)
        else:
            self._generation.submit(lambda: None).result()  # it has one thread

    def _within(self, context: int) -> None:
        """Refuse prompts that fill the context, end answers in it, and say so of those that a stop ends."""
        from fastapi import HTTPException

        made, stopped = self._generation, "the server has been stopped before this answer ended"
        stream, answer = made.generate_streaming, made.generate_non_streaming

        def go_on(ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            if self._ended.is_set():
                raise VBError(stopped)
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

        def stream_within(model: nn.Module, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any) -> Any:
            return stream(model, processor, checked(inputs, gen_config), gen_config, **kwargs)

        async def answer_within(model: nn.Module, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any) -> Any:
            inputs = checked(inputs, gen_config)
            try:
                return await answer(model, processor, inputs, gen_config, **kwargs)
            except Exception as error:
                if self._ended.is_set():
                    raise HTTPException(503, stopped) from error
                raise

        made.generate_streaming, made.generate_non_streaming = stream_within, answer_within


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
