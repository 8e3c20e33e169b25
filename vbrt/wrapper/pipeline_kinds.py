"""Records of other libraries' classes that hold models, by which `vbrt.wrap` recognises a pipeline.

Integrations register them under library and base-class name, so that an object is recognised without importing its
library. Pure Python: a record says where the models are, and which methods are refused once they are wrapped.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from vbrt.wrapper.registered_kinds import HOLDERS

__all__ = ["CallPhases", "HolderKind", "holder_kind_of"]


_MOST_RUNS = 4  # runs with separate phases; policies remember few phases


@dataclass(frozen=True, slots=True)
class HolderKind:
    """How to find and run the models of a class of objects.

    Attributes:
        parts: returns an object's named parts; those that are modules are its models.
        phases: (name pattern, phase) for models whose `no_grad` passes are not a language model's.
        refused: method -> what to do instead.
        entry_hook: attribute of a model on which the library calls `pre_forward(model)` before methods other than
            `forward`; "" for none.
        moved_by: returns what already moves a model between devices; "" for nothing.
        device: attribute with the device for inputs; "" if the object asks its models.
    """

    parts: Callable[[Any], Mapping[str, Any]]
    phases: tuple[tuple[str, str], ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    entry_hook: str = ""
    moved_by: Callable[[Any], str] = lambda model: ""
    device: str = ""

    def phase_of(self, name: str) -> str | None:
        """Return the phase of a model's passes; None if it follows from their inputs."""
        return next((phase for pattern, phase in self.phases if fnmatchcase(name, pattern)), None)


class CallPhases:
    """Names the passes of a pipeline's models so that each call is one recurring sequence of phases.

    A text encoder that runs for the prompt and, after others, again for the negative prompt gets two phases, since they
    have different successors: a policy that predicts phases by the last successor would otherwise see the text encoders
    as the whole cycle, and leave no room for the denoising model.
    """

    def __init__(self, kind: HolderKind) -> None:
        self._kind = kind
        self._runs: Counter[str] = Counter()  # runs of each model since the last step
        self._last = ""

    def name(self, model: str, phase: str) -> str:
        """Return the phase for a model's pass, given the one that its inputs suggest."""
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


#: default record: the models are the object's attributes
UNKNOWN = HolderKind(_attributes)


def holder_kind_of(holder: object) -> HolderKind:
    """Return the record of an object's class, or `UNKNOWN`."""
    bases = ((base.__module__.split(".")[0], base.__name__) for base in type(holder).__mro__)
    return next((HOLDERS[base] for base in bases if base in HOLDERS), UNKNOWN)
