"""Classes of objects of other libraries that hold models: records by which `vbrt.wrap` takes a pipeline.

Integrations register them under the library and the name of a base class, so that an object is recognised without
its library. Pure Python: a record says where the models are, and what must not be called once they are wrapped.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from vbrt.wrapper.registered_kinds import HOLDERS

__all__ = ["CallPhases", "HolderKind", "holder_kind_of"]


_MOST_RUNS = 4  # that have phases of their own: policies remember a few phases only


@dataclass(frozen=True, slots=True)
class HolderKind:
    """How the models of a class of objects are found, and run.

    Attributes:
        parts: returns the named parts of an object; those that are modules are its models.
        phases: (pattern of names, phase) for models whose passes under `no_grad` are none of a language model.
        refused: method -> what to do instead.
        entry_hook: the attribute of a model on which the library calls `pre_forward(model)` before methods other than
            `forward`; "" if there is none.
        moved_by: returns what moves a model between devices already; "" for nothing.
        device: the attribute that says where the object puts inputs; "" if it asks its models.
    """

    parts: Callable[[Any], Mapping[str, Any]]
    phases: tuple[tuple[str, str], ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    entry_hook: str = ""
    moved_by: Callable[[Any], str] = lambda model: ""
    device: str = ""

    def phase_of(self, name: str) -> str | None:
        """Return the phase of a model's passes, or None where it follows from their inputs."""
        return next((phase for pattern, phase in self.phases if fnmatchcase(name, pattern)), None)


class CallPhases:
    """Names the passes of a pipeline's models so that each call is one sequence of phases that recurs.

    A text encoder that runs once for the prompt and, after others, once more for the negative prompt has two phases:
    what follows the first is not what follows the second, and a policy that expects phases by what followed them last
    would take the text encoders for all that recurs, and leave no room for the model that takes the steps.
    """

    def __init__(self, kind: HolderKind) -> None:
        self._kind = kind
        self._runs: Counter[str] = Counter()  # of each model since the last step
        self._last = ""

    def name(self, model: str, phase: str) -> str:
        """Return the phase of a pass of a model that begins, from the one that its inputs tell."""
        fixed, last, self._last = self._kind.phase_of(model), self._last, model
        if fixed is not None:
            self._runs.clear()
            return fixed
        if model != last:
            self._runs[model] += 1
        run = min(self._runs[model], _MOST_RUNS) if self._kind.phases else 1
        return phase if run == 1 else f"{phase}-{run}"


def _attributes(holder: object) -> dict[str, Any]:
    return dict(getattr(holder, "__dict__", {}))


#: of an object that no library has a record for: the models are its attributes
UNKNOWN = HolderKind(_attributes)


def holder_kind_of(holder: object) -> HolderKind:
    """Return the record of an object's class, or `UNKNOWN`."""
    bases = ((base.__module__.split(".")[0], base.__name__) for base in type(holder).__mro__)
    return next((HOLDERS[base] for base in bases if base in HOLDERS), UNKNOWN)
