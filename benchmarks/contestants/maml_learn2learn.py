"""MAML by learn2learn's algorithm, implemented in `problems.by_learn2learn`."""

from problems.by_learn2learn import adaptation
from problems.initialisation import with_all_weights

LABEL = "learn2learn, by hand"
GROUP = "torch peer"
KINDS = ("maml",)

prepare = with_all_weights(adaptation)
