"""Algorithm 1 of the paper. It keeps all iterates."""

import bilevel as bl
from problems.in_bilevel import with_method

LABEL = "Reverse"
GROUP = "bilevel"

prepare = with_method(bl.Reverse())
