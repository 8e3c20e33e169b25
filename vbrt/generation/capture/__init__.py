"""Capture and replay of decode steps: `generate` runs them in place of a model's forward.

A forward call enters (`step_io` takes it apart into tensors); `session` decides whether it can be captured, replays it,
compares the first replays with eager steps, and falls back with a reason. Fingerprints of the model's Python state and
code, a watch on mutations and a record of side effects say when a captured step no longer stands for the model.

**Safe by comparison.** Before a kind of step is trusted, two of its replays are computed eagerly too, by the plain
forward on the plain cache; where they differ by more than rounding, steps of that kind stay eager, and a warning says
so once. Two, because a model that counts in Python gets the first one right. So is the first replay of each capture,
and its first one behind a sliding window: a plain cache has dropped what lies before the window there, a bucket still
holds it, and Moshi masks nothing. One token of thousands makes no difference that rounding would not, so what lies
there is 10,000 for that replay.

**How long a capture lives.** Captures outlive a call. They end when pages move; when a parameter, an attribute
(constants, tensors, functions and containers of them), a config, a class's forward, a function or constant that
forwards look up by name, in a table, in an object or by an import of their own (`code_fingerprint.py`), one of torch's
functions or methods, a hook or one of transformers' implementations is another one; and with the model. But for pages
that is looked at once a call. Calls that run callbacks of others (processors, criteria, streamers) compare attributes,
hooks, configs and where parameters lie before each step (`mutation_watch.py`), and are eager while the model is another
one; functions of Python modules are not looked at again. No capture uses a cache whose methods were replaced. Weights
loaded in place are read by the next replay. A step that changes an attribute of a module, or puts another tensor in a
buffer's place, is not captured. What it writes to beside the cache, such as states in buffers, is put back after
capturing and comparing (`side_effects.py`): the recorder sees each write before it is made, and ends the run where it
could not any more. A failed capture is ended in torch's allocator and generator, too.

**When to capture on a CPU.** A capture takes four passes and some Python for each module, which a GPU does not notice.
It is made at the first step of the first call all the same: where it waited until the steps to come would pay for it, a
call had other bits than the same call before it. Weights that lose no bits stay eager on a CPU: most of their step is
the products, and attention to a masked bucket would round elsewhere.
"""

__all__: list[str] = []
