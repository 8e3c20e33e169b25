"""Timeline recording of models on one runtime: `timeline` of a model or of a pipeline."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vbrt.model.attachment import Attachment
from vbrt.model.run_metadata import what_ran
from vbrt.model.snapshot import expert_counts
from vbrt.report.expert_counters import ExpertCounts
from vbrt.report.expert_heat import heat_between
from vbrt.report.timeline import TimelineTotals
from vbrt.report.timeline_files import check_timeline_path, write_timeline
from vbrt.tiers import Recorder

__all__ = ["recorded"]


def recorded(attachments: Sequence[Attachment], path: str | PathLike) -> contextlib.AbstractContextManager[Recorder]:
    """Record the passes of models on one runtime in a `with` block, and write them to a file; keeps the models alive
    until then. Errors: see `VBModelWrapper.timeline`."""
    for attachment in attachments:
        attachment.check_recordable()
    checked = check_timeline_path(path)
    return _recorded({attachment: attachment.model for attachment in attachments}, checked)


@contextlib.contextmanager
def _recorded(models: Mapping[Attachment, nn.Module], path: Path) -> Iterator[Recorder]:
    attachments = tuple(models)
    stack = attachments[0].stack
    recorder = Recorder(stack.device, stack.guard)
    before = _settled_counts(attachments)
    recorder.start()
    hooks = []
    try:
        for model in models.values():
            hooks.append(model.register_forward_pre_hook(recorder.begin_pass, prepend=True))
            hooks.append(model.register_forward_hook(recorder.end_pass, always_call=True))
        hooks.append(register_optimizer_step_pre_hook(recorder.begin_step))
        hooks.append(register_optimizer_step_post_hook(recorder.end_step))
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()
        timeline, after = recorder.stop(), _settled_counts(attachments)
        heat = tuple(heat_between(name, before.get(name), counts) for name, counts in after.items())
        timeline = recorder.timeline = replace(timeline, experts=heat, ran=what_ran(attachments))
        for attachment in attachments:
            attachment.timed = _of_model(timeline.totals, attachment.prefix)
        write_timeline(timeline, path)


def _settled_counts(attachments: Sequence[Attachment]) -> dict[str, ExpertCounts]:
    """Return the counters per expert, by layer, device counters included."""
    found: dict[str, ExpertCounts] = {}
    for attachment in attachments:
        attachment.expert_cache.settle(each=True)
        counts = expert_counts(attachment.stack, attachment.layers)
        prefix = attachment.prefix if len(attachments) > 1 else ""
        found |= {prefix + name: each for name, each in counts.items()}
    return found


def _of_model(totals: TimelineTotals, prefix: str) -> TimelineTotals:
    """Return the totals of one model's layers, under their names in the model."""
    layers = {name.removeprefix(prefix): layer for name, layer in totals.layers.items() if name.startswith(prefix)}
    return replace(totals, layers=layers)
