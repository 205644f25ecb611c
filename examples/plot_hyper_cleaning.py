r"""
Data hyper-cleaning
===================

Half the labels of the training set are wrong, and nobody knows which. A small validation set has been checked by hand.
Give every training example a weight :math:`v_i \in (0, 1)` in the training loss,

.. math:: L_v(w) = \frac1N \sum_i v_i\, \ell(x_i, y_i; w),

and tune all of them so that the model trained with these weights does well on the validation set. One gradient moves
thousands of weights; those of wrong labels go to zero. The model is multinomial logistic regression on MNIST.
"""

import os

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bilevel as bl
from bilevel.data import load
from bilevel.tuning import ExampleWeight, ExampleWeights

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
plt.style.use("tableau-colorblind10")
torch.manual_seed(0)

# %%
# The data
# --------
# 5,000 examples to train on, half of which get a label drawn from the other nine; 1,000 that are right, to validate on;
# and the 10,000 of the official test set.


def pictures():
    """MNIST, or scikit-learn's digits if MNIST is missing: images in [0, 1] and labels, to learn from and test."""
    try:
        mnist = load("mnist", progress=False)
    except bl.BilevelError:
        print("MNIST is not in the data root (BILEVEL_DATA); these are scikit-learn's 8×8 digits instead.")
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = torch.tensor(x[order] / 16).float(), torch.tensor(y[order])
        return (x[:1200], y[:1200]), (x[1200:], y[1200:])
    parts = mnist.parts["train"][:6000], mnist.parts["test"]
    return [(torch.tensor(mnist.images[p]).flatten(1) / 255, torch.tensor(mnist.labels[p])) for p in parts]


(x, y), (test_x, test_y) = pictures()
test_x, test_y = (test_x[:2000], test_y[:2000]) if QUICK else (test_x, test_y)
count, checked = (1000, 200) if QUICK or len(x) < 6000 else (5000, 1000)
train_x, train_y, val = x[:count], y[:count].clone(), (x[count : count + checked], y[count : count + checked])
wrong = torch.zeros(count, dtype=torch.bool)
wrong[torch.randperm(count)[: count // 2]] = True
train_y[wrong] = (train_y[wrong] + torch.randint(1, 10, (count // 2,))) % 10

# %%
# Tuning
# ------
# One weight per example, starting at a half. The learning rate is small and there is no momentum: a model that has only
# begun to learn follows what most examples agree on, and does not yet fit the wrong ones.

model = torch.nn.Linear(x.shape[1], 10)
result = bl.tune(
    model,
    F.cross_entropy,
    ExampleWeights(0.5),
    train=DataLoader(TensorDataset(train_x, train_y), batch_size=count // 10, shuffle=True),
    val=val,
    lr=0.2,
    steps=40 if QUICK else 100,
    iterations=8 if QUICK else 20,
    outer_lr=0.5,
)
print(result)

# %%
# Which labels are wrong?
# -----------------------
# An example whose weight fell is called wrong. The tuning does not use ``wrong``, or the number of wrong labels.

weights = torch.as_tensor(result.values["example_weights"])
called = weights < 0.5
found = int((called & wrong).sum())
precision, recall = found / int(called.sum()), found / int(wrong.sum())
f1 = 2 * precision * recall / (precision + recall)
print(f"called wrong: {int(called.sum())} of {count}; precision {precision:.3f}, recall {recall:.3f}, F1 {f1:.3f}")

# %%
# A weight that generalises
# -------------------------
# The weights above belong to these examples. ``ExampleWeight`` tunes a scorer instead, here two numbers that turn the
# loss of an example into its weight, so that every example has one. The model that is trained with them is a small
# network, which distinguishes wrong labels from hard examples better than a linear model does.


class Judge(torch.nn.Module):
    """The logit of the weight: bias − slope · loss."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        with torch.no_grad():
            self.line.weight.fill_(-1.0)
            self.line.bias.fill_(2.0)

    def forward(self, loss):
        return self.line(loss)


network = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
learned = bl.tune(
    network,
    F.cross_entropy,
    ExampleWeight(Judge(), of="loss"),
    train=DataLoader(TensorDataset(train_x, train_y), batch_size=count // 10, shuffle=True),
    val=val,
    lr=0.2,
    steps=60 if QUICK else 150,
    iterations=8 if QUICK else 40,
    outer_lr=1.0,
)
scored = learned.weights(train_x, train_y)

# %%
# It also rates examples that it has never seen: half of these labels are wrong too.

new_y = test_y[:1000].clone()
new_wrong = torch.arange(len(new_y)) % 2 == 0
new_y[new_wrong] = (new_y[new_wrong] + torch.randint(1, 10, (int(new_wrong.sum()),))) % 10
new = learned.weights(test_x[:1000], new_y)
new_rate = (new[~new_wrong][:, None] > new[new_wrong]).double().mean().item()
print(f"a new example with a right label has the larger weight in {100 * new_rate:.1f} % of all pairs")

# %%
# Test accuracy
# -------------
# The same training, to the end and on training and validation examples together, with five ways to weight the training
# examples. Its weight decay, 0.01, is about the best of 0.001, 0.003, 0.01 and 0.03 for the first two, the baselines.


def fit(train_weights):
    """Test accuracy of logistic regression on all examples, those of the training set weighted."""
    inputs, labels = torch.cat([train_x, val[0]]), torch.cat([train_y, val[1]])
    scale = torch.cat([train_weights.float(), torch.ones(len(val[0]))])
    classifier = torch.nn.Linear(x.shape[1], 10)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        losses = F.cross_entropy(classifier(inputs), labels, reduction="none")
        ((scale * losses).sum() / scale.sum()).backward()
        optimizer.step()
    return (classifier(test_x).argmax(1) == test_y).double().mean().item()


accuracy = {
    "everything": fit(torch.ones(count)),
    "validation set only": fit(torch.zeros(count)),
    "tuned weights": fit(weights),
    "weights of a scorer": fit(scored),
    "only right labels (the ceiling)": fit(~wrong),
}
for name, score in accuracy.items():
    print(f"{name:32} test accuracy {100 * score:.2f} %")

# %%
# The weights of right and wrong labels separate. Below are the examples with the lowest weights, with their given
# labels.

figure, panel = plt.subplots(figsize=(7, 3.2), layout="constrained")
panel.hist(
    [weights[~wrong].numpy(), weights[wrong].numpy()], bins=30, stacked=True, label=["right label", "wrong label"]
)
panel.set(xlabel="tuned weight", ylabel="examples", title=f"{count:,} weights, F1 {f1:.3f}")
panel.legend()

figure, panels = plt.subplots(2, 8, figsize=(9, 2.9), layout="constrained")
side = int(x.shape[1] ** 0.5)
for panel, i in zip(panels.flat, weights.argsort(), strict=False):
    panel.imshow(train_x[i].reshape(side, side).numpy(), cmap="gray_r")
    panel.set_title(f"label {train_y[i]}{'' if wrong[i] else ' (right)'}", fontsize=9)
    panel.set_axis_off()
plt.show()
