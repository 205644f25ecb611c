"""Algorithm 1 with blocks of steps compiled by torch, where the installed version offers it."""

from dataclasses import fields

import bilevel as bl
from harness.contract import Case, Run, Unavailable
from problems.in_bilevel import with_method

LABEL = "Reverse, compiled"
GROUP = "bilevel"


def prepare(case: Case) -> Run:
    if "compiled" not in {field.name for field in fields(bl.Reverse)}:
        raise Unavailable("this version of Reverse has no `compiled` setting")
    return with_method(bl.Reverse(compiled=True))(case)
