"""Data sheets of GPUs: memory, rates and limits by name, from `data_sheets.toml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vbrt.config.presets import read_toml
from vbrt.errors import ArgumentError

__all__ = ["DataSheet", "find_sheet", "named_sheet", "sheets"]

_FILE = Path(__file__).with_name("data_sheets.toml")
_TAKEN_GIB = 0.75  # by driver, display and CUDA's context
_CHECK_BITS = 1 / 16  # of memory, for ECC beside the data
_LANES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """A GPU as its vendor describes it; the comments of data_sheets.toml explain each figure.

    Attributes:
        name: as users write it; torch_name: as torch reports it.
        shared_kib: shared memory of a multiprocessor, and of one block.
        link_gb_s: H2D copies from pinned memory, over the card's own lanes.
    """

    name: str
    torch_name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_gib: float
    memory_gb_s: float
    l2_mib: float
    tflops: float
    fp32_tflops: float
    pcie: tuple[int, int]
    boost_mhz: int
    shared_kib: tuple[int, int]
    link_gb_s: float
    fp8_tflops: float = 0.0
    ecc: bool = False
    other_names: tuple[str, ...] = ()

    @property
    def free_bytes(self) -> int:
        """Memory for a model: less check bits, driver and context."""
        return int((self.memory_gib * (1 - self.ecc * _CHECK_BITS) - _TAKEN_GIB) * (1 << 30))

    @property
    def has_bf16(self) -> bool:
        """True if tensor cores multiply bf16."""
        return self.capability >= (8, 0)


@cache
def sheets() -> Mapping[str, DataSheet]:
    """Return all data sheets by the names that users write, older GPUs first."""
    found = read_toml(_FILE, str(_FILE))
    return {name: _sheet(name, each, found) for name, each in found["gpu"].items()}


def find_sheet(name: str) -> DataSheet | None:
    """Return the data sheet of a GPU by any of its names, in any case; None: an unknown GPU."""
    wanted = _plain(name)
    return next((s for s in sheets().values() if wanted in map(_plain, (s.name, s.torch_name, *s.other_names))), None)


def named_sheet(name: str) -> DataSheet:
    """Return the data sheet of a GPU by any of its names. Raises ArgumentError: an unknown GPU."""
    found = find_sheet(name)
    if found is None:
        raise ArgumentError(
            f"no data sheet of a GPU {name!r}; there are {', '.join(sheets())}; on the machine itself, "
            "`vbrt tune --machine` measures it, and for others --link, --memory and --tflops say how fast it is"
        )
    return found


def _plain(name: str) -> str:
    words = name.lower().replace("-", " ").split()
    return " ".join(word for word in words if word not in ("nvidia", "geforce", "tesla"))


def _sheet(name: str, given: Mapping, known: Mapping) -> DataSheet:
    major, minor = given["capability"]
    generation, lanes = given["pcie"]
    derived = {
        "capability": (major, minor),
        "pcie": (generation, lanes),
        "other_names": tuple(given.get("other_names", ())),
        "shared_kib": tuple(known["shared_kib"][f"{major}.{minor}"]),
        "link_gb_s": known["pinned_gb_s"][str(generation)] * lanes / _LANES,
    }
    return DataSheet(name=name, **{**given, **derived})
