"""Files as bytes: safetensors, GGUF and JSON, read and written a tensor at a time, with checks before anything is
believed.

**safetensors** (`safetensors_file.py`). The library writes a dict at once and reads through a mapping; here sizes are
known before the first byte, so a file is written while one layer after the other is leased, and read into fresh memory,
which neither keeps a file's pages in the process nor dies of an I/O error. Headers are parsed by the library, from a
copy of their bytes, so what it refuses is refused here; they may have 32 MiB.

**GGUF** (`gguf_file.py`) headers are parsed here: the library's reader follows any count that a file has, and takes
seconds for a vocabulary. Tensors must lie one behind the other, as llama.cpp demands.

**Where bytes land** (`read_target.py`). Planes that are taken as they are go from the page cache into page-locked
chunks, and from there to the GPU, whose kernel puts them into tile order. Fresh host memory would take a page fault for
every 4 KiB and then a copy at a sixth of the link's speed: 1.05 s a GB on an H200's host, where the drive takes 0.5 to
0.7 and this way 0.40 to 0.48 (`scripts/load_bench.py`). Tensor scales are read on the host, because they are looked at.
Pages that live in host memory take the same way; where no kernel wants an order of its own, conversions among them,
bytes stay on the host.

**Order of reading ahead** (`prefetch.py`) is guessed from names: `vbrt.load` reads embeddings and heads first, so that
the last read is small; transformers leaves them mapped until the end. Each use of a tensor names it, and that moves the
window.
"""

__all__: list[str] = []
