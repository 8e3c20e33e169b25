"""Statistics and timelines for people to read: snapshots, tables, live views, recordings. Pure Python, without torch.

Integer counters enter, from the stack and the layers, which count anyway; frozen snapshots (`stats.py`), text tables,
OpenMetrics, HTML pages and Chrome traces leave. The room stands early in the order of imports because recorders of the
tiers fill its types. A snapshot costs time in the number of VB layers and in nothing else.

**Live views** read a *sample* (`live_sample.py`): plain integers, no lock, and no question to the device, because a
wait for the device, from any thread, ends a CUDA graph that is being captured with an error. So hits of experts whose
residency the GPU decides are left out, and said to be. Rates are differences: of bytes, hits and waits over two
seconds, of tokens and images over ten.

**Progress** (`progress.py`) has the only bar, rich's. Work counts integers; a thread (`vbrt.host.ticker`) draws after
the first second, since drawing in the calls that count would show nothing while one large weight takes ten seconds.
rich's own thread is not used: it would hold the work. What an interrupted run has left done counts for no speed. Work
within work (encoding within loading) shows nothing of its own.

**Timelines** (`timeline.py`). Without a recorder, each place that could note something costs one test of an attribute.
With one, layers whose pages never move are leased too, or they would not be seen, and leases are decided one by one,
not by a programme. A lease notes two spans: until its pages are there (wait), and until it is released (compute); a
link notes each copy or read. On a GPU, moments are events on the stream that computes or copies, so a span is what the
device did; a lease's first event precedes everything it does, so a wait includes what the device stood still because
the host was late. Nothing is synchronized during a pass: times are worked out on leaving the block, after one
synchronization. Reads from the ssd have the host's clock; a moment known in both clocks, taken on an idle device at the
start, puts them on one axis. During a capture the host's clock stands in for events, which have no time in a graph.
Totals are over the recorded time, so what the caller does between two passes counts as idle links; GB/s is over the
time that a link was busy; copies that overlap, and leases that wait in several threads at once, count once. A recording
costs three events a lease and the lease itself: a pass of short resident layers is bound by Python while it is
recorded, and its waits are that. A pass without a forward, such as a backward pass, lasts to the end of its thread's
last lease. Every gap has a name (`idle_gaps.py`); the shares sum to the recorded time.

**The page** (`timeline_page.py`, `assets/`) is HTML and JavaScript with uPlot in it: 50 kB, MIT, canvas, with scales,
axes, cursor and selection. vis-timeline and d3 give each span an element, which ends at some thousand spans; ECharts is
twenty times the size. Only what is in view is drawn, spans narrower than a pixel together as one column, and lanes are
sorted, so a view is found by bisection. The recording is JSON in which `<`, `>` and `&` are escaped, and a content
security policy forbids the page to load anything. **The trace** is Chrome's format. Perfetto leaves out events that
overlap within a thread, which spans that touch do once start and length are rounded separately; so both ends are
rounded to its nanoseconds first (`chrome_trace.py`).
"""

__all__: list[str] = []
