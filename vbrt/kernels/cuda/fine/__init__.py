"""Fine planes merged with coarse ones into the original weight, in one pass, for cuBLAS.

The fine plane says for every 4096th weight how many entries of its two lists come before, so that a program can start
anywhere. On a GPU the coarse page of an `exact` weight is in the tile order of the fused kernels, and the kernel that
merges reads it so: a pass with `precision("coarse")` uses the same page.

Coded fine planes have a kernel of their own (`coded_triton.py`), which reads them as they came over the link: a second
copy, expanded, would be written and read again. A prefix sum says where each weight's extra bits are, as it does for
the lists of plain ones.
"""

__all__: list[str] = []
