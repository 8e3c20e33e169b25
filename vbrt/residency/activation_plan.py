"""Which blocks of a model keep their activations, which compute them again, and where the inputs of these wait."""

from collections.abc import Sequence

__all__ = ["KEEP", "OFFLOAD", "RECOMPUTE", "choose"]

KEEP, RECOMPUTE, OFFLOAD = "keep", "recompute", "offload"
_IN_FLIGHT = 3  # offloaded inputs that are on the device all the same: two on their way out, one on its way back


def choose(room_bytes: int, inputs: Sequence[int], insides: Sequence[int]) -> list[str]:
    """Return what each block does, for all that is kept at the end of a forward to fit into `room_bytes`.

    The faster way is taken where it fits: first all inputs stay on the device if they fit, then the last blocks keep
    everything for as long as there is room. Where not even offloading fits, all blocks offload.

    Args:
        room_bytes: of the device.
        inputs: bytes of each block's input.
        insides: bytes that each block keeps if nothing is computed again, its input included.
    """
    if sum(insides) <= room_bytes:
        return [KEEP] * len(inputs)
    again = max(insides)  # one block at a time has everything while its gradients are computed
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
