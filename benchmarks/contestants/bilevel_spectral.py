"""The closed form in T. It needs a quadratic inner objective."""

import bilevel as bl
from problems.in_bilevel import with_method

LABEL = "Spectral"
GROUP = "bilevel"
KINDS = ("ridge",)

prepare = with_method(bl.Spectral())
