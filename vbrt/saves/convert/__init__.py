"""Conversion without the model: a checkpoint's weights are read, encoded and written one after the other, resumable.

`convert.py` puts pieces into files of 128 MiB of dense weights, or 1/256 of the model if that is more, writes the
manifest last, and copies config, tokenizer, templates and licence. `conversion_journal.py` adds a line to
`vbrt-convert.jsonl` for each finished file: names, dtypes, shapes, digests. A conversion goes on only if vbrt's
version, the source files, the config and the number of files agree; a file counts as finished if its bytes have the
digests of its line, and half a line is no line. `inspection.py` (`vbrt inspect`) uses the same plan.
"""

__all__: list[str] = []
