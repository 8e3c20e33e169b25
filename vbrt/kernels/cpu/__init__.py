"""CPU kernels in C: prebuilt for several instruction sets, or built on the machine that runs them."""

__all__: list[str] = []
