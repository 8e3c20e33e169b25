"""The list: importing it fills `OPERATIONS`, in the order of the table."""

from tests.contract import calls, gradients, tracing, weights, copies, attributes  # noqa: I001  # the table's order
from tests.contract.operation import OPERATIONS

__all__ = ["OPERATIONS"]
_FILES = (calls, gradients, tracing, weights, copies, attributes)
