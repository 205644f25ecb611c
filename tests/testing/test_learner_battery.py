"""Every learner passes the battery, and broken ones are refused by the message that names what is broken."""

import pytest
import torch

from bilevel import learners
from bilevel.errors import BilevelError
from bilevel.learners.catalogue.hyper_representation import HyperRepresentation
from bilevel.learners.catalogue.maml import MAML
from bilevel.learners.catalogue.prototypical import Prototypical
from bilevel.learners.scoring_learner import class_means, squared_distances
from bilevel.methods.first_order import FirstOrder
from bilevel.methods.reverse import Reverse
from bilevel.methods.unrolled import Unrolled
from bilevel.testing import check_learner
from bilevel.testing.learners import episodes, small


@pytest.mark.parametrize("name", learners.names())
def test_every_learner_passes(name):
    check_learner(learners.get(name))


def test_other_options_pass_too():
    check_learner(small(MAML, head="learned", head_ways=4))
    check_learner(small(Prototypical, batch_norm="running"))
    check_learner(small(learners.get("hyper-representation"), batch_norm="support", normalise=True, l2=0.01))


def test_the_method_of_maml_is_an_argument():
    torch.set_default_dtype(torch.float64)
    expected = small(MAML, method=Unrolled()).hypergradient(episodes())
    for method in (None, Reverse("sqrt"), Reverse()):
        value, grads = small(MAML, method=method).hypergradient(episodes())
        assert torch.allclose(value, expected[0], rtol=1e-12)
        assert all(torch.allclose(grads[name], expected[1][name], rtol=1e-9, atol=1e-12) for name in grads)
    value, grads = small(MAML, method=FirstOrder()).hypergradient(episodes())
    other, approximate = small(learners.get("first-order-maml")).hypergradient(episodes())
    assert torch.equal(value, other) and torch.allclose(value, expected[0], rtol=1e-12)
    assert all(torch.equal(grads[name], approximate[name]) for name in grads)
    assert not torch.allclose(grads["0.weight"], expected[1]["0.weight"], rtol=1e-3)


def test_first_order_maml_is_the_gradient_at_the_adapted_weights():
    torch.set_default_dtype(torch.float64)
    learner, batch = small(learners.get("first-order-maml"), inner_lr=0.1), episodes(1)
    problem = learner.problem(3)
    (support, labels), (queries, answers) = ((x[0] for x in part) for part in (batch.train, batch.val))
    *_, w = learner.solutions(problem, type(batch)((support, labels), (queries, answers)), learner.steps)
    adapted = {name: learner.lam[name] + w[name] for name in learner.lam}
    leaves = {name: value.clone().requires_grad_() for name, value in adapted.items()}
    features = learner.representation.together(leaves, queries)
    loss = torch.nn.functional.cross_entropy(features @ w["head.weight"], answers)
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    _, grads = learner.hypergradient(batch)
    assert all(torch.allclose(grads[name], expected[name], rtol=1e-9, atol=1e-12) for name in grads)


class WrongGradient(Prototypical):
    """A gradient that is twice too long."""

    def chunk_hypergradient(self, task):
        value, grads = super().chunk_hypergradient(task)
        return value, {name: 2 * grad for name, grad in grads.items()}


class Detached(Prototypical):
    """Prototypes that the derivative does not see."""

    def scores(self, lam, episode):
        support, queries = self.represent(lam, episode)
        return -squared_distances(queries, class_means(support, episode.labels, episode.ways).detach())


class Random(Prototypical):
    """Scores that are other ones at every call."""

    def scores(self, lam, episode):
        scores = super().scores(lam, episode)
        return scores + 0.1 * torch.randn(scores.shape)


class OtherAdapt(Prototypical):
    """Users get another classifier than the one that is judged."""

    def adapted(self, support, labels, ways, steps):
        scores = super().adapted(support, labels, ways, steps)
        return lambda queries: -scores(queries)


