"""`tune`: its training equals torch's, the loss decreases, and there are no side effects."""

import copy
import random

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from tuning_examples import Pictures, classes, loader, network

import bilevel as bl
from bilevel.tuning import (
    ExampleWeights,
    Hyperparameter,
    Initialisation,
    LearningRate,
    Momentum,
    WeightDecay,
    prepare,
)
from bilevel.tuning.randomness import derived_seed

VAL = classes(30, seed=1)


def digits():
    x, y = load_digits(return_X_y=True)
    return torch.as_tensor(x) / 16, torch.as_tensor(y)


@pytest.mark.parametrize(
    ("dynamics", "optimizer"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.6, weight_decay=0.02)),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.6, 0.999), weight_decay=0.02)),
        (bl.RMSProp(0.3), lambda p: torch.optim.RMSprop(p, lr=0.3, weight_decay=0.02)),
    ],
)
def test_the_trained_model_is_that_of_a_plain_torch_loop(dynamics, optimizer):
    momentum = [] if isinstance(dynamics, bl.RMSProp) else [Momentum(0.6)]
    declared = [WeightDecay(0.02), LearningRate(0.3), *momentum]
    found = bl.tune(
        network(), F.cross_entropy, declared, loader(), VAL, dynamics=dynamics, steps=10, iterations=0, seed=4
    )
    job = prepare(network(), F.cross_entropy, declared, loader(), VAL, steps=10, seed=4)
    model = network()
    torch_optimizer = optimizer(model.parameters())
    for t in range(1, 11):
        batch = job.task.batch(t)
        torch_optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.targets).backward()
        torch_optimizer.step()
    for ours, theirs in zip(found.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert found.value == pytest.approx(F.cross_entropy(model(VAL[0]), VAL[1]).item(), rel=1e-10)


def test_thousands_of_hyperparameters_improve_a_real_problem():
    x, y = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    train = DataLoader(TensorDataset(x[:300], y[:300]), batch_size=100, shuffle=True)
    declared = [WeightDecay(1e-3, per="weight"), LearningRate(0.2, per="step"), ExampleWeights()]
    found = bl.tune(model, F.cross_entropy, declared, train, (x[300:900], y[300:900]), steps=30, iterations=15)
    assert sum(count for _, count in found.space.at_bounds(found.lam).values()) > 2000
    assert found.value < 0.5 * found.start_value
    assert found.value <= found.history["value"].min()
    test = F.cross_entropy(found.model(x[900:]), y[900:]).item()
    before = bl.tune(model, F.cross_entropy, declared, train, (x[900:], y[900:]), steps=30, iterations=0).value
    assert test < 0.6 * before


def test_wrong_labels_get_small_weights():
    x, y = digits()
    wrong = torch.zeros(300, dtype=torch.bool)
    wrong[torch.randperm(300)[:100]] = True
    labels = torch.where(wrong, (y[:300] + 1) % 10, y[:300])
    found = bl.tune(
        nn.Linear(64, 10), F.cross_entropy, ExampleWeights(), (x[:300], labels), (x[300:900], y[300:900]),
        lr=2.0, steps=40, iterations=20, outer_lr=0.5,
    )  # fmt: skip
    weights = found.values["example_weights"]
    assert weights.shape == (300,)
    assert (weights[wrong.numpy()] < 0.5).mean() > 0.9
    assert (weights[~wrong.numpy()] > 0.5).mean() > 0.8


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not():
    def run(seed):
        model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.3), nn.Linear(6, 3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
        return bl.tune(model, F.cross_entropy, WeightDecay(1e-2), loader(), VAL, steps=5, iterations=3, seed=seed)

    torch.rand(7)
    one = run(0)
    torch.rand(3)
    two, three = run(0), run(1)
    assert one.history["value"].tolist() == two.history["value"].tolist() != three.history["value"].tolist()
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


def test_model_loaders_and_generators_are_left_as_they_were():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    generator = torch.Generator().manual_seed(5)
    train = DataLoader(Pictures(), batch_size=4, shuffle=True, generator=generator)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), generator.get_state()
    found = bl.tune(model, F.cross_entropy, [WeightDecay(), LearningRate()], train, VAL, steps=4, iterations=2)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all() and torch.equal(states[3], generator.get_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training and not found.model.training
    assert all(p.grad is None for p in model.parameters())
    # A frozen parameter is a constant and is not trained.
    assert torch.equal(found.model[0].weight, model[0].weight)
    assert not torch.equal(found.model[3].weight, model[3].weight)


def test_running_averages_of_the_trained_model_are_those_of_the_training_batches():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    found = bl.tune(model, F.cross_entropy, WeightDecay(), classes(), VAL, steps=5, iterations=1)
    hidden = found.model[0](classes()[0])
    torch.testing.assert_close(found.model[1].running_mean, hidden.mean(0))
    torch.testing.assert_close(found.model[1].running_var, hidden.var(0))
    # Validation uses the statistics of the validation batch.
    trained = copy.deepcopy(found.model).train()
    assert found.value == pytest.approx(F.cross_entropy(trained(VAL[0]), VAL[1]).item(), rel=1e-9)


def test_a_frozen_batch_norm_stays_frozen():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].running_mean.fill_(0.7)
    model[1].eval()
    found = bl.tune(model, F.cross_entropy, WeightDecay(), classes(), VAL, steps=5, iterations=1)
    assert torch.equal(found.model[1].running_mean, torch.full((4,), 0.7))
    assert found.value == pytest.approx(F.cross_entropy(found.model(VAL[0]), VAL[1]).item(), rel=1e-10)


