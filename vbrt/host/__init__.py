"""Services of the operating system: safe file access, host memory, mapped files, worker threads, a stats endpoint; and
of the accelerator that torch computes on (`accelerator.py`).

The lowest room: it knows nothing of pages or models. Ctrl-C may come in any call here; threads and bars refer to their
work weakly and are stopped through calls into C, so that nothing stays behind.

**Memory.** `host_memory.py` maps memory for pages: private anonymous memory with huge pages where the CPU computes;
shared memory where a GPU copies from it, because a fork may give private memory other physical pages.

**Mapped weights.** `from_pretrained` maps its safetensors files, and a mapping stays while any tensor in it lives. So a
weight that is mapped from a file is paged out once it is encoded (`mapped_weights.py`, MADV_PAGEOUT): the process
shrinks by its bytes, nothing can be lost. The price: where no other process maps it, the file also leaves the page
cache, and the next start reads the drive. It needs Linux 5.4 and a file that this user owns or may write.

**Reading ahead** (`file_prefetch.py`). A loader that encodes, or sends weights to a GPU, would leave the drive idle
meanwhile, and a mapping is read a few pages at a time. So four threads read files into the page cache, 8 MiB a read, as
far ahead as an eighth of the available memory, at most 4 GiB. It is advice: a wrong guess costs a read, and a file that
cannot be read is reported at its use. Bytes go to the page cache, not into buffers, because mappings, readers of single
matrices and other libraries all find them there.

**System calls** (`system_calls.py`): reads at an offset, file locks and directory handles, as POSIX and as Windows has
them. Names that only some systems have are asked for there, or with `hasattr` where one is used.

**Stats endpoint** (`stats_endpoint.py`): a Unix-domain socket in the user's runtime directory, mode 0600, served by a
thread that sleeps until asked. The process's own start decides, by VBRT_TOP=1 or `vb.live(offer=True)`. There is no
config key: it would let the config of a checkpoint open a socket.
"""

__all__: list[str] = []
