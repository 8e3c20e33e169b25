"""Model runner of transformers' continuous batching whose decode steps can be replayed.

transformers captures passes as CUDA graphs, too (`use_cuda_graph`): prompts included, one for each size, with
cached tokens padded to 16,384, and without a word to the model, whose pages may move. Here a pass with one new token
for each sequence has padded sizes, so that few captures serve many passes; who makes and replays them is passed in.

| feature | without it |
| --- | --- |
| `RUNNER` | decode steps of a batch are eager |
"""

import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vbrt.libraries.probe import Feature

__all__ = ["CODED", "FEATURES", "MASKED", "RUNNER", "DecodeSteps", "padded_cached", "padded_sequences", "replay_steps"]

_BATCHES = "generation.continuous_batching"
_RUNNER = f"{_BATCHES}.model_runner:ModelRunner"
RUNNER = Feature(
    "transformers",
    (
        f"{_RUNNER}(logit_processor, cb_config, inputs_and_outputs, cache, do_sample, return_logprobs)",
        f"{_RUNNER}.maybe_pad_inputs(num_q_tokens, max_kv_read, use_decode_fast_path)",
        f"{_RUNNER}.compute_batch(model, batch_data)",
        f"{_RUNNER}.supports_logits_to_keep(model)",
        f"{_RUNNER}._forward_process_and_sample(model, batch_data, carry_over_ids, prev_output_ids, output_ids)",
        f"{_RUNNER}._sample(scores, output_ids)",
        f"{_BATCHES}.scheduler:Scheduler.schedule_batch(token_budget, cache_budget)",
        f"{_BATCHES}.requests:FutureRequestState.query_length",
        f"{_BATCHES}.continuous_api:ContinuousBatchingManager._create_batch_processor",
        f"{_BATCHES}.utils:stream_context(stream)",
    ),
    without="decode steps of a batch run eagerly, which takes the host longer",
)
FEATURES = (RUNNER,)

#: reasons for eager steps
CODED = "keys and values in codes: their places in the cache are marked on the host"
MASKED = "the batch does not attend by torch's flash kernel"

_LEAST = 1024  # cached tokens
_PARTS = 2  # sizes of an octave: up to a third of what a step gathers is padding, and there are fewer captures


class DecodeSteps(Protocol):
    """Runs the decode steps of a batch."""

    def refusal(self) -> str:
        """Return why steps cannot be captured now, as for people; "" if they can."""

    def refuse(self, why: str) -> None:
        """Have all steps run eagerly."""

    def run(self, key: Hashable, step: Callable[[], Tensor], written: Sequence[Tensor], *, sequences: int) -> None:
        """Run a step, or replay what an earlier step of this key did.

        Args:
            key: steps of one key read and write the same tensors, of the same shapes.
            step: returns scores; may be run more than once.
            written: tensors that hold the same after any number of runs.
            sequences: of the batch, padded ones included.
        """


def replay_steps(manager: Any, steps: DecodeSteps) -> None:
    """Have a batching manager, not started, give its decode steps to `steps`."""
    create = manager._create_batch_processor

    def create_batch_processor(self: Any) -> Any:
        processor = create()
        _put_runner(processor, steps)
        return processor

    manager._create_batch_processor = types.MethodType(create_batch_processor, manager)


def padded_sequences(count: int, most: int) -> int:
    """Return for how many sequences a step is captured that has `count`."""
    return min(1 << (count - 1).bit_length(), most)


def padded_cached(tokens: int, most: int) -> int:
    """Return for how many cached tokens a step is captured that reads so many."""
    part = max(_LEAST, (1 << max(tokens, 1).bit_length() - 1) // _PARTS)
    return min(-(-max(tokens, 1) // part) * part, most)


def _put_runner(processor: Any, steps: DecodeSteps) -> None:
    """Replace a batch processor's model runner."""
    if getattr(processor.model_runner, "steps", None) is steps:  # of a manager that begins anew
        return
    plain, schedule = RUNNER.part(_RUNNER), processor.scheduler.schedule_batch
    runner = _runner_class(plain)(
        logit_processor=processor.logit_processor,
        cb_config=processor.cb_config,
        inputs_and_outputs=processor.inputs_and_outputs,
        cache=processor.cache,
        do_sample=processor.do_sample,
        return_logprobs=processor.return_logprobs,
    )
    runner.steps = steps

    def schedule_batch(token_budget: int, cache_budget: int) -> Any:
        found = schedule(token_budget, cache_budget)
        runner.decodes = bool(found[0]) and all(request.query_length == 1 for request in found[0])
        return found

    processor.scheduler.schedule_batch, processor.model_runner = schedule_batch, runner


def _runner_class(plain: type) -> type:
    """Return transformers' model runner with padded decode steps, and no other padding."""

    class Runner(plain):
        steps: DecodeSteps
        decodes = False  # one new token for each sequence of the next pass

        def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
            self.pad_inputs = self.decodes and not use_decode_fast_path and not self.steps.refusal()
            if not self.pad_inputs:
                return num_q_tokens, max_kv_read
            most = min(self.cb_config.max_requests_per_batch, self.cache.max_batch_tokens)
            return padded_sequences(num_q_tokens, most), padded_cached(max_kv_read, self.cache.max_tokens_read)

        def compute_batch(self, model: nn.Module, batch_data: dict[str, Any]) -> None:
            if not self.pad_inputs:
                return super().compute_batch(model, batch_data)
            if self.supports_logits_to_keep(model):
                batch_data["logits_to_keep"] = batch_data["logits_indices"]
            batch_data["max_length_q"] = 1  # one query for each sequence, padded ones included
            given, outputs = self.inputs_and_outputs, self.inputs_and_outputs.get_cb_kwargs()
            sizes = batch_data["input_ids"].shape[1], *(index.shape[0] for index in batch_data["read_index"])
            lengths = batch_data["max_length_k"]
            lengths.update(dict.fromkeys(lengths, max(sizes[1:])))  # no sequence has more
            written = batch_data["input_ids"], outputs[-1], *_tensors_of(self.cache)

            def step() -> Tensor:
                self._forward_process_and_sample(model, batch_data, *outputs)
                return self._scores

            with RUNNER.part(f"{_BATCHES}.utils:stream_context")(given.compute_stream):
                key = getattr(given, "current_pair", 0), *sizes
                self.steps.run(key, step, written, sequences=sizes[0])
            self._scores = None

        def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
            self._scores = scores if self.pad_inputs else None
            super()._sample(scores, output_ids)

    return Runner


def _tensors_of(cache: Any) -> list[Tensor]:
    return [value for value in vars(cache).values() if isinstance(value, torch.Tensor)]
