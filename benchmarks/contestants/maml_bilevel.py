"""The package's learner `maml` on a meta-batch."""

from bilevel.learners.catalogue.maml import MAML
from harness.contract import Case, Run
from problems.representation_in_bilevel import learner_and_episodes

LABEL = "maml"
GROUP = "bilevel"
KINDS = ("maml",)


def prepare(case: Case) -> Run:
    learner, episodes = learner_and_episodes(case, MAML)
    return lambda: list(learner.hypergradient(episodes)[1].values())
