"""Records which experts the tokens of a model go to, for `vb.record_routing`.

A stack's guard has the recorder as `routing`, which is None unless somebody records; layers of routed experts call its
`note(name, ids)` in each of their forwards. Recording reads the ids on the host, which waits for the device.
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
    """Keeps what layers note, and writes it into a file.

    Args:
        layers: the layers of routed experts, in the order of the model.
        path: of the file to write.
        prefix: what names of layers and phases have in front where they are told.

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
        """Note that a pass over the model begins."""
        with self._lock:
            self._marked = True
            self._begin(phase.removeprefix(self._prefix))

    def _begin(self, phase: str) -> None:
        if self._records and isinstance(self._records[-1], Pass):
            self._records.pop()  # nothing was routed in it
        self._records.append(Pass(phase))
        self._seen.clear()

    def note(self, layer: str, tokens: Iterable[Iterable[int]]) -> None:
        """Note the experts that each token of a forward of a layer went to; ids that are none are left out.

        A layer of another model is not recorded. Where no pass was marked, one begins when a layer runs again.
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
        """What was recorded so far."""
        with self._lock:
            records = tuple(self._records)
        return Routing(self.layers, records[:-1] if records and isinstance(records[-1], Pass) else records)

    def write(self) -> None:
        """Write the file. Raises ArgumentError: it cannot be written."""
        write_routing(self.routing, self.path)
