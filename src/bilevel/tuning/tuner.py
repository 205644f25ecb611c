"""`tune`: from a torch model and its loaders to tuned hyperparameters."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bilevel import trees
from bilevel.engine.method import Method
from bilevel.errors import BilevelError, DivergenceError, Outcome
from bilevel.outer_loop import Iteration, solve
from bilevel.problem import Task
from bilevel.tuning.batches import Batch, ReplayedLoader
from bilevel.tuning.gap import find_gap
from bilevel.tuning.holdout import evaluate_held_out, split_validation
from bilevel.tuning.network import Network
from bilevel.tuning.random_search import search_for_comparison
from bilevel.tuning.randomness import derived_seed
from bilevel.tuning.result import Tuned
from bilevel.tuning.roles.base import Hyperparameter
from bilevel.tuning.space import Space, as_array
from bilevel.tuning.train_and_val import compare_data
from bilevel.tuning.training_problem import TrainingProblem, prepare

# The history keeps hyperparameters with at most this many entries.
LARGEST_HISTORY = 1000


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
    dynamics: Any = None,
    lr: float | None = None,
    momentum: float | None = None,
    method: Method | Literal["auto"] = "auto",
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | type[torch.optim.Optimizer] | None = None,
    outer_lr: float = 0.1,
    batches: Literal["same", "new"] = "same",
    validation: Literal["whole", "minibatch"] = "whole",
    holdout: float | None = None,
    runs: int = 1,
    patience: int | None = None,
    callbacks: Sequence[Callable[[Iteration], bool | None]] = (),
    seed: int = 0,
    progress: bool | None = None,
    check_derivatives: bool = True,
) -> Tuned:
    """Tune the hyperparameters of any torch model by gradient: min over λ of val_loss(w_T), T training steps from w_0.

    Every hyperiteration trains the model for `steps` steps, differentiates the validation loss with respect to all
    hyperparameters through that training, and updates them. The cost hardly depends on their number: a weight per
    example or a decay per weight costs little more than one number.

    The model, the loaders and the global random generators are not changed. Training is replayed, so
    all random numbers (the order of the examples, random transforms in the data set, dropout) are a function of `seed`
    and the step number. Training is in train mode. Validation is in eval mode, except that batch norm uses the
    statistics of the validation batch, because its running averages are not a function of the weights. The running
    averages of `result.model` are computed at the end, in one pass over the training batches.

    Args:
        model: any module. Its parameters that require grad are trained, from their current values.
        loss: `loss(output, target)`, or `loss(output, target, hp)` with the values of all hyperparameters by name. One
            number, or one per example. A dict of losses is mixed by `LossWeights`.
        hyperparameters: one or a list: `WeightDecay`, `LearningRate`, `Momentum`, `LossWeights`, `LabelSmoothing`,
            `Augmentation`, `ExampleWeights`, `ExampleWeight`, `Initialisation`, or a plain `Hyperparameter` for a loss
            with three arguments. They are in `bilevel.tuning`.
        train: a `DataLoader` over a map-style data set, such a data set, or a pair (inputs, targets) of tensors, numpy
            arrays or DataFrames. A data set and a pair are one batch, which every step uses.
        val: the same, with other examples. All examples that a loader's sampler shows are used.
        val_loss: the loss to minimise on `val`; `loss` by default. It must be passed if `loss` takes hyperparameters or
            is a dict, because hyperparameters could make such a loss small without a better model.
        steps: T, the number of training steps in a hyperiteration.
        iterations: the number of hyperiterations.
        dynamics: how the model is trained (the inner level): "sgd" (the default), "adam" or another dynamics by its
            name in lower case; an instance, whose settings are used unless they are declared as hyperparameters; a
            class of `torch.optim`; a function of the hyperparameters' values by name; or a function
            `step(loss, w, state, t)`.
        lr: the learning rate of the training, for a dynamics given by name or class. The default is 0.1 for SGD, and
            the default of the dynamics otherwise. To tune it, declare `LearningRate(start)`.
        momentum: the momentum, likewise. The default for SGD is 0.
        method: how to differentiate. "auto" chooses by the sizes and the memory, and `result.method` says why.
        optimizer: how the hyperparameters are updated (the outer level): a function that builds an optimiser from the
            leaves of λ. The default is Adam with `outer_lr`. A class of `torch.optim` is accepted if `dynamics` is
            passed too, and uses `outer_lr`.
        outer_lr: the size of an update of a hyperparameter, in the unit of its transform: 0.1 is ten per cent on a
            logarithmic scale, and a hundredth of the range without a transform.
        batches: "same" replays one sequence of batches, dropout masks and noise in every hyperiteration. "new" draws
            a new one for each. Hyperparameters, above all schedules, can overfit one sequence.
        validation: "whole" evaluates the validation loss on all of `val`. "minibatch" takes one batch of the loader
            `val` per hyperiteration.
        holdout: the fraction of `val` that is not used for tuning. `result.held_out` has the losses there: of the tuned
            model, of the start values, and of a model trained on the rest of `val` alone. `result.value` itself is
            optimistic, because the hyperparameters were tuned for it.
        runs: the number of trainings in every hyperiteration, each with its own order of examples, masks and noise. The
            mean of their validation losses is minimised, so that hyperparameters overfit one sequence of random numbers
            less. Under torchrun, the processes share the trainings. `result.model` is that of the first training.
        patience: stop when the validation loss has not improved for this many hyperiterations. It needs the same data
            in all hyperiterations.
        callbacks: functions that are called with a `bilevel.outer_loop.Iteration` before every update. The tuning stops
            if one of them returns True.
        seed: the seed of all random numbers.
        progress: whether to show a progress bar. None shows one on a terminal, and a line a minute elsewhere.
        check_derivatives: whether to refuse a model or a loss whose derivatives differ from autograd's, as `Problem`
            does. False is for straight-through estimators, for example of quantisation.

    With the same data in every hyperiteration (the default), f_T is one function, and the best hyperparameters are
    returned. With batches="new" or validation="minibatch", the last ones are returned, trained and evaluated on the
    data of `seed`.

    Returns:
        Tuned: the trained model, the values and the history. `print` it, or call `.plot()` or `.save(folder)`.

    Raises:
        BilevelError: an argument cannot work.
        DivergenceError: training diverged with the hyperparameters before tuning.

    >>> import bilevel as bl
    >>> from bilevel.tuning import ExampleWeights, LearningRate, WeightDecay
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from sklearn.datasets import load_digits
    >>> x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    >>> train = DataLoader(TensorDataset(x[:500] / 16, y[:500]), batch_size=100, shuffle=True)
    >>> result = bl.tune(
    ...     model, torch.nn.functional.cross_entropy, [LearningRate(0.1, per="step"), WeightDecay(per="layer"),
    ...     ExampleWeights()], train, val=(x[500:1000] / 16, y[500:1000]), steps=20, iterations=10,
    ... )
    >>> result.value < result.start_value, sorted(result.values), result.values["lr"].shape, result.outcome.kind
    (True, ['example_weights', 'lr', 'weight_decay'], (20,), 'finished')
    """
    _check_settings(iterations, outer_lr, batches, validation, patience, runs)
    _refuse_ambiguous(optimizer, dynamics)
    prepared = functools.partial(
        prepare,
        model,
        loss,
        hyperparameters,
        val_loss=val_loss,
        steps=steps,
        dynamics=dynamics,
        check_derivatives=check_derivatives,
        lr=lr,
        momentum=momentum,
        seed=seed,
    )
    held_out = None
    if holdout is not None:
        if validation != "whole":
            raise BilevelError("holdout= splits the whole validation set. Pass validation='whole' with it.")
        compare_data(train, val, seed)
        val, held_out = split_validation(val, holdout, Network(model).like, seed)
    job = prepared(train, val)
    space = job.space
    # If every hyperiteration sees the same data, f_T is one function, and the best λ is returned.
    one_function = batches == "same" and validation == "whole"
    tasks = (
        _trainings(job, runs) if one_function else _tasks_by_iteration(job, val, batches, validation, iterations, runs)
    )
    chosen, reason = job.choose(method)
    path = _ValuePath(space)
    started = time.perf_counter()
    solution = solve(
        job.problem,
        space.lam,
        tasks,
        dynamics=job.dynamics,
        steps=steps,
        method=chosen,
        optimizer=_outer_optimizer(optimizer, space, outer_lr),
        constraint=space.constraint(),
        iterations=iterations,
        # With a patience, `solve` returns the best λ instead of the last one.
        patience=(patience or iterations + 1) if one_function else None,
        callbacks=[path, *([callbacks] if callable(callbacks) else callbacks)],
        progress=progress,
    )
    seconds = time.perf_counter() - started
    outcome = _with_advice(solution.outcome, solution.inner is not None)
    if solution.inner is None:
        raise BilevelError(outcome)
    first = solution.inner if runs == 1 else solution.inner[0]
    inner, value = (first, solution.value) if one_function else job.run(solution.outer)
    estimate = held_out and evaluate_held_out(job, solution.outer, inner, held_out, functools.partial(prepared, val))
    return Tuned(
        model=job.trained(inner),
        values=space.plain(solution.outer),
        before=space.plain(space.lam),
        value=value,
        start_value=float(solution.history["value"][0]) if one_function and iterations else job.run(space.lam)[1],
        history={**solution.history, "values": path.arrays()},
        outcome=outcome,
        method=reason,
        lam=solution.outer,
        space=space,
        compute_gap=functools.partial(find_gap, job, solution.outer, inner),
        compute_weights=functools.partial(job.weights, solution.outer, inner),
        compute_search=functools.partial(search_for_comparison, job, seconds, value, held_out, estimate),
        held_out=estimate,
    )


class _ValuePath:
    """A callback that records the values of hyperparameters with few entries at every hyperiteration."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._values: dict[str, list[Any]] = {
            name: [] for name, leaf in space.lam.items() if trees.size(leaf) <= LARGEST_HISTORY
        }

    def __call__(self, iteration: Iteration) -> None:
        with torch.no_grad():
            values = self._space.values(iteration.lam)
        for name, recorded in self._values.items():
            recorded.append(as_array(trees.to_vector(trees.leaves(values[name]))).copy())

    def arrays(self) -> dict[str, Any]:
        """Arrays of shape (hyperiterations, entries); (hyperiterations,) for single numbers."""
        stacked = {name: np.stack(values) for name, values in self._values.items() if values}
        return {name: x[:, 0] if x.shape[1] == 1 else x for name, x in stacked.items()}


