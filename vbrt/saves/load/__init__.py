"""From files into a runtime: finds what a path holds, and fills planes weight by weight without the dense model.

`load_model.py`: meta parameters of the files' dtypes, then the plan (with the swaps of a save's manifest in place of
the config's choice), the stack and the VB layers, then pages: from a save as they are, from a dense checkpoint by
encoding one weight at a time. The model's own tensors are kept aside until the end, and any failure gives them back.
While it loads, freed memory is given back every 8 MiB: the C library would keep what weights leave between the pages,
in all as much as the dense model (48 layers of 2 MiB: 119 MiB instead of 39, of which 27 are pages). Large weights that
are not swapped stay mapped from a checkpoint's files on a CPU; a save's are read, because their digests are checked
once.

**While transformers reads** (`fill_while_reading.py`): plan, runtime and handles first, weights go into pages as they
come, layers are swapped last, so ties, missing weights and initialization meet plain modules. Weights that several
modules share, and weights whose dtype the model's class has set, are read densely and encoded at the end. With a
runtime that is there, `Filling` plans beside the models on it, and `finish` places the pages of all anew.

**Conversion units** (`save_units.py`): a model's weights as the tensors of a save, a piece at a time: a weight, one
expert, a kept tensor. The plan is made for a machine with room for everything; handles without pages encode in the
order of the format, so no runtime is built.
"""

__all__: list[str] = []
