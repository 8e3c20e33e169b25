"""Saves of wrapped models: `vb.save` writes planes as they are, whole or by rank, and this reads them back.

A save is a directory: `vbrt.json` and safetensors files of about 1 GiB with the dense model's names. A plane is saved
as its format encodes it, `up.weight.codes`, `up.weight.fine.low`; a page in a kernel's order is unpacked first, so a
save made beside a GPU loads without one. Buffers that `state_dict` leaves out are saved too: a model on the meta device
has lost them, and a cast has changed them. Files have names that no other save has, are written under temporary names,
synced and renamed; the manifest, renamed last, makes them the save, and then the files of the one before are removed.
Two processes that save into one directory at a time are not provided for: the later one wins and may remove what the
other is writing.

Where a page has the fields of a plane as the file has them (`stores_as_encoded`), they are read straight into it, in
parts of a huge page by several threads, and digests are checked there: no buffer in between, whose pages would fault
and be given back weight by weight.

**Ranks** (`rank_saves.py`, `rank_slices.py`). Each rank writes a folder that is a save of its own; vbrt-ranks.json,
last and by one rank, makes them one. A reader joins the parts of one weight at a time and takes its own out: codes and
scales are copied by blocks, lists of fine planes made again from the restored weight. Nothing is encoded anew.

**Embedded planes** (`embedded_planes.py`): files of `save_pretrained` hold what `vb.save` writes under the same names,
and the manifest in their metadata. The weight's own name holds a marker of one byte, so that a reader without vbrt
stops at its shape. With an ssd tier the tensors go through a nameless file in its directory, mapped.
"""

__all__: list[str] = []