def _trainings(job: TrainingProblem, runs: int) -> Task | list[Task]:
    """The tasks of a hyperiteration: one for each training."""
    if runs == 1:
        return job.task
    if isinstance(job.data, Batch) and not job.random:
        raise BilevelError(
            f"runs={runs} trainings would all be the same: every step uses all of train, and nothing in the training "
            "is random. Pass a DataLoader with shuffle=True as train, or leave runs out."
        )
    return [Task(job.training(seed), job.val) for seed in _seeds(job.seed, runs)]


def _seeds(seed: int, runs: int) -> list[int]:
    return [seed, *(derived_seed(seed, "training", i) for i in range(1, runs))]


def _tasks_by_iteration(
    job: TrainingProblem, val: Any, batches: str, validation: str, iterations: int, runs: int
) -> Callable[[int], Task | list[Task]]:
    """The tasks of hyperiteration k: new training batches with batches="new", and the k-th validation batch with
    validation="minibatch"."""
    replayed = None
    if validation == "minibatch":
        if not isinstance(val, torch.utils.data.DataLoader):
            raise BilevelError(
                f"validation='minibatch' needs a DataLoader for val, but it is {type(val).__name__}. Pass one, or "
                "validation='whole'."
            )
        # Not the seed of the training, because the two loaders may read the same data set.
        seed = derived_seed(job.seed, "validation", 0)
        replayed = ReplayedLoader(val, seed, job.network.like, max(iterations, 1), "val")

    def tasks(k: int) -> Task | list[Task]:
        seed, val_batch = job.seed, job.val if replayed is None else replayed(k + 1)
        if batches == "new":
            seed = derived_seed(job.seed, "run", k)
        tasks_of_runs = [Task(job.training(run_seed), val_batch) for run_seed in _seeds(seed, runs)]
        return tasks_of_runs if runs > 1 else tasks_of_runs[0]

    return tasks


