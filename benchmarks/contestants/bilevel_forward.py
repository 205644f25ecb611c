"""Forward mode. It is not used on the network, whose 7,040 tangents would not fit into memory."""

import bilevel as bl
from problems.in_bilevel import with_method

LABEL = "Forward"
GROUP = "bilevel"
KINDS = ("ridge",)

prepare = with_method(bl.Forward())
