"""`tune`: from a torch model and its loaders to tuned hyperparameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bilevel import trees
from bilevel.errors import BilevelError, DivergenceError, Outcome
from bilevel.methods.base import Method
from bilevel.outer_loop import Iteration, solve
from bilevel.problem import Task
from bilevel.tuning.batches import Replay
from bilevel.tuning.preparation import Prepared, prepare
from bilevel.tuning.randomness import mixed
from bilevel.tuning.result import Tuned
from bilevel.tuning.roles.base import Hyperparameter
from bilevel.tuning.space import Space, as_array

# Of hyperparameters with more entries than this no history is kept.
REMEMBERED = 1000


def tune(
    model: nn.Module,
    loss: Callable[..., Tensor] | Mapping[str, Callable[..., Tensor]],
    hyperparameters: Hyperparameter | Sequence[Hyperparameter],
    train: Any,
    val: Any,
    *,
    val_loss: Callable[..., Tensor] | None = None,
    steps: int = 100,
    iterations: int = 50,
    dynamics: Any = "sgd",
    lr: float | None = None,
    momentum: float | None = None,
    method: Method | Literal["auto"] = "auto",
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    outer_lr: float = 0.1,
    batches: Literal["same", "new"] = "same",
    validation: Literal["whole", "minibatch"] = "whole",
    patience: int | None = None,
    callbacks: Sequence[Callable[[Iteration], bool | None]] = (),
    seed: int = 0,
    progress: bool | None = None,
    check_derivatives: bool = True,
) -> Tuned:
    """Tune the hyperparameters of any torch model by gradient: min over λ of val_loss(w_T), T training steps from w_0.

    Every hyperiteration trains the model for `steps` steps, differentiates the validation loss with respect to all
    hyperparameters through that training, and moves them. The cost hardly depends on how many there are: a weight per
    example or a decay per weight costs little more than one number.

    The model, the loaders and the global generators of random numbers are left as they were. Everything random is a
    function of `seed` and the step number, because training is replayed: which examples are in a batch, random
    transforms in the data set, dropout. Training is in train mode. Validation is in eval mode, except that batch norm
    takes the statistics of the validation batch, since its running averages are no function of the weights; those of
    `result.model` are taken from one pass over the training batches at the end.

    Args:
        model: any module; its parameters that require grad are trained, from the values they have.
        loss: `loss(output, target)`, or `loss(output, target, hp)` with the values of all hyperparameters by name. One
            number, or one per example. A dict of losses is mixed by `LossWeights`.
        hyperparameters: one or a list: `WeightDecay`, `LearningRate`, `Momentum`, `LossWeights`, `LabelSmoothing`,
            `Augmentation`, `ExampleWeights`, `Initialisation`, or a plain `Hyperparameter` for a loss with three
            arguments. They are in `bilevel.tuning`.
        train: a `DataLoader` over a map-style data set, such a data set, or a pair of tensors (inputs, targets). The
            latter two are one batch, used whole in every step.
        val: the same; it is used whole, that is, all the examples that a loader's sampler shows.
        val_loss: what should be small in the end; `loss` by default. It has to be given where `loss` takes
            hyperparameters or is a dict, since those could be moved so as to make the loss itself small.
        steps: T, the training steps of a hyperiteration.
        iterations: hyperiterations.
        dynamics: "sgd", "adam" or another dynamics by its name in lower case; an instance, whose settings are used
            unless they are declared as hyperparameters; a function of the hyperparameters' values by name; or a
            function `step(loss, w, state, t)`.
        lr: the learning rate, for a dynamics given by name; 0.1 for SGD and the dynamics' own default otherwise. Where
            it is tuned, `LearningRate(start)` says it.
        momentum: likewise; 0 for SGD.
        method: how to differentiate; "auto" chooses by the sizes and the memory, and `result.method` says why.
        optimizer: builds the outer optimiser from the leaves of λ; by default Adam with `outer_lr`.
        outer_lr: how far a hyperparameter moves in a hyperiteration, in the unit of its transform: 0.1 is ten per cent
            on a logarithmic scale, and a hundredth of the range where there is no transform.
        batches: "same" replays one sequence of batches (and of dropout masks, and noise) in every hyperiteration;
            "new" draws another one for each. What is tuned can learn one sequence by heart, schedules above all.
        validation: "whole" evaluates the validation loss on all of `val`; "minibatch" takes one batch of the loader
            `val` per hyperiteration.
        patience: stop when the validation loss has not improved for this many hyperiterations, where they all have the
            same data.
        callbacks: called with a `bilevel.outer_loop.Iteration` before every update; one that returns True stops.
        seed: of everything random.
        progress: show a progress bar; None shows one on a terminal.
        check_derivatives: refuse a model or a loss whose derivatives are not what autograd says, as `Problem` does;
            False is for straight-through estimators, such as those of quantisation.

    With the same data in every hyperiteration, the default, f_T is one function and the best hyperparameters are
    returned; with batches="new" or validation="minibatch" the last ones, trained and judged on the data of `seed`.

    Returns:
        Tuned: the trained model, the values, the history; `print` it, or call `.plot()` or `.save(folder)`.

    Raises:
        BilevelError: what was passed cannot work.
        DivergenceError: training diverged with the hyperparameters that it began with.

    >>> import bilevel as bl
    >>> from bilevel.tuning import ExampleWeights, LearningRate, WeightDecay
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from sklearn.datasets import load_digits
    >>> x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    >>> train = DataLoader(TensorDataset(x[:500] / 16, y[:500]), batch_size=100, shuffle=True)
    >>> found = bl.tune(
    ...     model, torch.nn.functional.cross_entropy, [LearningRate(0.1, per="step"), WeightDecay(per="layer"),
    ...     ExampleWeights()], train, val=(x[500:1000] / 16, y[500:1000]), steps=20, iterations=10,
    ... )
    >>> found.value < found.start_value, sorted(found.values), found.values["lr"].shape, found.outcome.kind
    (True, ['example_weights', 'lr', 'weight_decay'], (20,), 'finished')
    """
    _check_settings(iterations, outer_lr, batches, validation, patience)
    job = prepare(
        model,
        loss,
        hyperparameters,
        train,
        val,
        val_loss=val_loss,
        steps=steps,
        dynamics=dynamics,
        check_derivatives=check_derivatives,
        lr=lr,
        momentum=momentum,
        seed=seed,
    )
    space = job.space
    # Where every hyperiteration sees the same data, f_T is one function, and the best λ is kept.
    one_function = batches == "same" and validation == "whole"
    tasks = job.task if one_function else _Source(job, val, batches, validation, iterations)
    chosen, reason = job.choose(method)
    path = _Path(space)
    solution = solve(
        job.problem,
        space.lam,
        tasks,
        dynamics=job.dynamics,
        steps=steps,
        method=chosen,
        optimizer=optimizer or _adam(space, outer_lr),
        constraint=space.constraint(),
        iterations=iterations,
        # solve keeps the best when it is told to be patient.
        patience=(patience or iterations + 1) if one_function else None,
        callbacks=[path, *([callbacks] if callable(callbacks) else callbacks)],
        progress=progress,
    )
    if solution.inner is None:
        raise _diverged(solution.outcome) if solution.outcome.kind == "diverged" else BilevelError(solution.outcome)
    inner, value = (solution.inner, solution.value) if one_function else job.run(solution.outer)
    return Tuned(
        model=job.trained(inner),
        values=space.plain(solution.outer),
        before=space.plain(space.lam),
        value=value,
        start_value=float(solution.history["value"][0]) if one_function and iterations else job.run(space.lam)[1],
        history={**solution.history, "values": path.arrays()},
        outcome=_advice(solution.outcome),
        method=reason,
        lam=solution.outer,
        space=space,
        ask_gap=functools.partial(job.gap, solution.outer, inner),
    )


class _Path:
    """The values of the hyperparameters at every hyperiteration, where there are not too many."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._names = [one.name for one in space.declared if trees.size(space.lam[one.name]) <= REMEMBERED]
        self._seen: list[dict[str, Any]] = []

    def __call__(self, iteration: Iteration) -> None:
        with torch.no_grad():
            values = self._space.values(iteration.lam)
        self._seen.append({n: as_array(trees.to_vector(trees.leaves(values[n]))).copy() for n in self._names})

    def arrays(self) -> dict[str, Any]:
        """Arrays of shape (hyperiterations, entries); (hyperiterations,) for single numbers."""
        found = {name: np.stack([seen[name] for seen in self._seen]) for name in self._names if self._seen}
        return {name: x[:, 0] if x.shape[1] == 1 else x for name, x in found.items()}


