"""Forward mode; on the network its tangents would not fit, with a hyperparameter for each weight."""

import bilevel as bl
from problems.in_bilevel import with_method

LABEL = "Forward"
GROUP = "bilevel"
KINDS = ("ridge",)

prepare = with_method(bl.Forward())
