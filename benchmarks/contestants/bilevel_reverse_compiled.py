"""Algorithm 1 with blocks of steps compiled by torch, where the installed version offers it."""

from dataclasses import fields

import bilevel as bl
from harness.contract import Case, Run, Unavailable
from problems.in_bilevel import with_method

LABEL = "Reverse, compiled"
GROUP = "bilevel"
SLOW_START = True


def prepare(case: Case) -> Run:
    if "compiled" not in {field.name for field in fields(bl.Reverse)}:
        raise Unavailable("this version of Reverse has no `compiled` setting")
    # Blocks of 25 steps, as the docstring of Reverse advises; a shorter run is one block.
    return with_method(bl.Reverse(compiled=min(25, case.steps)))(case)
