"""Capture and replay of decode steps: `generate` runs them in place of a model's forward.

`step_io` flattens a forward call into tensors; `session` decides whether it can be captured, replays it, compares the
first replays with eager steps, and falls back with a reason. Fingerprints of the model's Python state and code, a watch
on mutations and a record of side effects invalidate captured steps.

**Validated by comparison.** Before a kind of step is trusted, two of its replays are also computed eagerly, by the
plain forward on the plain cache; if they differ by more than rounding, steps of that kind stay eager, with one warning.
Two, because the first one is right even for a model that counts in Python. The first replay of each capture is
compared, too, and its first one past a sliding window: a plain cache has dropped the tokens before the window, a bucket
still holds them, and Moshi does not mask them. One token in thousands changes results by less than rounding, so these
tokens are set to 10,000 for that replay.

**Exact steps.** Steps of lossless weights are compared bit for bit, and have the plain model's bits by construction:
all but attention has constant shapes, and attention is the model's own call, on the keys and the mask that a plain
step has. On an H200 neither torch's masked kernels on a bucket nor another backend gave the bits of its unmasked cuDNN
kernel: of 15 lengths 2 to 6 were equal. The price of cuDNN's attention, the default of torch 2.11 on Hopper, is a plan
on the host for each new length, 35 to 65 ms, which plain decoding pays as well.

**Lifetime of a capture.** Captures outlive a call. They are invalidated when pages move; when a parameter, an attribute
(constants, tensors, functions and containers of them), a config, a class's forward, a function or constant that
forwards look up by name, in a table, in an object or by an import of their own (`code_fingerprint.py`), one of torch's
functions or methods, a hook or one of transformers' implementations is replaced; and with the model. All but pages are
checked once per call. Calls with user callbacks (processors, criteria, streamers) compare attributes, hooks, configs
and addresses of parameters before each step (`model/mutation_watch.py`), and are eager while the model is modified;
functions of Python modules are not checked again. No capture uses a cache with replaced methods. Weights loaded in
place are read by the next replay. A step that sets an attribute of a module, or replaces a buffer, is not captured.
Other side effects, such as states in buffers, are restored after capture and comparison (`side_effects.py`): the
recorder sees each write before it happens, and aborts the run at one that it could not restore. A failed capture is
also ended in torch's allocator and generator.

**When to capture on a CPU.** A capture takes four passes and some Python per module, which is negligible on a GPU only.
It is made at the first step of the first call nevertheless: when it waited until it would pay off, a call gave other
bits than the same call before it. Lossless weights stay eager on a CPU: products dominate their steps, and attention to
a masked bucket would round differently.
"""

__all__: list[str] = []
