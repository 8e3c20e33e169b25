"""Where pages live: tiers (memories and stores), and the stack that moves pages between them.

Each of protocols, storage, stack and schedule imports from those before it only; `tier_stack` puts them together. Keys
of pages enter, as leases; views into pages on the computing device leave. A policy of `vbrt.residency` decides, this
room moves.

**Budgets are hard**: a budget limits what a tier allocates, at every moment: buffers in use, buffers kept for reuse,
and buffers that are still being filled. A new page first evicts, then allocates. Weights are read-only in inference, so
eviction drops a copy and never writes. Not in the budgets: a page of `tiers.cpu.path` once more, while it is shared;
scratch for one decoded weight; on a CPU the memory of up to four large ones stays for those that follow, until the
model is closed or unwrapped.

**Speed.** A steady pass of streamed layers neither synchronizes nor allocates on the GPU; a test reads that from a
profiler's trace.
"""

from vbrt.tiers.protocols.tier import Tier
from vbrt.tiers.schedule.graph_capture import Recording
from vbrt.tiers.stack.event_recorder import Recorder
from vbrt.tiers.stack.lease import Lease
from vbrt.tiers.stack.page_counters import Tally
from vbrt.tiers.stack.scheduling import LeasedTensors
from vbrt.tiers.stack.slots import Level, Owner, Page
from vbrt.tiers.storage.memory_tiers import Buffer, MemoryTier
from vbrt.tiers.storage.peer_memory import PeerTier
from vbrt.tiers.storage.ssd_tier import SsdTier
from vbrt.tiers.tier_stack import TierStack, detached_stack

__all__ = [
    "Buffer",
    "Lease",
    "LeasedTensors",
    "Level",
    "MemoryTier",
    "Owner",
    "Page",
    "PeerTier",
    "Recorder",
    "Recording",
    "SsdTier",
    "Tally",
    "Tier",
    "TierStack",
    "detached_stack",
]
