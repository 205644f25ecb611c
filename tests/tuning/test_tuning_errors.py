"""What cannot work is refused with what was passed, why, and what to write instead."""

import numpy as np
import pandas
import pytest
import torch
from scipy import sparse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tuning_examples import classes, loader, network

import bilevel as bl
from bilevel.errors import BilevelError, BilevelWarning, DivergenceError
from bilevel.tuning import (
    Augmentation,
    ExampleWeights,
    Hyperparameter,
    Initialisation,
    LabelSmoothing,
    LearningRate,
    LossWeights,
    Momentum,
    WeightDecay,
)

VAL = classes(30, seed=1)
DATA = TensorDataset(*classes())


def frozen():
    model = network()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


class Mistaken(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)

    def forward(self, x):
        return self.second(x)


def hooked():
    model = network()
    model[0].bias.register_hook(lambda g: g * 0)
    return model


def uncopyable():
    model = network()
    model.kept = model[0](torch.ones(1, 3))
    return model


def ignoring(output, target, hp):
    return F.cross_entropy(output, target)


def mean_square(output, target):
    return ((output - F.one_hot(target, 3)) ** 2).mean()


SIGNS, ONES = torch.tensor([-1.0, 1.0, 1.0]), torch.ones(24, dtype=torch.float32)
TWO = {"log": F.cross_entropy, "square": mean_square}

