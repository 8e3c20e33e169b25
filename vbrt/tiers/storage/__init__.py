"""Storage tiers: where the bytes of pages are, and copies between two places.

GPU and CPU memory within a budget, files of an SSD (verified on each read), memory that ranks share, other GPUs over
NVLink. A page's bytes enter and leave; which pages, and when, is decided in `tiers.stack`.

**Page files** (`ssd_tier.py`): `<path>/run-<pid>-<random>/<serial>-<layer>.page`, a header of 4096 bytes (magic,
version, sizes, XXH3-64 of the page and of the header itself, key and layout as JSON), then the page. The page's digest
is over the digests of its segments of 512 KiB, so that several threads can read and verify one page. Written to a
temporary name, synced, renamed. Each run has its own directory, locked while the run lives (`run_directory.py`); a
later start removes dead runs' directories. Only files with names of vbrt's are removed, through descriptors of
directories that were opened without following a link, and only regular files are read, so a planted link or FIFO is
refused. Nothing is mapped: an I/O error is a TierError that names layer and file, where a mapping would raise a signal
that ends the process, and bytes that were verified may be read again.

**io = "auto"** reads through the page cache while all page files fit into half of the available memory, and with
O_DIRECT beyond that, where the cache would evict every page before its next use. Beside a GPU, worker threads read
ahead. Where the CPU computes they would take its cores, so they only have the system read files ahead, and only those
that the cache lacks (`preadv2` with RWF_NOWAIT tells); the thread that needs a page reads it, by OpenMP's own threads.
Half of the pages on a drive, two cores of a Zen 4 (`scripts/cpu_bench.py --part ssd`): with direct reads a token takes
0.74 of the time of the larger of drive and computing (drive: 1.5 GB/s); with buffered reads of cached files computing
takes 21 ms and a token 71 (94 with threads of ours instead of OpenMP's): each byte is copied and verified by the cores
that compute, at 10 to 12 GB/s. On paper direct reads win from a drive of 4.4 GB/s on.

**Rows** (`verified_blocks.py`): lookups in a table read parts of a page. In one pass over the page, when a row is first
wanted, the tier keeps a digest for each 4 KiB in memory (0.2 % of the page); later reads take whole blocks and verify
each.

**Neighbours' memory** (`peer_memory.py`) is a memory between gpu and cpu that keeps no copies; each neighbour has an
equal share of the budget. Pages come in one copy by the CUDA runtime's own call on the computing GPU's copy stream
(`device_copy.py`): torch's copies between two GPUs run on the source's default stream, which no graph can capture.

**Lanes** (`multi_link.py`) bring a page of 2 MiB and more in as many parts as there are links. A neighbour copies its
part into one of four chunks of 8 MiB over its own link and sends it on over NVLink, each on a stream of its device,
while the next chunk comes. The tier's copy stream only joins, so a lane begins with the next page at once. All calls go
to the CUDA runtime directly, because torch's change the current device twice. Measured on two H200s
(`scripts/links_bench.py`): own link 54.3 GB/s, both through chunks 106.6, both into their own GPUs 107.9. Without
chunks, as a copy from host memory that the neighbour's stream makes straight into the computing GPU's memory, both run
at 53.3: such a copy takes the target's link. Copies between the GPUs: 341 GB/s pulled, 372 pushed. In captured steps
dependencies between devices cost more than between streams of one: lanes gain 1.65 there, 1.87 eagerly.

**Shared pages** (`rank_shared_memory.py`) are a store of which each rank holds a range of each page's bytes. A rank
copies its part into the page's slot, and NCCL gathers the others' around it, in place: no staging, 1/N of the bytes
over each link. Collectives must come in one order on all ranks, so policies decide by the order of accesses alone,
budgets are the least of all ranks', the gpu's does not follow free memory, and worker threads gather nothing. What
cannot be equal is refused: routed experts and tables read by rows. After each pass, before any rank has the output,
ranks exchange a digest of the order and of what was written (through Gloo, so that a rank that is gone raises instead
of hanging), and every page gathered is summed on its GPU and compared with the sum of what was written. If something
differs, all ranks say the same: whose part is damaged, who holds other weights, where orders part.

**Mapped pages** (`mapped_memory.py`) are in memory once for all processes of a machine: each is a file of a tmpfs,
named by its content. A process fills a page as always and then maps the file of these bytes in its place, so that any
way to load a model shares, in any format and any CPU's page order, and the bytes mapped are those that were read.

**Pageable host memory** holds pages all the same: they reach the GPU through two small page-locked chunks
(`pinned_staging.py`).
"""

__all__: list[str] = []
