"""Multi-token prediction (MTP) head in a checkpoint: its tensors, which transformers drops on load, as a source.

Two layouts are published:

| module here | DeepSeek-V3, GLM-4.5 | Qwen3-Next |
| --- | --- | --- |
| enorm: norm of the embedding | model.layers.N.enorm | mtp.pre_fc_norm_embedding |
| hnorm: norm of the hidden state | model.layers.N.hnorm | mtp.pre_fc_norm_hidden |
| eh_proj: projection of both | model.layers.N.eh_proj | mtp.fc |
| layers.0: decoder layer | model.layers.N | mtp.layers.0 |
| norm: final norm | model.layers.N.shared_head.norm | mtp.norm |

N is the main model's number of layers. The copies of its embedding and output head in the first layout are not read:
the head shares them with the main model. The tensors decide, since names in config.json differ (`num_mtp_layers`,
`num_nextn_predict_layers`, `mtp_num_hidden_layers`), and Qwen3-Next's has none.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from vbrt.errors import CheckpointError
from vbrt.saves.files.checkpoint_paths import INDEX, SINGLE, looked_at
from vbrt.saves.files.safetensors_file import TensorFile
from vbrt.saves.load.sources import safetensors_paths
from vbrt.saves.published.dense_checkpoint import DenseCheckpoint
from vbrt.saves.published.published_checkpoint import checkpoint_of

__all__ = ["head_names", "mtp_checkpoint"]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of MTP heads in a checkpoint.

    Attributes:
        lead: pattern of a tensor that every head has (a norm, which no library quantizes); group 1: what the names of
            the head begin with, "index": which decoder layer of the files it is, if it is one.
        own: module in the files -> module here; all others belong to the decoder layer.
        block: prefix of the decoder layer here.
        shared: modules that are copies of the main model's.
    """

    lead: re.Pattern[str]
    own: Mapping[str, str]
    block: str = ""
    shared: tuple[str, ...] = ()


_LAYOUTS = (
    _Layout(
        re.compile(r"((?:.+\.)?layers\.(?P<index>\d+)\.)enorm\.weight"),
        {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"},
        block="layers.0.",
        shared=("embed_tokens", "shared_head.head"),
    ),
    _Layout(
        re.compile(r"((?:.+\.)?mtp\.)pre_fc_norm_embedding\.weight"),
        {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"},
    ),
)


def mtp_checkpoint(path: Path, layers: int) -> DenseCheckpoint:
    """Return the source of the MTP head in a directory, for the module of `vbrt.generation.speculation.mtp_head`.

    Args:
        layers: decoder layers of the main model.

    Raises CheckpointError: no head in the files, several heads, or files that cannot be read.
    """
    path = looked_at(path)
    if path.is_dir() and not any((path / name).exists() for name in (INDEX, SINGLE)):
        raise CheckpointError(
            f"{path}: neither {SINGLE} nor {INDEX} in it; expected the safetensors checkpoint with the head: saves and "
            "GGUF files hold none"
        )
    files = [TensorFile(file) for file in safetensors_paths(path)]
    names = head_names(path, [name for file in files for name in file.tensors], layers)
    views = [file.renamed({old: names[old] for old in file.tensors if old in names}) for file in files]
    return checkpoint_of(path, [view for view in views if view.tensors])


def head_names(path: Path, names: Collection[str], layers: int) -> dict[str, str]:
    """Return the tensors of the MTP head: name in the files -> name here. Raises CheckpointError: none, or several."""
    leads = [(layout, match) for layout in _LAYOUTS for match in map(layout.lead.fullmatch, names) if match is not None]
    leads = [(layout, match) for layout, match in leads if int(match.groupdict().get("index", layers)) >= layers]
    if not leads:
        raise CheckpointError(
            f"{path}: no multi-token prediction head: no tensor model.layers.{layers}.enorm.weight, as in DeepSeek-V3 "
            "and GLM-4.5, and no mtp.pre_fc_norm_embedding.weight, as in Qwen3-Next"
        )
    if len(leads) > 1:
        found = ", ".join(match[1] + "*" for _, match in leads[:3])
        raise CheckpointError(f"{path}: {len(leads)} multi-token prediction heads ({found}); expected one")
    ((layout, match),) = leads
    within = {name: name.removeprefix(match[1]) for name in names if name.startswith(match[1])}
    return {
        name: _renamed(layout, rest)
        for name, rest in within.items()
        if not any(rest.startswith(f"{module}.") for module in layout.shared)
    }


def _renamed(layout: _Layout, name: str) -> str:
    for module, here in layout.own.items():
        if name.startswith(f"{module}."):
            return here + name.removeprefix(module)
    return layout.block + name
