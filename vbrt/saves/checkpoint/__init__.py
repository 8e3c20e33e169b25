"""Checkpoints of training: everything that the next step depends on, in a directory, for any tiers and for plain torch.

A directory of safetensors files and a manifest, as saves are: files have the name of no other checkpoint, the
manifest's renaming makes them the checkpoint, and the old ones go after that. Weights are written one at a time, joined
to fp32, with their moments beside them, after all updates: so a step is in it whole or not at all. State that is
updated in place has no history, and needs none: what a killed process leaves in page files is not read again.
Everything is under the names and numbers of torch's state dicts, whatever tiers it came from: which is why other tiers,
and plain torch, go on from it. Names, shapes, groups and the optimizer's class are checked before anything is loaded;
each tensor's digest as it is read. The optimizer's own `state_dict()` lends the moments to torch's for as long as that
runs, and `load_state_dict` takes them out first, since torch would move them to the device of the parameter.
"""

__all__: list[str] = []
