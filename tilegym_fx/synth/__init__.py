"""A cuTile kernel written from a Definition's reference.

Of pointwise operations, casts, broadcasts, reductions of rows, and slices and concatenations of columns.

    words   which operations can be written, and how each looks in a kernel
    space   which dimensions the values share, and how arrays are viewed so that they line up
    plan    the reference as loads, reductions and stores
    expressions   the lines that compute some of its values
    kernel, host  the two halves of a file: the kernel, and the function that launches it
    guards  where the kernel must not be used
    text    the file, in the style of kernels/

What cannot be written raises :class:`SynthesisError` with the operation that stands in the way.
"""

from __future__ import annotations

from .guards import guards_of
from .plan import SynthesisError
from .text import Written, write_kernel
from .words import can_write

__all__ = ["SynthesisError", "Written", "can_write", "guards_of", "write_kernel"]
