"""Advice on configs for a model, a task and a machine: `vbrt.advise`, with predicted step times.

Candidates (presets, budgets, options of training, ways over several GPUs) are planned, estimated and timed by a cost
model whose rates are measured, or come from data sheets. An `Advice` leaves: the best candidates, and why the others
are not.

Advice leaves as much memory again as comes and goes, up to 768 MiB: on an H200 torch had reserved 0.1 to 0.6 GiB more
than it had given away, and budgets that filled 97 % ran out of memory. Where pages come during a pass they split the
blocks of temporaries that went, and up to 2 GiB fit nothing else; expandable segments have no such rests, so the
command `vbrt` asks for them (`vbrt.cli.process_start`), and advice says so. A step is predicted as the slowest of
copies, device and host; on a CPU, where host and device are one, their times add up (`step_time.py`). The coefficients
are data (`cost_model.py`): `cost_models/h200.toml` for GPUs and `cost_models/zen4.toml` for CPUs, fitted by hand to
committed runs that `scripts/times.py` shows beside predictions. Another machine's set (`vbrt advise --cost-model FILE`)
has the same keys and a `machine`, `date` and `script` of its own, which advice names. Not there are hit rates of
published routing, and the microseconds by which `vbrt.kernels.cuda.launch_table` orders launches. 4-bit kernels read at
the rate of copies on a CPU (.75 of it on an H200), torch's dense products at half of it. Where nothing fits, `nearest`
makes the machine larger by what a plan lacks until it fits, and once by all pages on the computing tier; what is least
is what the error says would do, and a test asks again with that much.
"""

__all__: list[str] = []
