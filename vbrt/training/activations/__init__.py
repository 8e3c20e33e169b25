"""Activation memory of repeated blocks: kept, recomputed in the backward pass, or offloaded to host memory.

A block's class changes in place to one whose `__call__` goes through torch's checkpoint: so a block's hooks and its
compiled forward run inside it, and torch handles generators and autocast. Offloading is a pair of saved-tensor hooks
around that checkpoint, which see a block's input only. At most two D2H copies are in flight: the third block waits for
the first copy, which frees its memory. The backward pass unpacks inputs in reverse order; each unpack prefetches the
previous block's input. Buffers of a dropped graph are freed at once. With a budget in bytes, the first pass offloads
and measures the last block of each kind with counting hooks; from then on `vbrt.residency.activation_plan` decides
before each pass, by the size of its first input. Rejected: hooks on every saved tensor inside a block, which move ten
times the bytes.
"""

__all__: list[str] = []
