"""Before: x * sigmoid(g).
After:  one sigmoid_mul.
Applies where the gate has the shape of x, or one number for each of its rows.
"""

SHAPES = {"gate": ("N", "1 or H")}