class _Source:
    """The task of hyperiteration k: with `batches="new"` other training batches, with `validation="minibatch"` the k-th
    batch of validation data."""

    def __init__(self, job: Prepared, val: Any, batches: str, validation: str, iterations: int) -> None:
        self._job, self._new, self._replay = job, batches == "new", None
        if validation == "minibatch":
            if not isinstance(val, torch.utils.data.DataLoader):
                raise BilevelError(
                    f"validation='minibatch' needs a DataLoader for val, but it is {type(val).__name__}. Pass one, or "
                    "validation='whole'."
                )
            # Another seed than that of training: the two loaders may read one data set.
            self._replay = Replay(val, mixed(job.seed, "validation", 0), job.network.like, max(iterations, 1), "val")

    def __call__(self, k: int) -> Task:
        job = self._job
        training = job.training(mixed(job.seed, "run", k)) if self._new else job.task.train
        return Task(training, job.task.val if self._replay is None else self._replay(k + 1))


def _adam(space: Space, lr: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """Adam that moves every leaf in its own unit."""

    def build(leaves: list[Tensor]) -> torch.optim.Optimizer:
        units = space.units()
        return torch.optim.Adam([{"params": [x], "lr": lr * u} for x, u in zip(leaves, units, strict=True)])

    return build


def _check_settings(iterations: Any, outer_lr: Any, batches: Any, validation: Any, patience: Any) -> None:
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
        raise BilevelError(f"iterations={iterations!r} is not a number of hyperiterations; pass an int ≥ 0.")
    if not (isinstance(outer_lr, (int, float)) and outer_lr > 0):
        raise BilevelError(f"outer_lr={outer_lr!r} is not a step size; pass a number > 0, 0.1 say.")
    if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
        raise BilevelError(
            f"patience={patience!r} is not a number of hyperiterations to wait; pass an int ≥ 1 or None."
        )
    if batches not in ("same", "new"):
        raise BilevelError(f"batches={batches!r} is not known; pass 'same' or 'new'.")
    if validation not in ("whole", "minibatch"):
        raise BilevelError(f"validation={validation!r} is not known; pass 'whole' or 'minibatch'.")


def _diverged(outcome: Outcome) -> DivergenceError:
    return DivergenceError(
        f"Training did not survive the hyperparameters that it began with, so there is nothing to tune from. {outcome} "
        "Begin with a smaller learning rate, or fewer steps."
    )


def _advice(outcome: Outcome) -> Outcome:
    if outcome.kind != "diverged":
        return outcome
    return Outcome(
        "diverged",
        f"{outcome} What is returned is the best before that. A narrower range of the learning rate, or a smaller "
        "outer_lr, keeps training from diverging.",
    )