# The wrong arguments of a call, and words that the message must contain.
WRONG = {
    "nothing declared": ({"hyperparameters": []}, ["declares nothing to tune"]),
    "a class": ({"hyperparameters": [WeightDecay]}, ["WeightDecay()"]),
    "a number": ({"hyperparameters": [0.1]}, ["0.1 is not a hyperparameter"]),
    "the same name": ({"hyperparameters": [WeightDecay(), WeightDecay(per="layer")]}, ["'weight_decay'", "name='"]),
    "no name": ({"hyperparameters": Hyperparameter("", 1.0)}, ["not a name"]),
    "outside": ({"hyperparameters": WeightDecay(1e3)}, ["starts at 1000", "outside its range (1e-08, 100)"]),
    "not positive": (
        {"hyperparameters": LearningRate(-1.0, range=None)},
        ["'lr'", "starts at -1", "outside its range (0, inf)"],
    ),
    "not a number": ({"hyperparameters": LearningRate("fast")}, ["'fast'", "not a number"]),
    "another shape": ({"hyperparameters": LearningRate([0.1, 0.2], per="step")}, ["shape [2]", "[5]"]),
    "one number for a whole run": ({"hyperparameters": LearningRate([0.1] * 5)}, ["shape [5]", "'step' or 'layer'"]),
    "one number for the model": ({"hyperparameters": WeightDecay([0.1] * 4)}, ["shape [4]", "per='model'", "'layer'"]),
    "one factor of the start": ({"hyperparameters": Initialisation([2.0] * 3, per="model")}, ["shape [3]"]),
    "one smoothing": ({"hyperparameters": LabelSmoothing([0.1, 0.2, 0.3])}, ["shape [3]", "Pass a number."]),
    "ignored labels to smooth": (
        {"hyperparameters": LabelSmoothing(), "train": (classes()[0], classes()[1] - 1)},
        ["a class from 0 to 2", "Leave out examples"],
    ),
    "one loss to mix": ({"hyperparameters": LossWeights()}, ["several losses", "remove 'loss_weights'"]),
    "every output with every target": (
        {"model": nn.Linear(3, 1), "loss": lambda o, y: ((o - y) ** 2).mean(), "train": classes()},
        ["loss compares every output with every target", "[24, 1] and the targets [24]", "y.reshape(24, 1)"],
    ),
    "every output with every target, which must be a class": (
        {"model": nn.Linear(3, 1), "loss": lambda o, y: F.relu(1 - o * SIGNS[y]).mean(), "train": classes()},
        ["loss compares every output with every target"],
    ),
    "every output with every target, in single precision": (
        {"model": nn.Linear(3, 1).float(), "loss": lambda o, y: ((o - y) @ ONES).square().mean(), "train": classes()},
        ["loss compares every output with every target"],
    ),
    "every target with every output": (
        {
            "model": nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)),
            "loss": lambda o, y: (o - y).abs(),
            "train": (classes()[0], classes()[0][:, :1]),
            "val": (VAL[0], VAL[0][:, :1]),
            "hyperparameters": ExampleWeights(),
        },
        ["[24] and the targets [24, 1]"],
    ),
    "not on the simplex": (
        {"loss": TWO, "val_loss": F.cross_entropy, "hyperparameters": LossWeights([0.7, 0.7])},
        ["add up to 1"],
    ),
    "unknown transform": ({"hyperparameters": WeightDecay(transform="sqrt")}, ["'sqrt'", "'log'"]),
    "not used": ({"hyperparameters": Hyperparameter("c", 1.0)}, ["'c' is not used", "hp['c']"]),
    "is not used": (
        {"hyperparameters": Hyperparameter("c", 1.0), "loss": ignoring, "val_loss": F.cross_entropy},
        ["['c'] reaches neither"],
    ),
    "judged by itself": ({"hyperparameters": Hyperparameter("c", 1.0), "loss": ignoring}, ["val_loss"]),
    "no judge": ({"loss": TWO, "hyperparameters": LossWeights()}, ["names 2 losses", "val_loss"]),
    "no mixture": ({"loss": TWO, "val_loss": F.cross_entropy}, ["LossWeights()"]),
    "several numbers": ({"loss": lambda o, y: o}, ["shape [8, 3]", ".mean()"]),
    "a float": ({"loss": lambda o, y: F.cross_entropy(o, y).item()}, ["returned float"]),
    "no loss": ({"loss": "mse"}, ["'mse' is not a loss"]),
    "a class of losses": ({"loss": nn.CrossEntropyLoss}, ["is not a loss"]),
    "one loss for all examples": (
        {"loss": mean_square, "hyperparameters": ExampleWeights()},
        ["one number per example", "reduction='none'"],
    ),
    "no parameters": ({"model": nn.Tanh()}, ["no parameters that require grad"]),
    "frozen": ({"model": frozen()}, ["requires_grad_()"]),
    "lazy layers": ({"model": nn.LazyLinear(3)}, ["'weight' has no shape yet", "Call the model once"]),
    "no numbers": ({"model": nn.Linear(3, 3, device="meta")}, ["'weight' is on the meta device", "to_empty"]),
    "not to be copied": ({"model": uncopyable()}, ["cannot be copied", "parametrizations.weight_norm"]),
    "no module": ({"model": lambda x: x}, ["Pass a torch.nn.Module"]),
    "empty validation": ({"val": (torch.zeros(0, 3), torch.zeros(0))}, ["val data has no examples"]),
    "empty validation loader": (
        {"val": DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0)))},
        ["val data has no examples"],
    ),
    "no steps": ({"steps": 0}, ["steps=0"]),
    "no iterations": ({"iterations": -1}, ["iterations=-1"]),
    "no step size": ({"outer_lr": 0}, ["outer_lr=0"]),
    "no patience": ({"patience": 0}, ["patience=0"]),
    "a learning rate twice": ({"hyperparameters": LearningRate(), "lr": 0.5}, ["lr=0.5", "LearningRate(0.5)"]),
    "a momentum twice": ({"hyperparameters": Momentum(), "momentum": 0.5}, ["momentum=0.5", "Momentum(0.5)"]),
    "a learning rate beside a dynamics": ({"dynamics": bl.Adam(1e-3), "lr": 0.5}, ["lr=0.5", "Adam(lr=0.001"]),
    "unknown validation": ({"validation": "none"}, ["'none'", "'whole'"]),
    "unknown batches": ({"batches": "other"}, ["'other'", "'same'"]),
    "minibatches of a tensor": ({"validation": "minibatch"}, ["needs a DataLoader for val"]),
    "unknown method": ({"method": "fast"}, ["method='fast'"]),
    "unknown dynamics": ({"dynamics": "lbfgs"}, ["'lbfgs' is not known", "'adam'"]),
    "no dynamics": ({"dynamics": 0.1}, ["dynamics=0.1"]),
    "a dynamics that returns none": ({"dynamics": lambda hp: 0.1}, ["returned float"]),
    "no such setting": (
        {"hyperparameters": Momentum(), "dynamics": bl.GradientDescent(0.1)},
        ["GradientDescent has no setting 'momentum'"],
    ),
    "a setting twice": (
        {"hyperparameters": [LearningRate(), LearningRate(per="step", name="other")]},
        ["set the dynamics' 'lr'", "'other'"],
    ),
    "unseen by the method": ({"hyperparameters": LearningRate(), "method": bl.FirstOrder()}, ["['lr']"]),
    "no parameters chosen": ({"hyperparameters": WeightDecay(only=lambda name: False)}, ["selects none"]),
    "no labels to smooth": (
        {"hyperparameters": LabelSmoothing(), "loss": lambda o, y: o.mean(), "model": nn.Flatten(0)},
        ["no parameters"],
    ),
    "one output for yes and no": (
        {
            "hyperparameters": LabelSmoothing(),
            "loss": nn.BCEWithLogitsLoss(),
            "model": nn.Linear(3, 1),
            "train": (classes()[0], torch.ones(24, 1)),
            "val": (classes(seed=1)[0], torch.ones(24, 1)),
        },
        ["of shape [24, 1]", "two for yes and no"],
    ),
    "a mistake in the model": ({"model": Mistaken()}, ["failed at its first call", "no attribute 'second'"]),
    "no function": ({"hyperparameters": Augmentation(function=0.3)}, ["function=0.3"]),
    "shapes": ({"model": nn.Linear(2, 3)}, ["Shapes"]),
    "the same data": ({"train": VAL}, ["train and val are the same data", "bilevel.holdout"]),
    "the same tensors": ({"train": [*VAL]}, ["are the same data"]),
    "the same rows cut twice": (
        {"train": tuple(part[:20] for part in VAL), "val": tuple(part[:20] for part in VAL)},
        ["are the same data"],
    ),
    "copies of arrays": (
        {"train": tuple(part.numpy().copy() for part in VAL), "val": tuple(part.numpy() for part in VAL)},
        ["are the same data"],
    ),
    "the same examples": (
        {"train": DataLoader(DATA, batch_size=4, shuffle=True), "val": DataLoader(DATA, batch_size=24)},
        ["are the same data"],
    ),
    "the same data set": ({"train": DataLoader(DATA, batch_size=4), "val": DATA}, ["are the same data"]),
    "a class for either level": (
        {"optimizer": torch.optim.Adam},
        ["dynamics=torch.optim.Adam", "inner level", "optimizer=lambda leaves: torch.optim.Adam(leaves", "outer level"],
    ),
    "a hook": ({"model": hooked()}, ["'0.bias' has a hook", "Remove it"]),
    "text in a table": (
        {"val": (pandas.DataFrame({"size": [1.0, 2.0], "colour": ["red", "blue"]}), np.zeros(2))},
        ["val data has a DataFrame of object (columns colour)", "Encode"],
    ),
    "columns in another order": (
        {
            "train": (pandas.DataFrame(classes()[0].numpy(), columns=["a", "b", "c"]), classes()[1]),
            "val": (pandas.DataFrame(VAL[0].numpy(), columns=["a", "c", "b"]), VAL[1]),
        },
        ["where train has 'b', val has 'c'", "val[train.columns]"],
    ),
    "a column fewer": (
        {
            "train": (pandas.DataFrame(classes()[0].numpy(), columns=["a", "b", "c"]), classes()[1]),
            "val": (pandas.DataFrame(VAL[0].numpy()[:, :2], columns=["a", "b"]), VAL[1]),
            "holdout": 0.5,
        },
        ["where train has 'c', val has None"],
    ),
    "masked entries": ({"val": (np.ma.masked_greater(VAL[0].numpy(), 1.0), VAL[1])}, ["masked array", ".filled("]),
    "a sparse matrix": ({"val": (sparse.csr_matrix(VAL[0].numpy()), VAL[1])}, ["sparse csr_matrix", ".toarray()"]),
    "sparse tensors": (
        {"train": (classes()[0].to_sparse(), classes()[1]), "val": (VAL[0].to_sparse(), VAL[1]), "holdout": 0.5},
        ["layout torch.sparse_coo", ".to_dense()"],
    ),
    "nullable numbers": (
        {"val": (pandas.DataFrame(VAL[0].numpy()).astype("Float64"), VAL[1])},
        ["DataFrame of object", ".astype(float)"],
    ),
    "a table without targets": ({"val": pandas.DataFrame({"size": [1.0]})}, ["val=DataFrame is not data", "pair"]),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.filterwarnings("ignore:Implicit")
