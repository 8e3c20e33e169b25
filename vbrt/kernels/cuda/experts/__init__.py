"""MoE kernels for experts in tile order on a GPU: grouped kernels that read each expert's weights from its own page."""

__all__: list[str] = []
