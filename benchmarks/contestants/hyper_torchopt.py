"""torchopt: features are computed once per episode, and its functional optimiser adapts a linear head."""

from problems.head_by_torchopt import adapt
from problems.representation import with_adaptation

LABEL = "torchopt"
GROUP = "torch peer"
ENVIRONMENT = "torchopt"
REQUIREMENTS = ("torchopt==0.7.3", "torch", "numpy")
KINDS = ("hyper",)

prepare = with_adaptation(adapt)