def test_it_is_said_what_is_wrong(case):
    wrong, words = WRONG[case]
    given = {
        "model": network(), "loss": F.cross_entropy, "hyperparameters": WeightDecay(), "train": loader(), "val": VAL,
        "steps": 5, "iterations": 2, **wrong,
    }  # fmt: skip
    with pytest.raises(BilevelError) as error:
        bl.tune(given.pop("model"), given.pop("loss"), **given)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("kind", [WeightDecay, LearningRate, Momentum, Initialisation])
def test_an_unknown_per_is_refused_at_once(kind):
    with pytest.raises(BilevelError, match=r"per='neuron'\. Pass one of"):
        kind(per="neuron")


def test_two_starts_are_one_too_many():
    with pytest.raises(BilevelError, match="two starts"):
        Initialisation(2.0, per="weight")


def test_label_smoothing_needs_labels():
    regression, val = ((torch.randn(10, 3), torch.randn(10)) for _ in "12")
    with pytest.raises(BilevelError, match="class labels"):
        bl.tune(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), F.mse_loss, LabelSmoothing(), regression, val, steps=2)


def test_a_training_that_diverges_from_the_start_is_an_error():
    with pytest.raises(DivergenceError, match="smaller learning rate"):
        bl.tune(nn.Linear(3, 3), mean_square, LearningRate(10.0, range=(1e-3, 1e3)), classes(), VAL, steps=1500)


