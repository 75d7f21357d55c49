"""The author's code that an emitted text was made from, as it is now: what is written, and what has been put around it.

Both who writes such a text and who binds it to a model look here, so that they mean the same by it.

    source     the text of a function
    functions  what a class or a module holds under a name, and its digest
    modules    what is found at a path below a module, and whether somebody looks at its calls
"""
