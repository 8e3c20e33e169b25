"""Layer kinds: an allow-list of exact classes, with one record each that names the replacement class.

A subclass of nn.Linear may compute anything (routers return tuples, grouped layers read slices of their weight), so
a class without a record is not swapped. Classes of other packages are named as text; the file that imports them is
loaded when a model has one.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from vbrt.layers.swapped_layer import SwappedLayer
from vbrt.layers.weights.weight_shards import local_of, matrix_shard
from vbrt.residency.weight_site import WeightSite

__all__ = ["KINDS", "Kind", "kind_of", "site_of"]


@dataclass(frozen=True, slots=True)
class Kind:
    """Record of one class of layers.

    Attributes:
        name: the class's name, which plans and saves use.
        package: the module that defines the class.
        file: the module of vbrt that defines `VB<name>`; `vbrt.training.trained_kinds` makes `Trained<name>` of the
        record.
        parameters: the names of the parameters that hold weights; each is a site.
        transposed: True if the class keeps its weight as [inputs, outputs].
        turned: the parameters that are kept as [inputs, outputs] where the others are not.
        by_rows: True for lookup tables: a forward reads some rows of the weight.
        modes: the modes that a layer of this kind is swapped in.
        splits: True if its weights may be DTensors, of which each rank holds a part.
        routed: True if the parameters stack the matrices of routed experts, which go into the tiers together.
        count: the attribute of a module that says how many matrices a parameter holds one below the other, in two
            dimensions; "" where they lie along a dimension of their own.
        base: of routed experts, the class in `file` that the class in the place of this one is made from.
        every: True if each forward goes through all experts.
        ragged: True if the parameters after the first may stack fewer matrices: the last experts have none of them.
        parts: the names in pages of the matrices that each of the parameters stacks (`vbrt.formats.joint_planes`).
        refuse: returns why a module of this class stays as it is, or None.
        rounds_before_bias: True if the class rounds the product to its dtype before it adds the bias.
    """

    name: str
    package: str
    file: str
    parameters: tuple[str, ...] = ("weight",)
    transposed: bool = False
    turned: tuple[str, ...] = ()
    by_rows: bool = False
    routed: bool = False
    count: str = ""
    base: str = "VBExperts"
    every: bool = False
    ragged: bool = False
    parts: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("infer", "train", "full")
    splits: bool = False
    refuse: Callable[[nn.Module], str | None] = lambda module: None
    rounds_before_bias: bool = False

    @property
    def leading(self) -> tuple[str, ...]:
        """Parameters selected individually; the other parameters of routed experts follow the first."""
        return self.parameters[:1] if self.routed else self.parameters

    @property
    def stacked(self) -> bool:
        """True if a parameter stacks its matrices along a leading dimension."""
        return self.routed and not self.count

    def keeps_transposed(self, parameter: str) -> bool:
        """True if the class keeps that parameter's matrices as [inputs, outputs]."""
        return self.transposed or parameter in self.turned

    def sites(self, name: str, module: nn.Module) -> tuple[WeightSite, ...]:
        """Return the sites in a module of this kind; `name` is the module's name in the model."""
        return tuple(self._site(name, module, parameter) for parameter in self.parameters)

    def _site(self, name: str, module: nn.Module, parameter: str) -> WeightSite:
        weight, transposed = module._parameters[parameter], self.keeps_transposed(parameter)
        *stacked, rows, columns = local_of(weight).shape
        matrices = getattr(module, self.count) if self.count else stacked[0] if stacked else 1
        rows = rows // matrices if self.count else rows
        shape = (columns, rows) if transposed else (rows, columns)
        shard = matrix_shard(weight, stacked=self.stacked, transposed=transposed)
        return WeightSite(name, shape, parameter, self.name, matrices, transposed, shard, self.stacked)

    def outputs(self, module: nn.Module) -> int:
        """Return the number of outputs of a layer of this kind."""
        return self._site("", module, self.parameters[0]).shape[0]

    def layer_class(self) -> type[SwappedLayer]:
        """Return the replacement class for inference; for experts, its base class."""
        return getattr(importlib.import_module(self.file), self.base if self.routed else f"VB{self.name}")


def _renormalizes(table: nn.Embedding) -> str | None:
    """Return why a table is not swapped if its forward writes to it (max_norm); else None."""
    return None if table.max_norm is None else f"max_norm = {table.max_norm} rescales its rows as they are read"


def _experts(name: str, parameters: tuple[str, str], *, transposed: bool = False) -> Kind:
    """Return the record of the classes that transformers' `use_experts_implementation` decorates, by their layout."""
    return Kind(
        name,
        "transformers.integrations.moe",
        "vbrt.layers.experts",
        parameters,
        transposed=transposed,
        routed=True,
        splits=True,
        parts=("up", "down"),
    )


def _special(name: str, model: str, parts: dict[str, str], **others: Any) -> Kind:
    """Return the record of a class of routed experts of transformers' `model` that nothing decorates; `parts`: by
    parameter."""
    return Kind(
        name,
        f"transformers.models.{model}.modeling_{model}",
        "vbrt.layers.experts",
        tuple(parts),
        routed=True,
        parts=tuple(parts.values()),
        **others,
    )


