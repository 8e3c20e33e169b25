"""Storage tiers: where the bytes of pages are, and copies between two places.

GPU and CPU memory within a budget, files of an SSD (verified on each read), memory that ranks share, other GPUs over
NVLink. A page's bytes enter and leave; which pages, and when, is decided in `tiers.stack`.
"""

__all__: list[str] = []
