"""A new kernel in one command: ``python -m tilegym_fx.new NAME --op-type T``.

templates   the texts of the files
scaffold    which files, and what they start from: nothing, another Definition, a draft
steps       the six steps to a kernel, each with the state that it is really in
"""
