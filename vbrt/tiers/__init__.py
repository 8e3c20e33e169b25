"""Where pages live: tiers (memories and stores), and the stack that moves pages between them."""

from vbrt.tiers.lease import Lease, LeasedTensors
from vbrt.tiers.memory import Buffer, MemoryTier
from vbrt.tiers.peer import PeerTier
from vbrt.tiers.protocol import Tier
from vbrt.tiers.recorder import Recorder
from vbrt.tiers.recording import Recording
from vbrt.tiers.slots import Level, Owner, Page
from vbrt.tiers.ssd import SsdTier
from vbrt.tiers.stack import TierStack, detached_stack
from vbrt.tiers.tally import Tally

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
