"""Schedules: a round of passes that recurs is worked out once and replayed, also inside a CUDA graph.

The stack's leases enter by position; copies through a ring of buffers are issued ahead of them on the copy stream.

Every page that passes through has a fixed slot, so a round ends with what it begins with. While a programme runs a
lease is a step forward: it counts what the policy would have counted, waits for the events of its copies, and its
release starts the next ones; no policy is asked, nothing is reserved, and views are made once. Whatever else comes
(another page, a second lease, another stream, a budget, a page that goes, a timeline) ends the run: the policy is given
the accesses since the pass began, and the pages in the ring get slots as it wants them. Lease by lease, as ever: pages
from a drive or from pageable memory, routed experts of which the host decides, other policies than `scheduled`. Where
the GPU decides which experts stay, the other layers have a programme.

A page that passes through costs five calls: the copy, and each of the two streams records an event and waits for the
other's. `stream_link.py` makes them through ctypes on the CUDA runtime, with arguments prepared when the programme
begins; torch looks at tensors, streams and devices anew in each call. Under a capture, and where another device is
current, the calls are torch's. `scripts/lease_cost.py` times a lease by policy and by programme,
`scripts/programme_bench.py` on a GPU.

**A streamed pass as one CUDA graph** (`graph_capture.py`). `runtime.recording(phase)` leads a programme to the
beginning of a pass, by passes that move pages and compute nothing if need be; under the capture the very same leases
and copies are recorded, but those of pages that the next replay begins with: a graph ends with all of its copies, and
what follows it, such as sampling, would wait for them. Where their slots are free it records an event, for which the
same copies wait outside of it. So replays one after the other keep the link busy across their ends.
`recording.replay(graph)` counts a pass and puts the ring in order first, should other passes have used it. A graph
keeps no page from moving: after a budget change, a page rehomed or retired, or another choice of pages that stay,
`replay` returns False with nothing run. A graph captured without a recording may hold pages that live on the GPU only;
they stay there from then on, and a budget that would move them is refused.

**Blocks of a training pass** (`block_ring.py`) are graphs of their own, which read their pages at fixed places. Whole
blocks pass through two regions, so that a backward that computes its forward again reads each page once; an order that
recurs is prefetched, any other is right.
"""

__all__: list[str] = []