def test_a_quadratic_is_solved_in_closed_form_and_certified():
    torch.manual_seed(0)
    x = torch.randn(40, 5)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(40, 1)
    found = bl.tune(
        nn.Linear(5, 1), F.mse_loss, WeightDecay(0.1, per="weight"), (x[:20], y[:20]), (x[20:], y[20:]),
        lr=0.1, steps=400, iterations=10,
    )  # fmt: skip
    assert found.method.startswith("Spectral")
    assert found.gap.applies and found.gap.bound < 1e-3 and found.certificate.steps == 400
    # The bound holds for a training that is ten times as long, with the same hyperparameters.
    job = prepare(nn.Linear(5, 1), F.mse_loss, WeightDecay(0.1, per="weight"), (x[:20], y[:20]), (x[20:], y[20:]),
                  lr=0.1, steps=4000)  # fmt: skip
    assert abs(job.run(found.lam)[1] - found.value) <= found.gap.bound


def test_minibatches_are_certified_on_the_whole_training_set_from_where_they_ended():
    torch.manual_seed(0)
    x = torch.randn(40, 5)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(40, 1)
    train = DataLoader(TensorDataset(x[:20], y[:20]), batch_size=5, shuffle=True)
    found = bl.tune(
        nn.Linear(5, 1), F.mse_loss, WeightDecay(0.1), train, (x[20:], y[20:]), lr=0.05, steps=30, iterations=2
    )
    assert found.gap.applies and found.certificate.steps == 30
    # The bound is about the trained weights, not about another training.
    assert found.certificate.value == pytest.approx(found.value, rel=1e-10)
    limit = prepare(nn.Linear(5, 1), F.mse_loss, WeightDecay(0.1), (x[:20], y[:20]), (x[20:], y[20:]), steps=5000)
    assert abs(limit.run(found.lam)[1] - found.value) <= found.gap.bound


@pytest.mark.parametrize(
    ("loss", "settings", "says"),
    [
        (nn.MSELoss(reduction="sum"), {"shuffle": True}, "reduction='sum'"),
        (lambda output, target: (output - target).square().sum(), {"shuffle": True}, "reduction='sum'"),
        (F.mse_loss, {"sampler": WeightedRandomSampler([1.0] * 10 + [3.0] * 10, 20)}, "repeats examples"),
    ],
)
def test_minibatches_of_another_problem_are_not_certified(loss, settings, says):
    """With a sum instead of a mean, the penalty weighs four times as much on a batch, so the minimisers differ."""
    torch.manual_seed(0)
    x = torch.randn(20, 5)
    train = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=5, **settings)
    found = bl.tune(nn.Linear(5, 1), loss, WeightDecay(5.0), train, (x, x[:, :1]), lr=0.01, steps=30, iterations=1)
    assert not found.gap.applies and says in str(found.gap)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (network(), "not positive"),
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)), "random"),
    ],
)
def test_where_there_is_no_bound_a_sentence_says_why(model, says):
    found = bl.tune(model, F.cross_entropy, LearningRate(), loader(), VAL, steps=4, iterations=1)
    assert not found.gap.applies and says in str(found.gap)


