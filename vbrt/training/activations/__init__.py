"""Activation memory of repeated blocks: kept, recomputed in the backward pass, or offloaded to host memory.

A model's blocks enter, whose class changes in place to one whose `__call__` goes through torch's checkpoint: so a
block's hooks and its compiled forward run inside, and generators and autocast are torch's care. Offloading is a pair of
hooks on what autograd saves around that checkpoint: a block's input, and nothing of its inside. Two inputs are on their
way out at most, since the block that comes third waits for the first copy before memory is given back. The backward
pass asks for them in reverse order; each that is asked for starts the copy of the one before. What a dropped graph had
parked goes back at once. With a budget in bytes, the first pass offloads and measures the last block of each kind with
hooks that count; `vbrt.residency.activation_plan` decides from then on, before each pass, by the size of its first
input. The road not taken: hooks on every saved tensor inside a block, which move ten times the bytes.
"""

__all__: list[str] = []
