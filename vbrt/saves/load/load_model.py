"""Load from files into a runtime, without the dense model in memory.

The model provides only the architecture: its parameters first become meta tensors of the files' dtypes, which gives the
same plan as for the saved model; then every value comes from a file. On any failure the model and the runtime's other
models are restored.
"""

from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import ConfigError
from vbrt.estimation.memory.gpu_share import settle_budget
from vbrt.model.attach import Attempt, attach
from vbrt.model.attachment import Attachment
from vbrt.model.machine_memory import check_ssd_directory, release_host_memory
from vbrt.model.placement import place_beside
from vbrt.model.runtime import Runtime
from vbrt.report.progress import Progress
from vbrt.residency.user_policy import PolicyFactory
from vbrt.saves.common.assign import compute_buffers_
from vbrt.saves.files.read_target import on_device
from vbrt.saves.load.calibrate_from_files import calibrated
from vbrt.saves.load.sources import Source

__all__ = ["load_attached"]

_TRIM_BYTES = 8 << 20


def load_attached(
    source: Source,
    model: nn.Module,
    config: VBConfig,
    *,
    runtime: Runtime | None = None,
    policy: PolicyFactory | None = None,
    progress: bool | None = None,
) -> Attachment:
    """Attach a model whose weights come from files, and encode every layer. See `vbrt.load`.

    Args:
        source: see `open_source`; `config` is what it makes of the user's.
        runtime: shared with other models; by default a new one.
        policy: factory for each tier's policy in a new runtime; by default the config's.
        progress: as for `VBModelWrapper.materialize`.
    """
    if config.mode == "train":
        raise ConfigError(
            f'{config.source}: mode = "train"; load() fills the planes of an inference model. Load dense '
            'weights into the model first, then vbrt.wrap(model, mode="train"); to resume a run, '
            "load_state_dict() the result of vb.state_dict()"
        )
    if runtime is None:
        check_ssd_directory(config)
    else:
        runtime.check_open("load")
    attempt = Attempt(model, runtime)
    try:
        source.outline_(model)
        compute_buffers_(model, source.path, source.has)
        share = settle_budget(model, config)
        config = share.config
        plan = share.noted(source.plan(model, config, None if runtime is None else place_beside(runtime)))
        plan = calibrated(source, model, plan, config)
        attachment = attach(model, config, plan, runtime=runtime, policy=policy)
        _fill_(attachment, source, progress=progress)
        attachment.materialize(progress=False)  # nothing is left to encode; moves unswapped tensors to the device
        release_host_memory()
        return attachment
    except BaseException:
        attempt.undo()
        raise


def _fill_(attachment: Attachment, source: Source, *, progress: bool | None) -> None:
    layers, plan = attachment.layers, attachment.plan
    for swap in plan.swaps:
        for name in swap.modules:
            layers[name].forget_dense_()
    with Progress("loading", plan.kept_bytes + plan.swapped_bytes, show=progress) as work:
        source.fill_kept_(
            attachment.model, on_device(attachment.stack)
        )  # first, while there is most room: they are large
        work.done(plan.kept_bytes)
        _store_planes(attachment, source, work)
    for swap in plan.swaps:
        handle = layers[swap.name].handle
        handle.retype(source.computes_in(swap, handle))


def _store_planes(attachment: Attachment, source: Source, work: Progress) -> None:
    layers, read = attachment.layers, 0
    for swap in attachment.plan.swaps:
        work.at(swap.name)
        handle = layers[swap.name].handle
        handle.store(source.experts_of(swap, handle) if swap.experts else source.planes_of(swap, handle))
        work.done(swap.dense_bytes)
        read += swap.dense_bytes
        if read > _TRIM_BYTES:  # else malloc keeps the gaps between pages: in sum as much as all weights
            release_host_memory()
            read = 0