def test_validation_by_minibatches():
    val = DataLoader(TensorDataset(*VAL), batch_size=10, shuffle=True)
    found = bl.tune(
        network(), F.cross_entropy, LearningRate(0.1), loader(), val, steps=8, iterations=6, validation="minibatch"
    )
    job = prepare(network(), F.cross_entropy, LearningRate(0.1), loader(), VAL, steps=8)
    assert found.value == pytest.approx(job.run(found.lam)[1], rel=1e-12)
    assert len(set(found.history["value"])) == 6 and found.value < job.run(job.space.lam)[1]


def test_what_the_loss_is_given_by_name_is_in_natural_units():
    seen = []

    def loss(output, target, hp):
        seen.append(hp["temperature"].item())
        return F.cross_entropy(output / hp["temperature"], target)

    temperature = Hyperparameter("temperature", 4.0, range=(1, 5), transform="logit")
    found = bl.tune(
        network(), loss, temperature, loader(), VAL, val_loss=F.cross_entropy, steps=5, iterations=8, lr=0.3
    )
    assert seen[0] == pytest.approx(4.0)
    assert 1 < found.values["temperature"] < 4
    assert found.history["values"]["temperature"].shape == (8,)


def test_the_start_itself_can_be_learned_and_the_result_begins_there():
    found = bl.tune(network(), F.cross_entropy, Initialisation(per="weight"), loader(), VAL, steps=2, iterations=5)
    assert found.value < found.start_value
    model = network()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.as_tensor(found.values["initialisation"][name]))
    again = bl.tune(model, F.cross_entropy, WeightDecay(1e-8), loader(), VAL, steps=2, iterations=0)
    assert again.value == pytest.approx(found.value, rel=1e-6)


def test_float32_models_stay_in_float32():
    model = network().float()
    found = bl.tune(model, F.cross_entropy, [WeightDecay(), ExampleWeights()], loader(), VAL, steps=6, iterations=2)
    assert next(found.model.parameters()).dtype == torch.float32
    assert found.lam["example_weights"].dtype == torch.float32


def test_new_batches_in_every_hyperiteration_are_those_of_other_seeds():
    found = bl.tune(
        network(), F.cross_entropy, LearningRate(0.2, per="step"), loader(), VAL, steps=6, iterations=5, batches="new"
    )
    again = bl.tune(
        network(), F.cross_entropy, LearningRate(0.2, per="step"), loader(), VAL, steps=6, iterations=5, batches="new"
    )
    job = prepare(network(), F.cross_entropy, LearningRate(0.2, per="step"), loader(), VAL, steps=6)
    # Evaluated on the data of the seed, not on the batches of the last hyperiteration.
    assert found.start_value == job.run(job.space.lam)[1] and found.value == job.run(found.lam)[1]
    assert found.history["value"][0] != found.start_value
    assert found.history["value"].tolist() == again.history["value"].tolist()
    assert found.value < found.start_value
    one, two = job.training(1), job.training(2)
    assert one(1).index.tolist() != two(1).index.tolist() and sorted(one(1).index) != sorted(job.task.batch(1).index)


def test_new_noise_for_a_batch_that_is_always_the_same():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    job = prepare(model, F.cross_entropy, LearningRate(0.2), classes(), VAL, steps=6)
    losses = [job.problem.inner(job.network.w, job.space.lam, job.training(seed)(1)).item() for seed in (1, 2, 1)]
    assert losses[0] == losses[2] != losses[1]


