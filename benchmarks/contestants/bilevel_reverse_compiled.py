"""Algorithm 1 with blocks of steps compiled by torch."""

import bilevel as bl
from problems.in_bilevel import compiled

LABEL = "Reverse, compiled"
GROUP = "bilevel"
SLOW_START = True

prepare = compiled(bl.Reverse())
