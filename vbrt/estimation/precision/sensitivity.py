"""Sensitivity of a model's logits to rounding: calibration batches, KL divergence, rounded weights.

A sequence is the first argument of the model's forward, or a mapping of its keyword arguments. Legend: N sequences, S
positions, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import ArgumentError, FormatError
from vbrt.formats import get_format
from vbrt.formats.error_feedback import Inputs, compensated
from vbrt.kernels import resolve
from vbrt.report.progress import Progress
from vbrt.residency.plan import Swap
from vbrt.residency.weight_site import ROOT, WeightSite

__all__ = [
    "Sequences",
    "batches_of",
    "evaluating",
    "kl_between",
    "logits_of",
    "own_samples",
    "rounded",
    "rounded_weight",
]

Sequences = Tensor | Iterable[Any]

_BATCH = 8


def batches_of(sequences: Sequences, device: torch.device) -> list[Any]:
    """Return the model's inputs on its device: rows of a tensor in batches, everything else one by one.

    Raises ArgumentError: there are none, or a list of token ids stands where a list of sequences belongs.
    """
    if isinstance(sequences, Tensor):
        rows = sequences if sequences.dim() > 1 else sequences[None]
        batches: list[Any] = list(rows.split(_BATCH)) if rows.numel() else []
    else:
        batches = [_one(sequence) for sequence in sequences]
    if not batches:
        raise ArgumentError("sequences is empty; expected a tensor of token ids [N, S], or a list of sequences")
    return [_moved(batch, device) for batch in batches]


def _one(sequence: Any) -> Any:
    if isinstance(sequence, int):
        raise ArgumentError(f"sequences has the number {sequence}; expected sequences: put the ids into a list, [ids]")
    if isinstance(sequence, Mapping):
        return sequence
    ids = sequence if isinstance(sequence, Tensor) else torch.tensor(sequence, dtype=torch.long, device="cpu")
    return ids[None] if ids.dim() == 1 else ids


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
    return batch.to(device)


def logits_of(model: nn.Module, batch: Any) -> Tensor:
    """Return a batch's logits [..., V]. Raises ArgumentError: the model returns something else."""
    with torch.no_grad():
        found = model(**batch) if isinstance(batch, Mapping) else model(batch)
    logits = found if isinstance(found, Tensor) else getattr(found, "logits", None)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        what = type(found).__name__
        raise ArgumentError(f"{type(model).__name__} returns {what}; expected logits, as a tensor or as `.logits`")
    return logits


def kl_between(model: nn.Module, batches: Sequence[Any], references: Sequence[Tensor]) -> float:
    """Return the mean KL divergence of a model's outputs from reference logits, in nats a position.

    Raises ArgumentError: outputs are NaN or Inf.
    """
    total, count = 0.0, 0
    for batch, reference in zip(batches, references, strict=True):
        for ours, theirs in zip(logits_of(model, batch), reference, strict=True):
            p, q = theirs.float().log_softmax(-1), ours.float().log_softmax(-1)
            total += (p.exp() * (p - q)).masked_fill(p.isneginf(), 0).sum().item()  # -inf: masked vocabulary
        count += reference.numel() // reference.shape[-1]
    if not math.isfinite(total):
        raise ArgumentError(f"{type(model).__name__} returns NaN or Inf for these sequences: nothing can be measured")
    return max(0.0, total / count)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in eval mode; restores each module's training flag."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def rounded(model: nn.Module, swap: Swap, format: str, device: torch.device | None = None) -> Iterator[None]:
    """Context in which a weight is replaced by its round trip through a format; restores the model's own tensors, also
    after Ctrl-C.

    device: to round on; by default the weight's.
    """
    inputs = dict(zip((swap.site, *swap.parts), swap.inputs, strict=False))
    sites = {id(_parameter(model, site)): site for site in reversed(swap.sites)}  # the first of tied sites
    kept = [(_parameter(model, site), site) for site in sites.values()]
    own = [parameter.data for parameter, _ in kept]
    try:
        for parameter, site in kept:
            weight = parameter.detach().to(device or parameter.device)
            parameter.data = rounded_weight(weight, site, format, inputs.get(site)).to(parameter.device)
        yield
    finally:
        for (parameter, _), data in zip(kept, own, strict=True):
            parameter.data = data


def _parameter(model: nn.Module, site: WeightSite) -> nn.Parameter:
    module = model if site.module == ROOT else model.get_submodule(site.module)
    return module._parameters[site.parameter]


def rounded_weight(weight: Tensor, site: WeightSite, format: str, inputs: Inputs | None = None) -> Tensor:
    """Return a site's weight, in the module's layout, after a round trip through a format; `inputs` as in
    `Swap.inputs`. Raises FormatError: it holds NaN or Inf."""
    codec = resolve("codec", "auto", weight.device, format).run(get_format(format))
    result = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    encode = resolve("encode_many", "auto", weight.device, format).run
    matrices, results = (w.detach().reshape(site.matrices, *site.matrix_shape) for w in (weight, result))
    squares = None if inputs is None else inputs.squares.to(weight.device)
    for at, (matrix, into) in enumerate(zip(matrices, results, strict=True)):
        w_NK = matrix.t().contiguous() if site.transposed else matrix.contiguous()
        try:
            (group,) = encode(codec, w_NK[None], squares=None if squares is None else squares[at : at + 1])
            coarse = group.coarse
            if inputs is not None and inputs.moments is not None:
                coarse = compensated(codec, w_NK, coarse, inputs.moments)
            back = codec.decode(coarse, tuple(w_NK.shape), weight.dtype)
        except FormatError as error:
            raise FormatError(f"{site.name}: {error}; exclude the layer (weights.exclude) or repair it") from error
        into.copy_(back.t() if site.transposed else back)
    return result


def own_samples(model: nn.Module, device: torch.device, count: int = 8, length: int = 96) -> Tensor:
    """Sample token ids [N, S] from the model, each sequence from a random first token; deterministic.

    Raises ArgumentError: the model does not generate tokens.
    """
    random = torch.Generator(device="cpu").manual_seed(0)
    try:
        vocabulary = logits_of(model, torch.zeros(1, 1, dtype=torch.long, device=device)).shape[-1]
        ids = torch.randint(vocabulary, (count, 1), generator=random, dtype=torch.long, device="cpu")
        with Progress("sampling text from the model", length - 1, unit="tokens") as work:
            while ids.shape[1] < length:
                last = logits_of(model, ids.to(device))[:, -1].float().softmax(-1).cpu()
                ids = torch.cat([ids, torch.multinomial(last, 1, generator=random)], 1)
                work.done()
    except (ArgumentError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{type(model).__name__} generated no samples from token ids ({type(error).__name__}: {error}); "
            "give `sequences`, what its forward takes"
        ) from error
    return ids
