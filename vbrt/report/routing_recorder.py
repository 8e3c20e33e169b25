"""Recorder of expert routing, for `vb.record_routing`.

A stack's guard has the recorder as `routing`, None while nothing is recorded; layers of routed experts call its
`note(name, ids)` in each forward. Recording copies the ids to the host, which waits for the device.
"""

import threading
from collections.abc import Iterable, Sequence
from os import PathLike

from vbrt.residency.access_trace import Pass
from vbrt.residency.policy import FORWARD
from vbrt.residency.routing_file import check_routing_path, write_routing
from vbrt.residency.routing_trace import Routed, RoutedLayer, Routing

__all__ = ["RoutingRecorder"]


class RoutingRecorder:
    """Buffer of routing records, written to a file at the end.

    Args:
        layers: the layers of routed experts, in the order of the model.
        path: of the file to write.
        prefix: of the names of layers and phases that are passed in.

    Raises:
        ArgumentError: the file cannot be written.
    """

    def __init__(self, layers: Sequence[RoutedLayer], path: str | PathLike[str], *, prefix: str = "") -> None:
        self.layers, self.path = tuple(layers), check_routing_path(path)
        self._numbers = {prefix + layer.name: number for number, layer in enumerate(self.layers)}
        self._prefix = prefix
        self._records: list[Pass | Routed] = []
        self._seen: set[int] = set()  # layers that have run in this pass
        self._marked = False
        self._lock = threading.Lock()

    def begin_pass(self, phase: str = FORWARD) -> None:
        """Record the begin of a pass over the model."""
        with self._lock:
            self._marked = True
            self._begin(phase.removeprefix(self._prefix))

    def _begin(self, phase: str) -> None:
        if self._records and isinstance(self._records[-1], Pass):
            self._records.pop()  # nothing was routed in it
        self._records.append(Pass(phase))
        self._seen.clear()

    def note(self, layer: str, tokens: Iterable[Iterable[int]]) -> None:
        """Record the routed experts of each token in a forward of a layer; ids of no expert are dropped.

        A layer of another model is not recorded. Without marked passes, one begins when a layer runs again.
        """
        number = self._numbers.get(layer)
        if number is None:
            return
        experts = self.layers[number].experts
        chosen = tuple(tuple(sorted({e for e in token if 0 <= e < experts})) for token in tokens)
        with self._lock:
            if not self._records or (number in self._seen and not self._marked):
                self._begin(FORWARD)
            self._seen.add(number)
            self._records.append(Routed(number, chosen))

    @property
    def routing(self) -> Routing:
        """Routing recorded so far."""
        with self._lock:
            records = tuple(self._records)
        return Routing(self.layers, records[:-1] if records and isinstance(records[-1], Pass) else records)

    def write(self) -> None:
        """Write the file. Raises ArgumentError: it cannot be written."""
        write_routing(self.routing, self.path)
