"""torchopt with channels last, which makes torch's convolutions faster."""

import torch

from problems.head_by_torchopt import adapt
from problems.representation import with_adaptation

LABEL = "torchopt, channels last"
GROUP = "by hand"
ENVIRONMENT = "torchopt"
REQUIREMENTS = ("torchopt==0.7.3", "torch", "numpy")
KINDS = ("hyper",)

prepare = with_adaptation(adapt, torch.channels_last)