def test_a_training_that_diverges_on_the_way_returns_the_best_before():
    def explodes(iteration):
        # Raises the learning rate, so that training diverges.
        iteration.hypergradient.grad["lr"].fill_(-1.0)

    found = bl.tune(
        nn.Linear(3, 3), mean_square, LearningRate(0.1, range=(1e-3, 1e4)), classes(), VAL, steps=900, iterations=20,
        optimizer=lambda leaves: torch.optim.SGD(leaves, lr=3.0), callbacks=[explodes],
    )  # fmt: skip
    assert found.outcome.kind == "diverged" and "narrower range" in found.outcome
    assert found.value == found.history["value"].min() and len(found.history["value"]) < 20
    assert all(bool(torch.isfinite(p).all()) for p in found.model.parameters())


def test_examples_that_are_never_shown_are_pointed_out():
    with pytest.warns(BilevelWarning, match="16 of 24 examples"):
        bl.tune(network(), F.cross_entropy, ExampleWeights(), loader(), VAL, steps=2, iterations=1)


def test_inference_mode_is_named():
    with torch.inference_mode(), pytest.raises(BilevelError, match=r"torch\.no_grad"):
        bl.tune(network(), F.cross_entropy, WeightDecay(), loader(), VAL, steps=2, iterations=1)


@pytest.mark.parametrize(
    "loss",
    [lambda o, y: ((o[:, 0] - y) ** 2).mean(), lambda o, y: ((o - y[:, None]) ** 2).mean(), lambda o, y: (o**2).mean()],
)
def test_losses_that_pair_outputs_of_another_shape_with_their_targets_are_accepted(loss):
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    (x, _), (other, _) = classes(), VAL
    found = bl.tune(model, loss, WeightDecay(), (x, x.sum(1)), (other, other.sum(1)), steps=2, iterations=1)
    w = {"weight": torch.zeros(1, 3), "bias": model.bias.detach()}
    for _ in range(2):
        w = {name: v.requires_grad_() for name, v in w.items()}
        value = loss(x @ w["weight"].T + w["bias"], x.sum(1)) + 0.5e-4 * sum((v**2).sum() for v in w.values())
        slopes = torch.autograd.grad(value, list(w.values()))
        w = {name: (v - 0.1 * g).detach() for (name, v), g in zip(w.items(), slopes, strict=True)}
    assert found.start_value == pytest.approx(float(loss(other @ w["weight"].T + w["bias"], other.sum(1))), rel=1e-12)
