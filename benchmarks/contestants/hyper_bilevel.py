"""The package's learner `HyperRepresentation` on a meta-batch."""

from harness.contract import Case, Run
from problems.representation_in_bilevel import learner_and_episodes

LABEL = "HyperRepresentation"
GROUP = "bilevel"
KINDS = ("hyper",)


def prepare(case: Case) -> Run:
    learner, episodes = learner_and_episodes(case)
    return lambda: list(learner.hypergradient(episodes)[1].values())
