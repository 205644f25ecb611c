"""Records all steps in one autograd graph."""

import bilevel as bl
from problems.in_bilevel import with_method

LABEL = "Unrolled"
GROUP = "bilevel"

prepare = with_method(bl.Unrolled())
