"""Registry of one model's VB layers: their pages and homes, and their release back to plain layers."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from vbrt.layers import SwappedLayer, VBLayer, Weight, strip
from vbrt.report.progress import Progress
from vbrt.residency.plan import PageSpec, Plan, Swap
from vbrt.tiers import TierStack

__all__ = ["Registry"]


class Registry:
    """Map from names to VB layers, held weakly.

    Args:
        plan: of the model; its sites give the names.
        prefix: put before the plan's page keys.
    """

    def __init__(self, layers: Mapping[str, SwappedLayer], plan: Plan, stack: TierStack, prefix: str) -> None:
        self._layers = {name: weakref.ref(layer) for name, layer in layers.items()}
        self._plan, self._stack, self._prefix = plan, stack, prefix
        self._swaps = {swap.name: swap for swap in plan.swaps}
        self._dense: dict[Weight, nn.Parameter] = {}  # decoded by `release_`

    @property
    def layers(self) -> dict[str, VBLayer]:
        """Layers by name, tied names included; without layers that have left the tiers to train."""
        found = {name: ref() for name, ref in self._layers.copy().items()}  # copy is atomic: other threads may unwrap
        return {name: layer for name, layer in found.items() if isinstance(layer, SwappedLayer)}

    def swapped(self) -> list[tuple[str, Swap, SwappedLayer]]:
        """Return the swaps still in effect, with layer names and layers: none after `release_`."""
        layers = self.layers
        return [(name, swap, layers[name]) for name, swap in self._swaps.items() if name in layers]

    def held_bytes(self) -> int:
        """Bytes of all weights: of their pages, whatever tiers have copies, or dense while they are not encoded."""
        pages = self._stack.pages
        return sum(
            sum(pages[key].nbytes for key in layer.handle.keys) or swap.dense_bytes for _, swap, layer in self.swapped()
        )

    def layers_now(self) -> Iterable[SwappedLayer]:
        """Return the layers, see `layers`."""
        return self.layers.values()

    @property
    def handles(self) -> set[Weight]:
        """The weights of the layers."""
        return {layer.handle for layer in self.layers.values()}

    def pages(self) -> list[tuple[Weight, tuple[PageSpec, ...]]]:
        """Return the pages of each weight: stored ones, else planned ones."""
        layers, names, found = self.layers, self._stack.names, []
        for swap in self._plan.swaps:
            if swap.name in layers:
                handle = layers[swap.name].handle
                stored = [page for page in map(self._stack.pages.get, handle.keys) if page is not None]
                specs = tuple(PageSpec(p.key, p.layout.plane, p.nbytes, names[p.home], swap.by_rows) for p in stored)
                planned = (replace(page, key=self._prefix + page.key) for page in swap.pages)
                found.append((handle, specs or tuple(planned)))
        return found

    def assign_homes(self, homes: Mapping[str, str]) -> None:
        """Set the homes, by page key, of pages that are stored from now on; stored pages stay."""
        for handle, pages in self.pages():
            handle.assign_homes({page: homes.get(page.key, page.home) for page in pages})

    def forget_ready(self) -> None:
        """Drop all cached views of pages, which may have moved."""
        for handle in self.handles:
            handle.forget_ready()

    def shell_bytes(self) -> int:
        """Bytes of dense weights that are still to be encoded; 0 in training, which never encodes them."""
        if self._plan.mode == "train":
            return 0
        return sum(swap.dense_bytes for _, swap, layer in self.swapped() if not layer.materialized)

    def resident_bytes(self) -> int:
        """Bytes of pages in the top tier."""
        top = self._stack.levels[0].slots
        return sum(page.nbytes for _, pages in self.pages() for page in pages if page.key in top)

    def materialize_(self, *, progress: bool | None = None) -> bool:
        """Encode every unencoded layer; False if there was none."""
        layers = self.layers
        for layer in layers.values():
            layer.keep_given_()
        waiting = {name: layer for name, layer in layers.items() if not layer.materialized}
        with Progress("encoding", sum(map(_dense_bytes, waiting.values())), show=progress) as work:
            for name, layer in waiting.items():
                work.at(name)
                layer.materialize_()
                work.done(_dense_bytes(layer))
        return bool(waiting)

    def release_(self) -> None:
        """Turn every layer back into a plain one with its dense weight, one at a time; the next call resumes after an
        interrupt."""
        with Progress("decoding", sum(map(_dense_bytes, self.layers.values()))) as work:
            for name, layer in [(name, ref()) for name, ref in self._layers.items()]:
                work.at(name)
                nbytes = _dense_bytes(layer) if isinstance(layer, SwappedLayer) else 0
                if layer is not None:
                    self._release_one_(layer)
                del self._layers[name]
                work.done(nbytes)
        for handle in self._dense:  # resumes after Ctrl-C
            handle.retire()
        self._dense.clear()

    def _release_one_(self, layer: nn.Module) -> None:
        handle = layer.__dict__.get("_vb_handle")  # None, or left on a plain layer: Ctrl-C in an earlier call
        if isinstance(layer, SwappedLayer):
            layer.notice_writes()
            handle = layer.handle
            parameter = handle.spec.site.parameter
            self._dense[handle] = layer.release_(self._dense.get(handle))._parameters[parameter]
        strip(layer)
        if handle is not None and not handle.layers:
            handle.retire()

    def clear(self) -> None:
        """Forget every layer."""
        self._layers.clear()


def _dense_bytes(layer: VBLayer) -> int:
    return layer.handle.spec.weight_bytes
