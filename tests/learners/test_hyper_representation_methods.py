"""The method that a learner chooses, threads, and what the engine refuses."""

import pytest
import torch
from torch import nn

import bilevel as bl
from small_learner import SHAPE, episodes, learner, network


@pytest.mark.parametrize("mode", ["episode", "support"])
def test_the_number_of_threads_changes_no_bit(mode):
    hyper, batch = learner(batch_norm=mode, chunk=1), episodes(count=5)
    value, grads = hyper.hypergradient(batch)
    table = hyper.accuracies(batch, 3)
    torch.set_num_threads(2)
    try:
        for _ in range(3):
            again, same = hyper.hypergradient(batch)
            assert torch.equal(again, value)
            assert all(torch.equal(same[name], grads[name]) for name in grads)
            assert torch.equal(hyper.accuracies(batch, 3), table)
        # Copies for other threads follow what is changed later.
        hyper.batch_norm = "support"
        hyper.lam = {name: 1.1 * leaf for name, leaf in hyper.lam.items()}
        changed = hyper.hypergradient(batch)[0]
    finally:
        torch.set_num_threads(1)
    assert torch.equal(changed, hyper.hypergradient(batch)[0]) and not torch.equal(changed, value)


def test_more_examples_than_features_are_not_taken_to_their_span(monkeypatch):
    batch, hyper = episodes(shots=1), learner()
    expected = learner(method=bl.Unrolled()).hypergradient(batch)[0]
    used = []
    monkeypatch.setattr(
        "bilevel.learners.catalogue.hyper_representation.hypergradient",
        lambda *arguments, **options: used.append(options["method"]) or bl.hypergradient(*arguments, **options),
    )
    assert torch.allclose(hyper.hypergradient(batch)[0], expected, rtol=1e-12)
    hyper.features = 2  # fewer than the examples
    hyper.problem = learner().problem
    assert torch.allclose(hyper.hypergradient(batch)[0], expected, rtol=1e-12)
    assert used == [bl.DualDescent(), bl.Reverse()]


def test_a_method_that_cannot_be_is_refused():
    with pytest.raises(bl.BilevelError, match=r"Reverse\(checkpoints=-5\) is not possible"):
        learner(method=bl.Reverse(checkpoints=-5)).hypergradient(episodes())


def test_an_error_of_the_network_is_not_hidden(monkeypatch):
    hyper, batch = learner(), episodes()

    def broken(*arguments, **options):
        raise RuntimeError("planted")

    monkeypatch.setattr(hyper.representation, "episodes", broken)
    with pytest.raises(bl.BilevelError, match="planted"):
        hyper.hypergradient(batch)


def test_one_tensor_may_be_both_sets_with_other_answers():
    (images, labels), _ = episodes().train, None
    answers = labels.flip(1)
    together, apart = (
        hyper.hypergradient(bl.Task((images, labels), (queries, answers)))
        for hyper, queries in ((learner(), images), (learner(), images.clone()))
    )
    assert torch.allclose(together[0], apart[0], rtol=1e-12)
    for name, gradient in together[1].items():
        assert torch.allclose(gradient, apart[1][name], rtol=1e-9, atol=1e-12)
    table = learner().accuracies(bl.Task((images, labels), (images, answers)), 3)
    assert torch.equal(table, learner().accuracies(bl.Task((images, labels), (images.clone(), answers)), 3))


def test_gradients_that_are_not_numbers_are_an_error():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(SHAPE[0] * SHAPE[1] * SHAPE[2], 6)

        def forward(self, x):
            z = self.linear(x.flatten(1))
            return (0 * z).abs().sqrt() + z  # a slope of 0/0

    with pytest.raises(bl.BilevelError):
        learner(Root()).hypergradient(episodes())


def test_torchs_modes_and_labels_of_other_kinds():
    batch = episodes()
    value, _ = learner().hypergradient(batch)
    with torch.no_grad():
        assert torch.equal(learner().hypergradient(batch)[0], value)
    with torch.inference_mode(), pytest.raises(bl.BilevelError):
        learner().hypergradient(batch)
    bytes_ = bl.Task((batch.train[0], batch.train[1].byte()), (batch.val[0], batch.val[1].byte()))
    assert torch.allclose(learner().hypergradient(bytes_)[0], value, rtol=1e-12)
    wrong = bl.Task(batch.train, (batch.val[0], batch.val[1] + 1))
    with pytest.raises(bl.BilevelError):
        learner().hypergradient(wrong)


def test_an_error_leaves_a_learner_as_it_was():
    class Fragile(nn.Module):
        per_image = True

        def __init__(self):
            super().__init__()
            self.body, self.broken = network(), False

        def forward(self, x):
            features = self.body(x)
            if self.broken:
                raise ValueError("broken")
            return features

    hyper, batch = learner(Fragile(), batch_norm="support", chunk=1), episodes()
    torch.set_num_threads(2)
    try:
        value, _ = hyper.hypergradient(batch)
        hyper.module.broken = True  # what is changed in the module is seen by all threads
        with pytest.raises(Exception, match="broken"):
            hyper.hypergradient(batch)
        assert torch.get_num_threads() == 2
        hyper.module.broken = False
        assert torch.equal(hyper.hypergradient(batch)[0], value)
    finally:
        torch.set_num_threads(1)


def test_steps_that_diverge_are_explained():
    hyper = learner(inner_lr=1e38, l2=1.0, steps=20)
    with pytest.raises(bl.BilevelError, match="step"):
        hyper.hypergradient(episodes())