def test_values_per_layer_are_torchs_parameter_groups():
    declared = [
        LearningRate([0.1, 0.4], per="layer"),
        WeightDecay([0.05, 0.01], per="layer"),
        Initialisation([2.0, 0.5], per="layer"),
    ]
    found = bl.tune(network(), F.cross_entropy, declared, classes(), VAL, steps=10, iterations=0)
    model = network()
    with torch.no_grad():
        for layer, factor in ((model[0], 2.0), (model[2], 0.5)):
            for parameter in layer.parameters():
                parameter.mul_(factor)
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.05},
            {"params": model[2].parameters(), "lr": 0.4, "weight_decay": 0.01},
        ]
    )
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(classes()[0]), classes()[1]).backward()
        optimizer.step()
    for ours, theirs in zip(found.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_outer_step_is_in_the_unit_of_the_hyperparameter():
    declared = [LearningRate(0.1, range=(0.08, 0.12), transform=None), WeightDecay(1e-2)]
    found = bl.tune(network(), F.cross_entropy, declared, classes(), VAL, steps=5, iterations=2, outer_lr=0.2)
    # Adam's first step is as long as its learning rate: a fifth of a tenth of the range, a fifth in the logarithm.
    assert abs(np.diff(found.history["values"]["lr"])[0]) == pytest.approx(0.2 * 0.004, rel=1e-3)
    assert abs(np.diff(np.log(found.history["values"]["weight_decay"]))[0]) == pytest.approx(0.2, rel=1e-3)


def test_a_class_of_torch_trains_the_model_or_moves_the_hyperparameters():
    """As `dynamics` it trains the model; as `optimizer` with a dynamics it updates the hyperparameters."""
    declared, data = [LearningRate(0.05), WeightDecay(0.01)], (classes(), VAL)
    inner = bl.tune(network(), F.cross_entropy, declared, *data, dynamics=torch.optim.Adam, steps=5, iterations=2)
    named = bl.tune(network(), F.cross_entropy, declared, *data, dynamics="adam", steps=5, iterations=2)
    np.testing.assert_allclose(inner.history["value"], named.history["value"], rtol=1e-6)
    fixed = bl.tune(network(), F.cross_entropy, WeightDecay(), *data, dynamics=torch.optim.SGD, lr=0.3, steps=4,
                    iterations=0)  # fmt: skip
    assert fixed.value == bl.tune(network(), F.cross_entropy, WeightDecay(), *data, lr=0.3, steps=4, iterations=0).value
    outer = bl.tune(network(), F.cross_entropy, declared, *data, dynamics="sgd", optimizer=torch.optim.SGD, steps=5,
                    iterations=2, outer_lr=0.3)  # fmt: skip
    spoken = bl.tune(network(), F.cross_entropy, declared, *data, steps=5, iterations=2,
                     optimizer=lambda leaves: torch.optim.SGD(leaves, lr=0.3))  # fmt: skip
    assert outer.history["value"].tolist() == spoken.history["value"].tolist()


def test_the_mean_over_several_trainings_is_minimised():
    settings = {"steps": 6, "iterations": 2, "seed": 3}
    found = bl.tune(network(), F.cross_entropy, LearningRate(0.2), loader(), VAL, runs=3, **settings)
    job = prepare(network(), F.cross_entropy, LearningRate(0.2), loader(), VAL, steps=6, seed=3)
    seeds = [3, *(derived_seed(3, "training", i) for i in (1, 2))]
    tasks = [bl.Task(job.training(seed), job.val) for seed in seeds]
    each = [bl.hypergradient(job.problem, found.lam, task, dynamics=job.dynamics, steps=6).value for task in tasks]
    assert (
        found.value == pytest.approx(float(torch.stack(each).mean()), rel=1e-6) and len({float(x) for x in each}) == 3
    )
    new = bl.tune(network(), F.cross_entropy, LearningRate(0.2), loader(), VAL, runs=2, batches="new", **settings)
    assert np.isfinite(new.value) and new.value != found.value
    with pytest.raises(bl.BilevelError, match="would all be the same"):
        bl.tune(network(), F.cross_entropy, LearningRate(0.2), classes(40), VAL, runs=2, **settings)
    with pytest.raises(bl.BilevelError, match="not a number of trainings"):
        bl.tune(network(), F.cross_entropy, LearningRate(0.2), loader(), VAL, runs=0, **settings)