def _derived(model: str, name: str) -> Kind:
    """Return the record of a subclass of nn.Embedding of transformers' `model` that computes with the rows."""
    return Kind(
        name,
        f"transformers.models.{model}.modeling_{model}",
        "vbrt.layers.modules.derived_embedding",
        by_rows=True,
        modes=("infer",),
        refuse=_renormalizes,
    )


#: how the classes begin, by model
_SCALED = {
    "bart": "Bart",
    "bigbird_pegasus": "BigBirdPegasus",
    "biogpt": "BioGpt",
    "blenderbot": "Blenderbot",
    "diffusion_gemma": "DiffusionGemmaText",
    "embedding_gemma2": "EmbeddingGemma2Text",
    "gemma": "GemmaText",
    "gemma2": "Gemma2Text",
    "gemma3": "Gemma3Text",
    "gemma3n": "Gemma3nText",
    "gemma4": "Gemma4Text",
    "gemma4_unified": "Gemma4UnifiedText",
    "m2m_100": "M2M100",
    "mbart": "MBart",
    "minicpm3": "MiniCPM3",
    "nllb_moe": "NllbMoe",
    "pegasus_x": "PegasusX",
    "plbart": "PLBart",
    "pp_formulanet": "PPFormulaNet",
    "seamless_m4t": "SeamlessM4T",
    "seamless_m4t_v2": "SeamlessM4Tv2",
    "trocr": "TrOCR",
    "vaultgemma": "VaultGemmaText",
    "xglm": "XGLM",
}
_NORMED = {
    "inkling": "Inkling",
    "inkling2": "Inkling2",
    "inkling2_loop": "Inkling2Loop",
    "muse_glimmer": "MuseGlimmerText",
    "muse_spark": "MuseSparkText",
}
_UP_DOWN = {"gate_up_proj": "up", "down_proj": "down"}
_RECORDS = (
    Kind("Linear", "torch.nn.modules.linear", "vbrt.layers", splits=True),
    Kind("Conv1D", "transformers.pytorch_utils", "vbrt.layers.modules.conv1d", transposed=True),
    Kind("EsmFoldLinear", "transformers.models.esm.modeling_esmfold", "vbrt.layers.modules.esmfold"),
    Kind(
        "FalconLinear",
        "transformers.models.falcon.modeling_falcon",
        "vbrt.layers.modules.falcon",
        rounds_before_bias=True,
    ),
    Kind(
        "Embedding",
        "torch.nn.modules.sparse",
        "vbrt.layers.modules.embedding",
        by_rows=True,
        modes=("infer", "full"),
        refuse=_renormalizes,
    ),
    *(_derived(model, f"{prefix}ScaledWordEmbedding") for model, prefix in _SCALED.items()),
    *(_derived(model, f"{prefix}NormedEmbedding") for model, prefix in _NORMED.items()),
    _experts("Experts", ("gate_up_proj", "down_proj")),
    _experts("TransposedExperts", ("gate_up_proj", "down_proj"), transposed=True),
    _experts("UngatedExperts", ("up_proj", "down_proj")),
    _experts("TransposedUngatedExperts", ("up_proj", "down_proj"), transposed=True),
    _special("Step3p7Experts", "step3p7", _UP_DOWN),
    _special("LongcatFlashExperts", "longcat_flash", _UP_DOWN, base="VBZeroExperts", ragged=True),
    _special("Llama4TextExperts", "llama4", _UP_DOWN, transposed=True, base="VBSortedExperts"),
    _special(
        "DbrxExpertGLU",
        "dbrx",
        {"w1": "gate", "v1": "up", "w2": "down"},
        turned=("w2",),
        count="moe_num_experts",
        base="VBGivenExperts",
        modes=("infer",),
    ),
    _special("JetMoeParallelExperts", "jetmoe", {"weight": "up"}, base="VBParallelExperts"),
    _special(
        "InklingSharedExperts",
        "inkling",
        {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
        base="VBSharedExperts",
        every=True,
    ),
)
#: the records by name
KINDS = {kind.name: kind for kind in _RECORDS}
_BY_CLASS = {(kind.package, kind.name): kind for kind in _RECORDS}


def kind_of(module: nn.Module) -> Kind | None:
    """Return the record of the module's class, or None if the module cannot become a VB layer."""
    cls = type(module)
    kind = _BY_CLASS.get((cls.__module__, cls.__qualname__))
    return _kind_of_experts(module) if kind is None else kind


def _kind_of_experts(module: nn.Module) -> Kind | None:
    """Return the record of a module of a decorated class, which the decorator's attributes tell."""
    if "has_gate" not in module.__dict__ or "is_transposed" not in module.__dict__:
        return None
    layout = "Transposed" if module.is_transposed else ""
    kind = KINDS[f"{layout}{'' if module.has_gate else 'Ungated'}Experts"]
    weights = [module._parameters.get(name) for name in kind.parameters]
    return kind if all(weight is not None and weight.dim() == 3 for weight in weights) else None


def site_of(name: str, layer: SwappedLayer) -> WeightSite:
    """Return the site of a VB layer or a trained one that the model has under `name`."""
    site = layer.handle.spec.site
    return replace(site, module=name, kind=site.kind if KINDS[site.kind].routed else layer.plain_class().__name__)
