"""A weight's site: the place in a model that a weight belongs to, and how its matrices lie there.

A `nn.Linear` has one site of one matrix. Routed experts that are kept as two 3-D parameters have two sites of as many
matrices as experts. Tied weights have one site for each module that holds them.
"""

from dataclasses import dataclass
from math import prod

__all__ = ["ROOT", "Shard", "WeightSite"]

ROOT = "(root)"  # the name of the model itself among its modules


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each matrix that one rank of a group holds: part `index` of `count` along `dim` of (N, K)."""

    dim: int
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class WeightSite:
    """One parameter of one module.

    Attributes:
        module: the module's name in the model; `ROOT` for the model itself.
        shape: (N, K) of each matrix: N outputs (or rows of a table), K inputs (or columns).
        parameter: the parameter's name in the module.
        kind: the name of the module's kind (`vbrt.layers.kinds`).
        matrices: how many matrices the parameter stacks; 1 for a parameter of two dimensions.
        transposed: True if the module keeps each matrix as [K, N].
        stacked: True if the matrices lie along a dimension in front, also where there is one.
        shard: the part of each matrix that this process holds, and `shape` describes; None for the whole.
    """

    module: str
    shape: tuple[int, int]
    parameter: str = "weight"
    kind: str = "Linear"
    matrices: int = 1
    transposed: bool = False
    shard: Shard | None = None
    stacked: bool = False

    @property
    def name(self) -> str:
        """The name in plans, stats, page keys and errors: the module's, and the parameter's unless it is `weight`."""
        return self.module if self.parameter == "weight" else f"{self.module}.{self.parameter}"

    @property
    def tensor(self) -> str:
        """The parameter's name in the dense model's state dict."""
        return self.parameter if self.module == ROOT else f"{self.module}.{self.parameter}"

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The shape in which the module keeps the parameter: (N, K) or (K, N), stacked or one below the other."""
        if self.stacked:
            return (self.matrices, *self.matrix_shape)
        rows, columns = self.matrix_shape
        return self.matrices * rows, columns

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape of each matrix as the module keeps it: (N, K) or (K, N)."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def whole_shape(self) -> tuple[int, int]:
        """(N, K) of each matrix over all ranks."""
        if self.shard is None:
            return self.shape
        n, k = (size * (self.shard.count if dim == self.shard.dim else 1) for dim, size in enumerate(self.shape))
        return n, k

    @property
    def parameters(self) -> int:
        """The number of weights that this process holds."""
        return self.matrices * prod(self.shape)

    def page_key(self, plane: str) -> str:
        """The key of the page of a plane."""
        return f"{self.name}#{plane}"

    def expert_key(self, plane: str, expert: int) -> str:
        """The key of the page that holds a plane of all matrices of one routed expert of the module."""
        return f"{self.module}#{plane}.{expert}"