def _outer_optimizer(given: Any, space: Space, lr: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """The given function, or one that builds the given class (Adam by default) with a step size per leaf of λ."""
    if given is not None and not isinstance(given, type):
        return given
    kind = given or torch.optim.Adam

    def build(leaves: list[Tensor]) -> torch.optim.Optimizer:
        return kind([{"params": [x], "lr": lr * unit} for x, unit in zip(leaves, space.units(), strict=True)])

    return build


def _refuse_ambiguous(optimizer: Any, dynamics: Any) -> None:
    """Refuse a class if it is not clear whether it should train the model or update the hyperparameters."""
    if isinstance(optimizer, type) and dynamics is None:
        name = optimizer.__name__
        raise BilevelError(
            f"optimizer={name} could mean two things. To train the model with it (the inner level), write "
            f"dynamics=torch.optim.{name}. To update the hyperparameters with it (the outer level), write "
            f"optimizer=lambda leaves: torch.optim.{name}(leaves, lr=0.1), or pass dynamics= as well."
        )


def _check_settings(iterations: Any, outer_lr: Any, batches: Any, validation: Any, patience: Any, runs: Any) -> None:
    for name, number, least, what in (
        ("runs", runs, 1, "trainings"),
        ("iterations", iterations, 0, "hyperiterations"),
        ("patience", 1 if patience is None else patience, 1, "hyperiterations to wait"),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise BilevelError(f"{name}={number!r} is not a number of {what}. Pass an int ≥ {least}.")
    if not (isinstance(outer_lr, (int, float)) and outer_lr > 0):
        raise BilevelError(f"outer_lr={outer_lr!r} is not a step size. Pass a number > 0, for example 0.1.")
    if batches not in ("same", "new"):
        raise BilevelError(f"batches={batches!r} is not possible. Pass 'same' or 'new'.")
    if validation not in ("whole", "minibatch"):
        raise BilevelError(f"validation={validation!r} is not possible. Pass 'whole' or 'minibatch'.")


def _with_advice(outcome: Outcome, solved: bool) -> Outcome:
    """The outcome, with advice if it is a divergence."""
    if outcome.kind != "diverged":
        return outcome
    if not solved:
        raise DivergenceError(
            f"Training diverged with the hyperparameters before tuning, so there is nothing to tune from. {outcome} "
            "Begin with a smaller learning rate, or fewer steps."
        )
    return Outcome(
        "diverged",
        f"{outcome} The result is the best before the divergence. A narrower range of the learning rate, or a smaller "
        "outer_lr, keeps training from diverging.",
    )
