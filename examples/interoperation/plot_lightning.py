"""
Meta-learning in PyTorch Lightning
==================================

A ``LightningModule`` whose ``training_step`` returns ``bl.objective(...)`` needs nothing else: Lightning calls
``.backward()``, clips, steps the optimiser and the scheduler, logs, and writes checkpoints from which it can resume.

The tasks are sine curves of any amplitude and phase, seen at ten noisy points. The outer variable is a network whose
features let ten steps of gradient descent on a *linear* model fit such a curve.
"""

import os
import tempfile
from pathlib import Path

import lightning as L
import matplotlib.pyplot as plt
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Subset

import bilevel as bl

QUICK = bool(os.environ.get("BILEVEL_QUICK"))
EPOCHS, EPISODES, FEATURES = (4, 160, 32) if QUICK else (20, 400, 32)

# %%
# Episodes
# --------
# Episode i is a function of i, so a run that is resumed from a checkpoint sees the same episodes. A loader
# yields tuples of tensors, because Lightning moves those to the device; the training step makes a ``bl.Task`` of each.


class Sines:
    """Ten support points with noise and thirty query points without."""

    def __getitem__(self, i):
        dice = torch.Generator().manual_seed(i)
        amplitude, phase = 0.5 + 2 * torch.rand(1, generator=dice), 6.28 * torch.rand(1, generator=dice)
        x = 10 * torch.rand(40, 1, generator=dice) - 5
        y = amplitude * torch.sin(x + phase)
        return (x[:10], y[:10] + 0.05 * torch.randn(10, 1, generator=dice)), (x[10:], y[10:])


def loader(first, count):
    return DataLoader(Subset(Sines(), range(first, first + count)), batch_size=8, collate_fn=list)


# %%
# The module
# ----------
# ``encode`` computes the features once for all inner steps. They are bounded, so the curvature of the inner objective
# is at most 2, and steps of 0.5 are always short enough.


def squares(w, lam, batch):
    return (batch[0] @ w - batch[1]).square().mean()


class HyperFeatures(L.LightningModule):
    """Features for linear regression from ten points."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, FEATURES))
        self.problem = bl.Problem(
            squares, squares, lambda lam: torch.zeros(FEATURES, 1, device=self.device), self.encode
        )
        self.settings = {"dynamics": bl.GradientDescent(0.5), "steps": 10}

    def encode(self, lam, task):
        return bl.Task(*((self.features(lam, x), y) for x, y in (task.train, task.val)))

    def features(self, lam, x):
        return torch.func.functional_call(self.net, lam, (x,)).tanh() / FEATURES**0.5

    def training_step(self, batch, number):
        tasks = [bl.Task(train, val) for train, val in batch]
        return bl.objective(self.problem, dict(self.net.named_parameters()), tasks, **self.settings)

    def validation_step(self, batch, number):
        # Lightning has switched gradients off, so only the value is computed.
        self.log("val", self.training_step(batch, number), batch_size=len(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]

    def train_dataloader(self):
        return loader(self.current_epoch * EPISODES, EPISODES)

    def val_dataloader(self):
        return loader(10**6, 64)


# %%
# Training, stopping, resuming
# ----------------------------
# The inner steps need gradients in validation too, and tensors made in ``torch.inference_mode`` can never have them:
# hence ``inference_mode=False``. Half of the epochs are run, then another trainer resumes from the checkpoint.

folder = Path(tempfile.mkdtemp())


def trainer(until):
    return L.Trainer(
        accelerator="cpu",
        max_epochs=until,
        gradient_clip_val=1.0,
        inference_mode=False,
        log_every_n_steps=20,
        reload_dataloaders_every_n_epochs=1,  # new episodes every epoch
        logger=CSVLogger(folder, "sines", version=f"until-{until}"),
        callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True)],  # with monitor="val" the last of the best
        enable_progress_bar=False,
        enable_model_summary=False,
    )


L.seed_everything(0)
untrained, module = HyperFeatures(), HyperFeatures()
before = trainer(0).validate(untrained, verbose=False)[0]["val"]
first, second = trainer(EPOCHS // 2), trainer(EPOCHS)
first.fit(module)
halfway = first.callback_metrics["val"].item()
second.fit(module, ckpt_path=first.checkpoint_callback.last_model_path)
after = second.callback_metrics["val"].item()
print(f"mean squared error on 64 new curves: {before:.3f} untrained, {halfway:.4f} halfway, {after:.4f} at the end")

# %%
# A new curve
# -----------
# Ten points and ten steps, with features from before and after meta-training; and what Lightning logged.

task, x = bl.Task(*Sines()[2 * 10**6]), torch.linspace(-5, 5, 200)[:, None]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for version, name, color in [(untrained, "untrained features", "#E69F00"), (module, "learned features", "#0072B2")]:
    lam = dict(version.net.named_parameters())
    w = bl.hypergradient(version.problem, lam, task, **version.settings).inner
    left.plot(x, (version.features(lam, x) @ w).detach(), label=name, color=color)
left.plot(*task.train, "o", color="black", label="the ten points")
left.plot(*task.val, ".", color="#6E6E6E", label="query points")
for until, name, color in [(EPOCHS // 2, "first trainer", "#56B4E9"), (EPOCHS, "from its checkpoint", "#D55E00")]:
    log = np.genfromtxt(folder / f"sines/until-{until}/metrics.csv", delimiter=",", names=True)
    right.semilogy(log["epoch"] + 1, log["val"], "o-", color=color, label=name)
left.set(title="A new curve", xlabel="x")
right.set(title="Validation", xlabel="epoch", ylabel="mean squared error", xticks=range(2, EPOCHS + 1, 2))
for axes in (left, right):
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
plt.show()
