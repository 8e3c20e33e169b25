"""Activation plan: which blocks keep, recompute or offload their activations within a memory limit."""

from collections.abc import Sequence

__all__ = ["KEEP", "OFFLOAD", "RECOMPUTE", "choose"]

KEEP, RECOMPUTE, OFFLOAD = "keep", "recompute", "offload"
_IN_FLIGHT = 3  # offloaded inputs still on the device: two in D2H, one in H2D copies


def choose(room_bytes: int, inputs: Sequence[int], insides: Sequence[int]) -> list[str]:
    """Return the choice per block under which everything kept at the end of a forward fits into `room_bytes`.

    The fastest fitting choice: all inputs stay on the device if they fit, then the last blocks keep all activations as
    far as there is room. If not even offloading fits, all blocks offload.

    Args:
        room_bytes: on the device.
        inputs: bytes of each block's input.
        insides: bytes that each block keeps without recomputation, its input included.
    """
    if sum(insides) <= room_bytes:
        return [KEEP] * len(inputs)
    again = max(insides)  # one block at a time is recomputed in full for its backward
    if sum(inputs) + again <= room_bytes:
        mode, used = RECOMPUTE, sum(inputs) + again
    else:
        mode, used = OFFLOAD, _IN_FLIGHT * max(inputs) + again
    modes = [mode] * len(inputs)
    for index in reversed(range(len(inputs))):
        more = insides[index] - (inputs[index] if mode == RECOMPUTE else 0)
        if used + more > room_bytes:
            break
        modes[index], used = KEEP, used + more
    return modes
