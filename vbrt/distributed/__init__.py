"""Models over several devices and ranks.

What is spread lives elsewhere: `vbrt.tiers.storage` has neighbours' memory, several links and pages that ranks share;
`vbrt.layers.weights.weight_shards` parts of weights; `vbrt.saves.saved.rank_saves` their files. Here: layers over
devices, and ranks that stop together.

**Layers over devices** (`pipeline_devices.py`, `block_split.py`) are attached part by part: blocks are cut by the bytes
of their pages, each device has a runtime of its own, and a hook before each unit moves its arguments there and makes
the device current. Units that share a parameter go to one device; blocks that do are refused. A pass over several
devices is not captured.

**Ranks stop together** (`rank_watch.py`). A thread writes to torch.distributed's store where a rank is, once a second,
through a connection of its own, since a wait for another rank occupies the one that torch has; a page that cannot be
read is told before the error is raised. Who is raised out of a collective listens for two beats and a half (longer if
it has hung itself, and woken up) and names the rank that is furthest behind, of those that are level one that is
silent; the first to find out tells it to all, so that they name the same rank. Silence is counted in a rank's own
beats: a job that was suspended as a whole goes on. An error that is a rank's own may have met all ranks or one: it
begins no other pass before all have left theirs, or the group's timeout is over, because its sums would be added to
those that others wait for. Before the first pass ranks compare names, shapes and formats of what they hold parts of. On
GPUs no error is raised in the ranks that wait: the thread aborts NCCL's communicator when a rank has failed, is silent,
or stays behind in one place for four fifths of the group's timeout.
"""

__all__: list[str] = []
