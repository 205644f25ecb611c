"""The problems that are timed.

All except the hyper-representation are in float64, so that the hypergradients of all contestants can be compared
tightly.
"""

from __future__ import annotations

import os

import numpy as np

from harness.contract import Case

# The meta-batch of the hyper-representation: 5-way 1-shot with 15 queries per class.
EPISODES, WAYS, SHOTS, QUERIES = 16, 5, 1, 15


def ridge(steps: int) -> Case:
    """Appendix C of the paper: 30 training points, 30 features of which 5 are informative, and the logarithm of an L2
    coefficient for each feature."""
    rng = np.random.default_rng(0)
    truth = np.zeros(30)
    truth[:5] = rng.normal(size=5)
    inputs = rng.normal(size=(60, 30))
    targets = inputs @ truth + 0.1 * rng.normal(size=60)
    lam = rng.normal(size=30) * 0.5
    curvature = 2 * np.linalg.eigvalsh(inputs[:30].T @ inputs[:30] + np.diag(np.exp(lam)))[-1]
    train, val = [inputs[:30], targets[:30]], [inputs[30:], targets[30:]]
    return Case(f"ridge-T{steps}", "ridge", [lam], [np.zeros(30)], train, val, 1 / curvature, steps)


def network(steps: int, *, per_weight: bool = True) -> Case:
    """A 100 → 64 → 10 tanh network on a batch of 128. λ has the logarithm of an L2 coefficient for each weight, or for
    each of the two layers."""
    rng = np.random.default_rng(1)
    shapes = [(64, 100), (64,), (10, 64), (10,)]
    start = [rng.normal(size=shape) / np.sqrt(shape[-1]) if len(shape) > 1 else np.zeros(shape) for shape in shapes]
    centres = rng.normal(size=(10, 100))
    labels = rng.integers(10, size=256)
    inputs = centres[labels] + 2 * rng.normal(size=(256, 100))
    lam = [np.full(shape if per_weight else (), -6.0) for shape in (shapes[0], shapes[2])]
    train, val = [inputs[:128], labels[:128]], [inputs[128:], labels[128:]]
    return Case(f"network-T{steps}" + ("" if per_weight else "-layers"), "network", lam, start, train, val, 0.05, steps)


def shared_ridge(groups: int, steps: int) -> Case:
    """A ridge problem whose w always has 4096 numbers, penalised by 1, 8, 64 or 512 coefficients that broadcast over
    it.

    Only the size of λ differs between these cases, so they show how the time depends on it.
    """
    shape = {1: (1, 1, 1), 8: (8, 1, 1), 64: (8, 8, 1), 512: (8, 1, 64)}[groups]
    rng = np.random.default_rng(2)
    inputs, targets = rng.normal(size=(8, 32, 8)), rng.normal(size=(8, 32, 64))
    train, val = [inputs[:, :16], targets[:, :16]], [inputs[:, 16:], targets[:, 16:]]
    return Case(
        f"shared-ridge-{groups}",
        "ridge",
        [rng.normal(size=shape) * 0.1],
        [np.zeros((8, 8, 64))],
        train,
        val,
        0.01,
        steps,
    )


def dataset() -> str:
    """Omniglot if it can be loaded from BILEVEL_DATA, and otherwise the package's own glyphs."""
    from bilevel.data import load

    if os.environ.get("BILEVEL_DATA"):
        try:
            load("omniglot")
            return "omniglot"
        except Exception as reason:
            print(f"Omniglot cannot be loaded, glyphs are used instead: {reason}")
    return "glyphs"


def hyper(
    steps: int,
    episodes: int = EPISODES,
    *,
    ways: int = WAYS,
    shots: int = SHOTS,
    network: str = "omniglot-net",
    threads: int = 1,
    name: str = "hyper",
) -> Case:
    """The paper's hyper-representation: a network learned over a meta-batch of episodes.

    It is in float32, as in a training. The step size is small, so that rounding errors do not grow over the steps.
    """
    from bilevel.learners.catalogue.hyper_representation import HyperRepresentation

    train, val = _pictures(network, episodes, ways, shots)
    learner = HyperRepresentation(network, train[0].shape[2:])
    lam = [value.numpy() for value in learner.lam.values()]
    start = [np.zeros((episodes, learner.features, ways))]
    return Case(f"{name}-T{steps}", "hyper", lam, start, train, val, 0.01, steps, network, threads)


def _pictures(network: str, episodes: int, ways: int, shots: int) -> list[list[np.ndarray]]:
    """The support sets and the query sets of the episodes, each as [images, labels]."""
    import bilevel as bl
    from bilevel.data import load

    if network == "omniglot-net":
        drawn = bl.Episodes(load(dataset()), "train", ways, shots, QUERIES, rotations=True).batch(range(episodes))
        return [[x.numpy() for x in part] for part in (drawn.train, drawn.val)]
    # The content of a photograph does not change the time, so these are random numbers.
    rng = np.random.default_rng(3)
    shapes = {each: (episodes, ways * each, 3, 84, 84) for each in (shots, QUERIES)}
    labels = {each: np.tile(np.repeat(np.arange(ways), each), (episodes, 1)) for each in shapes}
    return [[rng.random(shapes[each], dtype=np.float32), labels[each]] for each in (shots, QUERIES)]
