"""How fast a whole model runs, with and without our kernels: ``python -m tilegym_fx.bench MODEL``.

cases      which calls of a model are timed, and in which variants
models     a model with random weights on the device, its tokens and its static cache
patches    what a variant does to the model: nothing, kernelize, a compiler, a peer's own patches
calls      one case as something to call again and again
clock      seconds, on a GPU or on the host
profile    a profiler's trace as time by kernel, and our share of it
worker     one variant: prepared, judged, timed, profiled
run        the workers one after another, each in a process of its own with a time limit
turns      a GPU of its own for whoever times, though several benches run
results    the numbers and the arithmetic on them
report     tables and the two lines that scripts look for; picture: the same as an SVG
"""
