"""MAML by learn2learn's algorithm with channels last, which makes torch's convolutions faster."""

import torch

from problems.by_learn2learn import adaptation
from problems.initialisation import with_all_weights

LABEL = "learn2learn, by hand, channels last"
GROUP = "by hand"
KINDS = ("maml",)

prepare = with_all_weights(adaptation, torch.channels_last)
