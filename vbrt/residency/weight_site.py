"""Weight sites: module and parameter of a weight in a model, and the memory layout of its matrices.

`nn.Linear`: one site of one matrix. Routed experts in two 3-D parameters: two sites, with a matrix per expert. Tied
weights: one site per module that holds them.
"""

from dataclasses import dataclass
from math import prod

__all__ = ["EXPERTS", "ROOT", "Shard", "WeightSite"]

ROOT = "(root)"  # name of the model itself, as a module
EXPERTS = -1  # `Shard.dim` of expert parallelism: each rank holds some of the matrices


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard of a weight on one rank of a group: part `index` of `count` along `dim`.

    Attributes:
        dim: 0 for N, 1 for K of each matrix; `EXPERTS` where ranks hold whole matrices.
        whole: size of that dimension over all ranks; 0 if all shards are equal.
        parts: equal matrices concatenated along `dim` and sharded separately: 2 for a fused gate_up weight.
        group: name of the process group.
    """

    dim: int
    index: int
    count: int
    whole: int = 0
    parts: int = 1
    group: str = ""

    def spans(self, size: int, index: int | None = None) -> list[tuple[int, int]]:
        """Return the ranges (begin, end) of the whole dimension that a rank holds, in memory order. Cut as by
        `torch.distributed.tensor`: the last ranks may hold less, or nothing.

        Args:
            size: length of this rank's shard along the dimension.
            index: rank in the group; by default this one.
        """
        index = self.index if index is None else index
        part = (self.whole or size * self.count) // self.parts
        chunk = -(-part // self.count)
        begin, end = min(part, index * chunk), min(part, (index + 1) * chunk)
        return [(at * part + begin, at * part + end) for at in range(self.parts) if end > begin]


@dataclass(frozen=True, slots=True)
class WeightSite:
    """Weight site: one parameter of one module.

    Attributes:
        module: the module's name in the model; `ROOT` for the model itself.
        shape: (N, K) of each matrix: N outputs (or rows of a table), K inputs (or columns).
        parameter: the parameter's name in the module.
        kind: the name of the module's kind (`vbrt.layers.modules.layer_kinds`).
        matrices: number of matrices in the parameter; 1 if it is 2-D.
        transposed: True if the module stores each matrix as [K, N].
        stacked: True if the parameter is 3-D, with the matrices along dim 0, even a single one.
        shard: this process's shard of each matrix, which has `shape`; None if unsharded.
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
        """Shape of the parameter in the module: matrices stacked, or concatenated along dim 0."""
        if self.stacked:
            return (self.matrices, *self.matrix_shape)
        rows, columns = self.matrix_shape
        return self.matrices * rows, columns

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Shape of each matrix in the module: (N, K), or (K, N) if transposed."""
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
        """Number of matrices over all ranks."""
        if self.shard is None or self.shard.dim != EXPERTS:
            return self.matrices
        return self.shard.whole or self.matrices * self.shard.count

    @property
    def parameters(self) -> int:
        """Number of weights in this process."""
        return self.matrices * prod(self.shape)

    def page_key(self, plane: str) -> str:
        """Return the key of a plane's page."""
        return f"{self.name}#{plane}"

    def expert_key(self, plane: str, expert: int) -> str:
        """Return the key of the page with one plane of all matrices of a routed expert."""
        return f"{self.module}#{plane}.{expert}"
