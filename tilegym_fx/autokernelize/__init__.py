"""The kernel loop: ``python -m tilegym_fx.autokernelize MODEL`` grows the inventory by experiments.

loop         experiments one after another: keep or reset, until nothing is left
experiment   one of them, in a child process with a time limit
subject      the model, and the graphs of its calls
choice       which uncovered region is next, as a draft that can be searched for
writing      the files of a kernel: copied, adapted, synthesised, or by a hook
judging      is the kernel right, alone and in the model
figures      coverage and throughput, estimated where there is no GPU
measuring    the same as the benchmark measures them
verdict      is it kept
repository   git: a clean tree before, one commit each, back to the last kept one
ledger       what has been tried: the table of results, and what a resumed run needs
options      what the user asks for
start        the start: everything is looked at before anything is written
preflight    is everything there
page         a run as one HTML page
charts       its pictures
"""
