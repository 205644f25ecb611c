"""The closed form in T, compiled by torch as a whole."""

import bilevel as bl
from problems.in_bilevel import compiled

LABEL = "Spectral, compiled"
GROUP = "bilevel"
KINDS = ("ridge",)
SLOW_START = True

prepare = compiled(bl.Spectral())
