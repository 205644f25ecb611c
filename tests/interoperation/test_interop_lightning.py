"""`objective` as the training step of a Lightning module."""

import pytest
import torch
from small_network import SETTINGS, problem_of, start
from torch import nn
from torch.utils.data import DataLoader

import bilevel as bl
from bilevel.testing import relative_error

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

# Lightning 2.6 asks torch's pytrees for a class that torch has deprecated, and on machines with many cores it advises
# more workers for loading data.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]
EPOCHS, BATCHES = 4, 3


class Rows:
    """Batch i of the validation data is a function of i: 6 of its 12 rows."""

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return BATCHES

    def __getitem__(self, i):
        if i >= BATCHES:
            raise IndexError(i)
        return torch.randperm(12, generator=torch.Generator().manual_seed(self.first + i))[:6]


def value(lam, rows):
    problem, task = problem_of()
    part = bl.Task(task.train, tuple(leaf[rows] for leaf in task.val))
    return bl.objective(problem, lam, part, **SETTINGS)


def optimisers(parameters):
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.hyper = nn.ParameterDict({name: nn.Parameter(leaf) for name, leaf in start().items()})

    def training_step(self, rows, number):
        return value(dict(self.hyper), rows)

    def validation_step(self, rows, number):
        assert not torch.is_grad_enabled()
        self.log("val", value(dict(self.hyper), rows), batch_size=1)

    def configure_optimizers(self):
        return optimisers(self.parameters())

    def train_dataloader(self):
        return DataLoader(Rows(BATCHES * self.current_epoch), batch_size=None)

    def val_dataloader(self):
        return DataLoader(Rows(1000), batch_size=None)

    def lam(self):
        return {name: leaf.detach().clone() for name, leaf in self.hyper.items()}


def trainer(epochs, folder, *, inference_mode=False, **more):
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=1,
        inference_mode=inference_mode,
        **more,
    )


def by_hand(clip):
    """What Lightning should do, in plain torch."""
    hyper = [leaf.requires_grad_() for leaf in start().values()]
    lam = dict(zip(start(), hyper, strict=True))
    (optimizer,), (scheduler,) = optimisers(hyper)
    for epoch in range(EPOCHS):
        for rows in Rows(BATCHES * epoch):
            optimizer.zero_grad()
            value(lam, rows).backward()
            nn.utils.clip_grad_norm_(hyper, clip)
            optimizer.step()
        scheduler.step()
    return {name: leaf.detach() for name, leaf in lam.items()}


def test_fit_ends_where_the_plain_loop_ends(tmp_path):
    module = Module()
    run = trainer(EPOCHS, tmp_path, gradient_clip_val=0.05)
    run.fit(module)
    expected = by_hand(clip=0.05)
    assert relative_error(expected, start()) > 0.01
    assert relative_error(module.lam(), expected) < 1e-6
    with torch.no_grad():
        validation = torch.stack([value(expected, rows) for rows in Rows(1000)]).mean()
    assert run.callback_metrics["val"].item() == pytest.approx(validation.item(), rel=1e-5)  # Lightning keeps float32


def test_clipping_matters_here():
    assert relative_error(by_hand(clip=0.05), by_hand(clip=1e9)) > 1e-3


def test_a_run_from_a_checkpoint_is_the_run_without_a_break(tmp_path):
    whole, half, rest = Module(), Module(), Module()
    trainer(EPOCHS, tmp_path).fit(whole)
    first = trainer(EPOCHS // 2, tmp_path)
    first.fit(half)
    first.save_checkpoint(tmp_path / "half.ckpt")
    assert relative_error(half.lam(), whole.lam()) > 1e-3
    trainer(EPOCHS, tmp_path).fit(rest, ckpt_path=tmp_path / "half.ckpt")
    for name, leaf in whole.lam().items():
        assert torch.equal(rest.lam()[name], leaf)


@pytest.mark.parametrize("inference", [False, True])
def test_validation_works_without_gradients_and_is_refused_in_inference_mode(tmp_path, inference):
    """Tensors made in inference mode can never be differentiated, and the inner steps need gradients."""
    run = trainer(1, tmp_path, inference_mode=inference)
    if inference:
        with pytest.raises(bl.BilevelError, match=r"Trainer\(inference_mode=False\)"):
            run.validate(Module(), verbose=False)
    else:
        expected = torch.stack([value({k: v.requires_grad_() for k, v in start().items()}, r) for r in Rows(1000)])
        assert run.validate(Module(), verbose=False)[0]["val"] == pytest.approx(expected.mean().item(), rel=1e-5)
