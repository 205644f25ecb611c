"""Algorithm 1 with blocks of steps compiled by torch."""

import bilevel as bl
from harness.contract import Case, Run
from problems.in_bilevel import with_method

LABEL = "Reverse, compiled"
GROUP = "bilevel"
SLOW_START = True


def prepare(case: Case) -> Run:
    # Blocks of 25 steps, as the docstring of Reverse advises; a shorter run is one block.
    return with_method(bl.Reverse(compiled=min(25, case.steps)))(case)
