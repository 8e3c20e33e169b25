"""Metadata of a timeline: models, config, machine, versions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Ran"]


@dataclass(frozen=True, slots=True)
class Ran:
    """Metadata of a recorded run.

    Attributes:
        models: class, size and formats of each model.
        config: where the config came from, such as 'preset "fp4"'.
        settings: every key of it, with the budgets at the end of the recording.
        machine: GPU, CPU and memory.
        versions: of Python and packages, by name.
        commit: of vbrt's checkout; None if it was installed from a wheel.
        date: when the recording ended, ISO 8601 in UTC.
    """

    models: tuple[str, ...] = ()
    config: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    date: str = ""
