"""Where pages live: tiers (memories and stores), and the stack that moves pages between them.

Each of protocols, storage, stack and schedule imports from those before it only; `tier_stack` puts them together.
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
