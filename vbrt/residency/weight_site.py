"""Weight sites: module and parameter of a weight in a model, and the memory layout of its matrices.

A `nn.Linear` has one site of one matrix. Routed experts that are kept as two 3-D parameters have two sites of as many
matrices as experts. Tied weights have one site for each module that holds them.
"""

from dataclasses import dataclass
from math import prod

__all__ = ["EXPERTS", "ROOT", "Shard", "WeightSite"]

ROOT = "(root)"  # the name of the model itself among its modules
EXPERTS = -1  # `Shard.dim` of ranks that hold some of the matrices each


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a weight that one rank of a group holds: part `index` of `count` along `dim`.

    Attributes:
        dim: 0 for N, 1 for K of each matrix; `EXPERTS` where ranks hold whole matrices.
        whole: the size of that dimension over all ranks; 0 where all ranks hold equally much.
        parts: how many matrices of one size lie one behind the other along `dim`, each of which is cut for itself: 2
            for gate and up in one weight.
        group: the name of the ranks' process group.
    """

    dim: int
    index: int
    count: int
    whole: int = 0
    parts: int = 1
    group: str = ""

    def spans(self, size: int, index: int | None = None) -> list[tuple[int, int]]:
        """Return the ranges (begin, end) of the whole dimension that a rank holds, in the order in which it does, as
        `torch.distributed.tensor` cuts: the last ranks may hold less, or nothing.

        Args:
            size: what this rank holds of the dimension.
            index: of the rank in the group; by default this one's.
        """
        index = self.index if index is None else index
        part = (self.whole or size * self.count) // self.parts
        chunk = -(-part // self.count)
        begin, end = min(part, index * chunk), min(part, (index + 1) * chunk)
        return [(at * part + begin, at * part + end) for at in range(self.parts) if end > begin]


@dataclass(frozen=True, slots=True)
class WeightSite:
    """One parameter of one module.

    Attributes:
        module: the module's name in the model; `ROOT` for the model itself.
        shape: (N, K) of each matrix: N outputs (or rows of a table), K inputs (or columns).
        parameter: the parameter's name in the module.
        kind: the name of the module's kind (`vbrt.layers.modules.layer_kinds`).
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
        of_all = self.shard.whole or self.shape[self.shard.dim] * self.shard.count
        n, k = (of_all if dim == self.shard.dim else size for dim, size in enumerate(self.shape))
        return n, k

    @property
    def whole_matrices(self) -> int:
        """The number of matrices over all ranks."""
        if self.shard is None or self.shard.dim != EXPERTS:
            return self.matrices
        return self.shard.whole or self.matrices * self.shard.count

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