class OneStepMore(HyperRepresentation):
    """Users get a classifier after one step more than in training, which changes few predictions."""

    def adapted(self, support, labels, ways, steps):
        return super().adapted(support, labels, ways, steps + 1)


class SameShots(Prototypical):
    """Class means by reshaping, which needs the same number of images of every class."""

    def scores(self, lam, episode):
        support, queries = self.represent(lam, episode)
        ordered = support[episode.labels.argsort(stable=True)]
        return -squared_distances(queries, ordered.view(episode.ways, -1, support.shape[1]).mean(1))


class FirstImage(Prototypical):
    """The first support image counts more."""

    def scores(self, lam, episode):
        known, asked = self.represent(lam, episode)
        weight = torch.ones(len(known), 1)
        weight[0] = 3
        return -squared_distances(asked, class_means(known * weight, episode.labels, episode.ways))


class FirstClass(Prototypical):
    """The first class has an advantage."""

    def scores(self, lam, episode):
        scores = super().scores(lam, episode)
        return scores + torch.eye(1, episode.ways)

    def adapted(self, support, labels, ways, steps):
        order = labels.argsort(stable=True)
        return super().adapted(support[order], labels[order], ways, steps)


class FiveClasses(Prototypical):
    """A limit that is not said."""

    def scores(self, lam, episode):
        if episode.ways > 5:
            raise RuntimeError("the memory is full")
        return super().scores(lam, episode)


class Untold(Prototypical):
    """A limit that `adapt` does not keep."""

    def check_episode(self, ways, shots):
        if ways > 5:
            raise BilevelError("at most 5")

    def adapt(self, images, labels, steps=None):
        self.check_episode = lambda ways, shots: None
        try:
            return super().adapt(images, labels, steps)
        finally:
            del self.check_episode


class Hidden(Prototypical):
    """A number outside of λ decides."""

    def build(self):
        self.temperature = 1.0

    def chunk_hypergradient(self, task):
        found = super().chunk_hypergradient(task)
        self.temperature *= 1.01
        return found

    def scores(self, lam, episode):
        return super().scores(lam, episode) * self.temperature


class Unsaved(Prototypical):
    """Something random that is not kept."""

    def build(self):
        self.factor = float(torch.randint(1, 10**6, (), generator=torch.Generator().manual_seed(id(self) % 2**31)))

    def scores(self, lam, episode):
        return super().scores(lam, episode) / self.factor


class Unused(Prototypical):
    """A leaf of λ that nothing depends on."""

    def build(self):
        self.lam["idle"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WrongGradient, "the hypergradient has the slope"),
        (Detached, "the hypergradient has the slope"),
        (Random, "a second call on the same episodes gives another hypergradient"),
        (OtherAdapt, "adapt(…).predict is right in"),
        (OneStepMore, "the training objective is"),
        (SameShots, "adapt fails if a class has 2 images and the others 3"),
        (FirstImage, "another order of the support images changes the probabilities"),
        (FirstClass, "changes the probabilities"),
        (FiveClasses, "7 ways and 1 shots fail with RuntimeError: the memory is full"),
        (Untold, "check_episode refuses 7 ways and 1 shots, but adapt does not"),
        (Hidden, "a second call on the same episodes gives another hypergradient"),
        (Unsaved, "the probabilities after save and load are different"),
    ],
)
def test_the_battery_refuses(kind, message):
    with pytest.raises(AssertionError) as refused:
        check_learner(kind)
    assert message in str(refused.value)


def test_a_learner_with_the_name_of_another_is_refused():
    taken = type("Prototypical", (Prototypical,), {"__doc__": "Another learner of the same name."})
    with pytest.raises(AssertionError, match="the name prototypical belongs to another class"):
        check_learner(taken)


def test_a_leaf_that_nothing_depends_on_is_named():
    with pytest.raises(BilevelError, match="does not depend on idle"):
        check_learner(Unused)
