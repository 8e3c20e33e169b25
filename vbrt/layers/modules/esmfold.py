"""VBEsmFoldLinear: ESMFold's linear layer, an nn.Linear that draws its first weight in ways of
its own.

Imported only once a model holds such a layer, so transformers stays optional.
"""

from vbrt.layers.modules.linear import VBLinear
from vbrt.libraries.transformers_api import EsmFoldLinear

__all__ = ["VBEsmFoldLinear"]


class VBEsmFoldLinear(VBLinear, EsmFoldLinear):
    """EsmFoldLinear with its weight in a tier stack."""
