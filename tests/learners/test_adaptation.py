"""The learners of initialisation and of optimisation, against the mathematics that they are written from."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from bilevel import BilevelError, learners
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.learners.catalogue import maml
from bilevel.learners.catalogue.anil import ANIL
from bilevel.learners.catalogue.common_model import CommonModel
from bilevel.learners.catalogue.imaml import IMAML, ConjugateSteps
from bilevel.learners.catalogue.learned_optimizer import LearnedOptimizer, log_and_sign
from bilevel.learners.catalogue.maml import HEAD, MAML
from bilevel.learners.catalogue.meta_lstm import MetaLSTM
from bilevel.learners.catalogue.meta_sgd import RATE, MetaSGD
from bilevel.learners.catalogue.reptile import Reptile, minibatches
from bilevel.learners.settings import TrainingSettings
from bilevel.methods.first_order import FirstOrder
from bilevel.methods.reverse import Reverse
from bilevel.methods.unrolled import Unrolled
from bilevel.problem import Task
from bilevel.testing import check_learner
from bilevel.testing.learners import _data, episodes, small


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def assert_same(one, other, rtol=1e-9):
    """Two trees of gradients, in the leaves that both have."""
    scale = max(float(value.norm()) for value in other.values())
    for name in one.keys() & other.keys():
        assert float((one[name] - other[name]).norm()) <= rtol * scale, name


def last(learner, batch, episode=0):
    """w_T of an episode."""
    task = Task(*(tuple(x[episode] for x in part) for part in (batch.train, batch.val)))
    ways = int(task.train[1].max()) + 1
    problem = learner.problem(ways)
    with torch.no_grad():
        task = learner._encoded(problem, task)
        *_, w = learner.solutions(problem, task, learner.steps)
    return w


# ------------------------------------------------------------------------------------------- initialisation


def of_blocks(kind, **options):
    """A learner whose network is of the blocks that are computed for several episodes together."""
    torch.manual_seed(0)
    first = [torch.nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU()]
    second = [torch.nn.Conv2d(4, 3, 3, bias=False), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    return kind(torch.nn.Sequential(*first, *second, torch.nn.Flatten()), (1, 12, 12), **options)


@pytest.mark.parametrize("name", ["maml", "first-order-maml", "meta-sgd", "common-model"])
def test_episodes_together_are_episodes_one_by_one(name, monkeypatch):
    """Three episodes of which one class has more images, in parts of two and one."""
    batch = episodes(3)
    support, labels = (x[:, 1:] for x in batch.train)  # class 0 has one image less
    batch = Task((support, labels), batch.val)
    learner = of_blocks(learners.get(name), inner_lr=0.2, steps=3)
    monkeypatch.setattr(maml, "TOGETHER_BYTES", 2 * support[0].nbytes)
    value, grads = learner.hypergradient(batch)
    monkeypatch.setattr(learners.get(name), "stacks", False)
    expected, others = learner.hypergradient(batch)
    assert torch.allclose(value, expected, rtol=1e-12) and grads.keys() == others.keys()
    assert_same(grads, others, rtol=1e-10)


def test_the_hypergradient_of_maml_through_blocks_is_that_of_differences():
    check_learner(of_blocks(MAML, inner_lr=0.2, steps=2))


def test_methods_that_save_memory_take_one_episode_at_a_time(monkeypatch):
    seen, problem = [], MAML._stacked
    monkeypatch.setattr(MAML, "_stacked", lambda self, ways, count: seen.append(count) or problem(self, ways, count))
    methods = (Reverse(), Reverse("sqrt"), Unrolled())
    (expected, others), *found = (of_blocks(MAML, method=method).hypergradient(episodes(2)) for method in methods)
    assert seen == [2, 1, 1, 2]
    for value, grads in found:
        assert torch.allclose(value, expected, rtol=1e-12)
        assert_same(grads, others, rtol=1e-10)


@pytest.mark.parametrize("head", ["zero", "learned"])
def test_meta_sgd_with_equal_rates_is_maml(head):
    batch, options = episodes(), {"head": head, "head_ways": 3, "inner_lr": 0.2, "steps": 3}
    value, grads = small(MetaSGD, **options).hypergradient(batch)
    expected, others = small(MAML, **options).hypergradient(batch)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert_same(grads, others)
    assert {RATE + name for name in (HEAD, *others)} <= grads.keys()


def test_meta_sgd_learns_a_rate_per_weight():
    """A rate of zero keeps its weight, and no other."""
    learner, batch = small(MetaSGD, inner_lr=0.2), episodes()
    learner.lam[RATE + "0.weight"][0] = 0
    w = last(learner, batch)
    moved = w["0.weight"] != learner.lam["0.weight"]
    assert not moved[0].any() and moved[1:].all()
    with pytest.raises(BilevelError, match="FirstOrder cannot see"):
        small(MetaSGD, method=FirstOrder()).hypergradient(batch)


def test_anil_is_maml_whose_body_does_not_move():
    class Frozen(MAML):
        """MAML with step size 0 for the network."""

        @property
        def dynamics(self):
            return GradientDescent({name: 0.0 if name != HEAD else 0.3 for name in (HEAD, *self.representation.names)})

    batch, options = episodes(), {"head": "learned", "head_ways": 3, "steps": 4}
    expected, others = small(Frozen, **options).hypergradient(batch)
    for method in (None, Reverse("sqrt"), Unrolled()):
        value, grads = small(ANIL, inner_lr=0.3, method=method, **options).hypergradient(batch)
        assert torch.allclose(value, expected, rtol=1e-12) and grads.keys() == others.keys()
        assert_same(grads, others)


def test_anil_with_a_head_at_zero_is_the_hyper_representation():
    batch, options = episodes(), {"inner_lr": 0.3, "steps": 4}
    value, grads = small(ANIL, head="zero", **options).hypergradient(batch)
    expected, others = small(learners.get("hyper-representation"), **options).hypergradient(batch)
    assert torch.allclose(value, expected, rtol=1e-10)
    assert_same(grads, others)


def test_anil_first_order_holds_the_inner_solution():
    learner, batch = small(ANIL, head_ways=3, method=FirstOrder()), episodes(1)
    w, (queries, answers) = last(learner, batch), (x[0] for x in batch.val)
    lam = {name: value.clone().requires_grad_() for name, value in learner.lam.items()}
    loss = F.cross_entropy(learner.representation.together(lam, queries) @ (lam[HEAD] + w[HEAD]), answers)
    expected = dict(zip(lam, torch.autograd.grad(loss, list(lam.values())), strict=True))
    assert_same(learner.hypergradient(batch)[1], expected)


def test_a_training_sizes_the_learned_head():
    settings = TrainingSettings(learner="anil", dataset="patterns", ways=7)
    module = small(ANIL).module
    assert ANIL.for_training(settings, _data(), module).lam[HEAD].shape[1] == 7
    told = replace(settings, options={"head_ways": 4})
    assert ANIL.for_training(told, _data(), module).lam[HEAD].shape[1] == 4


@pytest.mark.parametrize("kind", [MAML, ANIL])
def test_a_class_has_the_same_weight_in_every_task(kind):
    """With half as many classes as in training, the mean over the classes is halved, like a step of half the size."""
    batch, options = episodes(), {"head": "zero", "steps": 3}
    value, grads = small(kind, inner_lr=0.4, trained_ways=6, **options).hypergradient(batch)
    expected, others = small(kind, inner_lr=0.2, **options).hypergradient(batch)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert_same(grads, others)
    ours, theirs = (
        small(kind, **step, **options).adapt(batch.train[0][0], batch.train[1][0]).scores(batch.val[0][0])
        for step in ({"inner_lr": 0.4, "trained_ways": 6}, {"inner_lr": 0.2})
    )
    assert torch.allclose(ours, theirs, rtol=1e-10)


def test_a_training_records_its_number_of_classes():
    settings = TrainingSettings(learner="maml", dataset="patterns", ways=7, train_ways=9)
    learner = MAML.for_training(settings, _data(), small(MAML).module)
    assert learner.options.trained_ways == 9 and learner.loss_factor(9) == 1
    with pytest.raises(BilevelError, match="trained_ways=-1 must be at least 0"):
        small(MAML, trained_ways=-1)


def test_imaml_agrees_with_a_long_proximal_run():
    batch, options = episodes(), {"rho": 4.0, "inner_lr": 0.1, "steps": 150}
    value, grads = small(IMAML, cg_steps=100, **options).hypergradient(batch)
    expected, others = small(IMAML, method=Reverse("sqrt"), **options).hypergradient(batch)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert_same(grads, others, 1e-7)
    rough = small(IMAML, cg_steps=1, **options).hypergradient(batch)[1]
    assert any(not torch.allclose(rough[name], grads[name], rtol=1e-3) for name in grads)


def test_imaml_solves_its_inner_problem():
    learner, batch = small(IMAML, rho=4.0, steps=150), episodes(1)
    w, problem = last(learner, batch), learner.problem(3)
    live = {name: value.clone().requires_grad_() for name, value in w.items()}
    loss = problem.inner(live, learner.lam, tuple(x[0] for x in batch.train))
    slopes = torch.autograd.grad(loss, list(live.values()))
    assert max(float(slope.norm()) for slope in slopes) < 1e-8


def test_imaml_first_order_is_the_gradient_at_the_proximal_solution():
    learner, batch = small(IMAML, method=FirstOrder()), episodes(1)
    w, (queries, answers) = last(learner, batch), (x[0] for x in batch.val)
    lam = {name: value.clone().requires_grad_() for name, value in learner.lam.items()}
    loss = F.cross_entropy(learner.logits(w, lam, queries), answers)
    expected = dict(zip(lam, torch.autograd.grad(loss, list(lam.values())), strict=True))
    value, grads = learner.hypergradient(batch)
    assert torch.allclose(value, loss, rtol=1e-12)
    assert_same(grads, expected)
    assert torch.allclose(value, small(IMAML).hypergradient(batch)[0], rtol=1e-10)


def test_conjugate_steps_solve_and_stop_before_negative_curvature():
    b = torch.tensor([1.0, 2.0, 3.0])
    matrix = torch.diag(torch.tensor([1.0, 2.0, 5.0]))
    found = ConjugateSteps(3, 4.0).solve(matrix.mv, b)
    assert torch.allclose(found.x, b / matrix.diagonal(), rtol=1e-10) and found.products == 4
    first = ConjugateSteps(3, 2.0).solve(torch.diag(torch.tensor([-1.0, -2.0, -5.0])).mv, b)
    assert torch.equal(first.x, b / 2)


def test_a_common_model_without_a_penalty_is_maml():
    batch, options = episodes(), {"inner_lr": 0.2, "steps": 3}
    value, grads = small(CommonModel, rho=0.0, **options).hypergradient(batch)
    expected, others = small(MAML, **options).hypergradient(batch)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert_same(grads, others)


def test_the_common_model_tends_to_the_solution_of_imaml():
    batch, options = episodes(), {"rho": 4.0, "steps": 150, "inner_lr": 0.1}
    common = small(CommonModel, method=Reverse("sqrt"), **options)
    value, grads = common.hypergradient(batch)
    around = small(IMAML, cg_steps=100, **options)
    expected, others = around.hypergradient(batch)
    assert torch.allclose(value, expected, rtol=1e-8)
    assert_same(grads, others, 1e-6)
    w, centre = last(common, batch), around.start(around.lam, 3)
    for name, there in last(around, batch).items():
        assert torch.allclose(w[name], there - centre[name], atol=1e-8)


def test_an_absolute_penalty_moves_few_weights():
    learner = small(CommonModel, penalty="absolute", rho=0.02, steps=20)
    moved = torch.cat([value.flatten() for value in last(learner, episodes()).values()]) != 0
    assert 0 < int(moved.sum()) < 0.7 * len(moved)


def test_reptile_moves_towards_the_end_of_plain_training():
    learner, batch = small(Reptile, inner_lr=0.2, steps=3), episodes(2, ways=3, shots=2, queries=4)
    _, direction = learner.hypergradient(batch)
    expected = {name: torch.zeros_like(leaf) for name, leaf in learner.lam.items()}
    for i in range(2):
        images, queries = batch.train[0][i], batch.val[0][i]
        w = {name: leaf.clone() for name, leaf in learner.lam.items()}
        head = torch.zeros(learner.features, 3)
        for t in range(3):
            # Six images of each class, of which step t takes those with the numbers t and t + 3.
            known = [images[2 * c : 2 * c + 2] for c in range(3)]
            asked = [queries[4 * c : 4 * c + 4] for c in range(3)]
            chosen = torch.cat([torch.cat(pair)[[t, t + 3]] for pair in zip(known, asked, strict=True)])
            live = [value.requires_grad_() for value in (*w.values(), head)]
            logits = learner.representation.together(dict(zip(w, live, strict=False)), chosen) @ head
            slopes = torch.autograd.grad(F.cross_entropy(logits, torch.tensor([0, 0, 1, 1, 2, 2])), live)
            *body, head = (value.detach() - 0.2 * slope for value, slope in zip(live, slopes, strict=True))
            w = dict(zip(w, body, strict=True))
        for name, leaf in learner.lam.items():
            expected[name] += (leaf - w[name]) / 0.2 / 2
    assert not learner.exact
    assert_same(direction, expected, 1e-10)


def test_reptile_shares_out_images_evenly():
    labels = torch.tensor([2, 0, 1, 0, 1, 2, 0, 2, 1])
    parts = minibatches(torch.arange(9), labels, 5)
    assert [sorted(y.tolist()) for _, y in parts] == [[0, 1, 2]] * 3
    assert sorted(torch.cat([x for x, _ in parts]).tolist()) == list(range(9))
    assert all(torch.equal(labels[x], y) for x, y in parts)


# ------------------------------------------------------------------------------------------- optimisation


@pytest.mark.parametrize("adapts", ["head", "all"])
def test_a_learned_optimizer_can_be_gradient_descent(adapts):
    """Open gates and inputs so small that an LSTM is linear: the change is −η times the gradient."""
    tiny, rate, batch = 1e-5, 0.3, episodes()
    learner = small(LearnedOptimizer, adapts=adapts, inner_lr=rate, log_range=1e-9, first_order=False, hidden=1)
    for name, leaf in learner.lam.items():
        if name.startswith("optimizer"):
            leaf.zero_()
    part = {name.removeprefix("optimizer."): leaf for name, leaf in learner.lam.items()}
    for layer in ("first", "second"):
        part[f"{layer}.bias_ih"].copy_(torch.tensor([50.0, -50.0, 0.0, 50.0]))  # input, forget, candidate, output
    part["first.weight_ih"][2, 1] = tiny  # the second input is the gradient where it is below e^−p
    part["second.weight_ih"][2, 0] = 1.0
    part["output.weight"].fill_(-1 / tiny)
    plain = small(ANIL if adapts == "head" else MAML, head="zero", inner_lr=rate)
    value, grads = learner.hypergradient(batch)
    expected, others = plain.hypergradient(batch)
    assert torch.allclose(value, expected, rtol=1e-7)
    assert_same(grads, others, 1e-6)


@pytest.mark.parametrize("adapts", ["head", "all"])
def test_a_meta_lstm_with_open_gates_is_gradient_descent(adapts):
    rate, batch = 0.3, episodes()
    learner = small(MetaLSTM, adapts=adapts, first_order=False)
    for gate, bias in (("forget", 50.0), ("input", math.log(rate / (1 - rate)))):
        learner.lam[f"optimizer.{gate}.weight"].zero_()
        learner.lam[f"optimizer.{gate}.bias"].fill_(bias)
    value, grads = learner.hypergradient(batch)
    expected, others = small(ANIL if adapts == "head" else MAML, head="zero", inner_lr=rate).hypergradient(batch)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert_same(grads, others)
    # With gradients taken for constants the same steps have another derivative.
    learner.change(first_order=True)
    constant, fewer = learner.hypergradient(batch)
    assert torch.equal(constant, value) and not learner.exact
    assert float((fewer["0.weight"] - grads["0.weight"]).norm()) > 1e-3 * float(grads["0.weight"].norm())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LearnedOptimizer, MetaLSTM])
@pytest.mark.parametrize("adapts", ["head", "all"])
def test_recurrent_learners_pass_with_second_derivatives(kind, adapts):
    """The battery compares with differences, which a logarithm of tiny gradients would spoil, so p is small."""
    check_learner(small(kind, adapts=adapts, first_order=False, log_range=0.1, hidden=3, steps=2))


@pytest.mark.parametrize("kind", [LearnedOptimizer, MetaLSTM])
def test_recurrent_learners_by_other_methods(kind):
    batch = episodes()
    for first_order in (True, False):
        expected, others = small(kind, first_order=first_order, method=Unrolled()).hypergradient(batch)
        value, grads = small(kind, first_order=first_order, method=Reverse("sqrt")).hypergradient(batch)
        assert torch.allclose(value, expected, rtol=1e-12)
        assert_same(grads, others)
    with pytest.raises(BilevelError, match="FirstOrder cannot see"):
        small(kind, method=FirstOrder()).hypergradient(batch)


def test_log_and_sign_is_continuous_and_finite():
    edge = math.exp(-10)
    x = torch.tensor([0.0, edge * (1 - 1e-9), edge * (1 + 1e-9), -1.0, 1e-30], requires_grad=True)
    found = log_and_sign(x, 10.0)
    expected = torch.tensor([[-1.0, 0.0], [-1.0, 1.0], [-1.0, 1.0], [0.0, -1.0], [-1.0, 1e-30 / edge]])
    assert torch.allclose(found, expected, atol=1e-8)
    found.sum().backward()
    assert x.grad.isfinite().all()


# ------------------------------------------------------------------------------------------- common to all


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (IMAML, {"rho": 0.0}, "rho=0.0 must be above 0"),
        (IMAML, {"cg_steps": 0}, "cg_steps=0"),
        (CommonModel, {"rho": -1.0}, "rho=-1.0"),
        (CommonModel, {"penalty": "cube"}, "one of square, absolute"),
        (MetaLSTM, {"inner_lr": 1.0}, "must be above 0 and below 1"),
        (LearnedOptimizer, {"hidden": 0}, "hidden=0"),
        (LearnedOptimizer, {"log_range": 0.0}, "log_range=0.0"),
        (LearnedOptimizer, {"adapts": "some"}, "one of head, all"),
    ],
)
def test_wrong_settings_are_one_message(kind, options, message):
    with pytest.raises(BilevelError, match=message):
        small(kind, **options)


@pytest.mark.parametrize("name", ["maml", "anil", "learned-optimizer", "hyper-representation", "prototypical"])
def test_the_score_after_the_last_step_alone_is_the_last_column(name):
    kind = learners.get(name)
    learner = small(kind, **({"head": "zero"} if name == "anil" else {}))
    batch = episodes(5)
    assert torch.equal(learner.accuracies(batch, only_last=True), learner.accuracies(batch)[:, -1:])


def test_validation_scores_once_an_episode(monkeypatch):
    learner, batch, counted = small(MAML, steps=4), episodes(3, queries=7), []

    def logits(w, lam, images, logits=learner.logits):
        counted.append(len(images))
        return logits(w, lam, images)

    monkeypatch.setattr(learner, "logits", logits)
    learner.accuracies(batch, only_last=True)
    assert counted.count(3 * 7) == 3 and counted.count(3 * 2) == 3 * 4
