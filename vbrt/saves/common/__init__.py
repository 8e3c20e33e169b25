"""Parts that saves and checkpoints share: the manifest, renaming, compatibility of a model with files, assignment of
tensors.

**The manifest** (`manifest.py`, version 3) lists sites, shape, matrices and orientation of each weight, and file,
dtype, shape and XXH3-64 of each tensor, and carries a digest of its own content. Before anything is built from it every
field is checked; then the files must hold just these tensors. Version 2 (names instead of sites) and version 1 (no
digest, dtypes or shapes) are checked alike and still load; what a flipped bit there can change unseen is what no file
repeats, such as whether a bias trains.

**Renaming** (`renaming.py`): where transformers renames, merges or splits tensors as it loads, its own rules are
applied to one tensor of the model at a time.

**Buffers** on meta that no file has are computed by `_init_weights` of the transformers model that owns them, twice
over different contents, so that one that was not written shows; what is left is an error with names (`assign.py`).
"""

__all__: list[str] = []
