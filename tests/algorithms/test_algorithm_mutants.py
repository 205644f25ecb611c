"""Broken algorithms: the battery rejects each."""

from dataclasses import dataclass, replace

import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.testing import check_algorithm


@dataclass(frozen=True)
class Plain(bl.Algorithm):
    """Projected gradient descent with a constant step."""

    def minimise(self, outer):
        lam = outer.lam
        while True:
            grad = outer.hyperiteration(lam).grad
            lam = self.project(outer, trees.map(lambda x, g: x - 0.3 * g, lam, grad))

    def project(self, outer, lam):
        return lam if outer.constraint is None else outer.constraint.project(lam)


class Upwards(Plain):
    def minimise(self, outer):
        lam = outer.lam
        while True:
            lam = self.project(outer, trees.map(lambda x, g: x + 0.3 * g, lam, outer.hyperiteration(lam).grad))


class Unprojected(Plain):
    """Projects what is returned, and not what is asked about."""

    def minimise(self, outer):
        lam = outer.lam
        for _ in range(300):
            lam = trees.map(lambda x, g: x - 0.3 * g, lam, outer.hyperiteration(lam).grad)
        for _ in range(300):
            outer.hyperiteration(self.project(outer, lam))


class InPlace(Plain):
    def minimise(self, outer):
        while True:
            grad = outer.hyperiteration(outer.lam).grad
            for leaf, g in zip(trees.leaves(outer.lam), trees.leaves(grad), strict=True):
                leaf.sub_(0.3 * g)
            projected = self.project(outer, outer.lam)
            for leaf, new in zip(trees.leaves(outer.lam), trees.leaves(projected), strict=True):
                leaf.copy_(new)


class Deaf(Plain):
    """Does not let the loop end."""

    def minimise(self, outer):
        lam, calls = outer.lam, 0
        while calls < 500:
            calls += 1
            try:
                grad = outer.hyperiteration(lam).grad
            except Exception:
                grad = outer.evaluate(lam).grad
            lam = self.project(outer, trees.map(lambda x, g: x - 0.3 * g, lam, grad))
        return bl.Outcome("finished", "Done.")


@dataclass(frozen=True)
class Forgetful(bl.Descent):
    """Momentum that is lost when the run is resumed."""

    def minimise(self, outer):
        saved = None if outer.saved is None else {**outer.saved, "optimizer": {**outer.saved["optimizer"], "state": {}}}
        return super().minimise(replace(outer, saved=saved))


def test_the_battery_notices_a_state_that_is_lost():
    with pytest.raises(AssertionError, match="other numbers"):
        check_algorithm(Forgetful(lambda leaves: torch.optim.SGD(leaves, lr=0.2, momentum=0.8)))


def test_the_battery_rejects_what_is_wrong():
    check_algorithm(Plain())
    check_algorithm(InPlace())  # λ is the algorithm's own copy
    for wrong, words in (
        (Upwards(), "did not minimise a quadratic"),
        (Unprojected(), "outside of the constraint"),
        (Deaf(), "went on after the loop ended"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_algorithm(wrong)
