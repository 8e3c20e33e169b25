"""The command line: one file a command, found by name; results on stdout, everything else on stderr.

Only the called command's file is imported, and torch only after what can be checked without it. `process_start.py` asks
torch's allocator for expandable segments before torch is imported, since rests between pages of a pass would fit
nothing else. `token_stream.py` is the listener of generated text: plain, or with a live part below the text, which
looks at the counters every quarter of a second, in the generating thread. During a reply of `vbrt chat` SIGINT sets a
flag that a stopping criterion reads, so no pass is cut; the second one raises KeyboardInterrupt.
"""

__all__: list[str] = []
