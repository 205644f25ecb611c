"""What the search draws: small problems, dynamics and methods that a user might combine, sound and unsound."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import bilevel as bl
from bilevel import trees


@dataclass(frozen=True)
class Case:
    """A problem, a dynamics and a method, by the names of their parts; printed, it is a report of what went wrong."""

    method: str
    dynamics: str
    loss: str
    penalty: str
    outer: str
    start: str
    batches: str
    learned: str
    hazard: str
    tree: str
    single: bool
    size: int
    rows: int
    steps: int
    lr: float
    momentum: float
    seed: int


EXACT = {
    "Reverse": bl.Reverse(),
    "Reverse, step by step": bl.Reverse(group_bytes=0),
    "Reverse, checkpoints": bl.Reverse("sqrt", group_bytes=0),
    "Unrolled": bl.Unrolled(),
    "Forward": bl.Forward(),
    "Forward, in chunks": bl.Forward(chunk=2),
    "Spectral": bl.Spectral(),
    "Reversible": bl.Reversible(),
    "Truncated, all steps": bl.Truncated(100),
    "auto": "auto",
    "objective": bl.Reverse(),
}
IMPLICIT = {
    "Implicit": bl.Implicit(),
    "Implicit, Newton": bl.Implicit(bl.CG(tol=1e-12), newton=1e-11),
    "Implicit, Direct": bl.Implicit(bl.Direct()),
    "Implicit, fixed point": bl.Implicit(condition="fixed-point"),
    "Implicit, fixed point, Direct": bl.Implicit(bl.Direct(), condition="fixed-point"),
}
METHODS = {**EXACT, **IMPLICIT, "FirstOrder": bl.FirstOrder()}

LOSSES = {
    "squares": lambda m, y, v: 0.5 * ((m - y) ** 2).mean(),
    "log cosh": lambda m, y, v: torch.log(torch.cosh(m - y)).mean(),
    "logistic": lambda m, y, v: F.softplus(-y.sign() * m).mean(),
    "squared hinge": lambda m, y, v: 0.5 * (torch.relu(1 - y.sign() * m) ** 2).mean(),
    "soft bounds": lambda m, y, v: 0.5 * ((m - y) ** 2).mean() + 2 * (torch.relu(v.abs() - 0.2) ** 2).sum(),
    "a hill": lambda m, y, v: 0.5 * ((m - y) ** 2).mean() + torch.relu(0.1 - (v - 0.1).abs()).square().sum(),
    "Huber": lambda m, y, v: F.huber_loss(m, y, delta=0.5),
    "dead zone": lambda m, y, v: 0.5 * (torch.relu((m - y).abs() - 0.3) ** 2).mean(),
    "quartic": lambda m, y, v: 0.1 * ((m - y) ** 4).mean(),
    "absolute": lambda m, y, v: (m - y).abs().mean(),
    "hinge": lambda m, y, v: torch.relu(1 - y.sign() * m).mean(),
    "a unit": lambda m, y, v: 0.5 * ((torch.tanh(m) - y) ** 2).mean(),
    "a rectified unit": lambda m, y, v: 0.5 * ((torch.relu(m + 0.1) - y) ** 2).mean(),
    "the nearer of two": lambda m, y, v: 0.5 * torch.minimum((m - y) ** 2, (m + 1) ** 2 + 0.1).mean(),
    "norm": lambda m, y, v: 0.5 * torch.linalg.vector_norm(m - y) ** 2 / len(y),
}
OUTERS = {
    "squares": lambda m, y: ((m - y) ** 2).mean(),
    "absolute": lambda m, y: (m - y).abs().mean(),
    "logistic": lambda m, y: F.softplus(-y.sign() * m).mean(),
    "largest": lambda m, y: ((m - y) ** 2).max(),
}
PENALTIES = ["one", "per weight", "none", "smooth l1", "example weights", "targets"]
OWN = ["GradientDescent", "HeavyBall", "Nesterov", "Adam", "AdamW", "RMSProp"]
OTHERS = [
    "schedule", "ISTA", "FISTA", "SGD", "SGD with decay", "torch's AdamW", "Adagrad", "a projection", "clipping",
    "decay", "a mirror map", "signs",
]  # fmt: skip
HAZARDS = ["λ in a closure", "λ in the dynamics' closure", "another tensor", "random noise", "no second derivative"]


def cases() -> st.SearchStrategy[Case]:
    pick = st.sampled_from
    return st.builds(
        Case,
        method=pick(list(METHODS)),
        dynamics=pick(OWN + OTHERS),
        loss=pick(list(LOSSES)),
        penalty=pick(PENALTIES),
        outer=pick(list(OUTERS)),
        start=pick(["zeros", "constant", "learned"]),
        batches=pick(["all", "all", "all", "minibatches"]),
        learned=pick(["", "", "lr", "momentum"]),
        hazard=pick([""] * 10 + HAZARDS),
        tree=pick(["tensor", "dict", "nested"]),
        single=pick([False, False, False, True]),
        size=st.integers(1, 4),
        rows=st.integers(3, 6),
        steps=pick([1, 2, 3, 5, 8, 13, 25, 40]),
        lr=pick([0.1, 0.05, 0.3]),
        momentum=pick([0.5, 0.9]),
        seed=st.integers(0, 10**6),
    )


class _Square(torch.autograd.Function):
    """w², whose second derivative is hidden from autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


class Built:
    """The objects of a case, in a precision; `build(lam)` makes a problem whose closures, if any, read that λ."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        generator = torch.Generator().manual_seed(case.seed)
        normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
        n, rows = case.size, case.rows
        self.train, self.val = (0.7 * normal(rows, n), normal(rows)), (normal(rows, n), normal(rows))
        self.constant, self.other = 0.4 * normal(n), (1 + 0.1 * normal(n)).requires_grad_()
        learned = {
            "one": {"penalty": 0.3 * normal() - 1},
            "per weight": {"penalty": 0.3 * normal(n) - 1},
            "smooth l1": {"penalty": 0.3 * normal() - 2},
            "example weights": {"penalty": 0.5 * normal(rows)},
            "targets": {"penalty": 0.5 * normal(rows)},
            "none": {},
        }[case.penalty]
        if case.start == "learned":
            learned["start"] = 0.4 * normal(n)
        if case.learned and case.dynamics in OWN:
            value = case.lr if case.learned == "lr" or case.dynamics not in ("HeavyBall", "Nesterov") else case.momentum
            learned["setting"] = torch.tensor(value, dtype=dtype)
        if not learned or case.outer == "largest":
            learned["outer"] = 0.3 * normal(2)
        self.lam = (learned,) if case.tree == "nested" else learned

    def named(self, lam):
        return lam[0] if self.case.tree == "nested" else lam

    def pack(self, v):
        if self.case.tree == "tensor":
            return v
        return {"b": v[:1], "a": v[1:]} if self.case.tree == "dict" else ([v[:1]], {"c": (v[1:],)})

    def vector(self, w):
        if self.case.tree == "tensor":
            return w
        return torch.cat([w["b"], w["a"]] if self.case.tree == "dict" else [w[0][0], w[1]["c"][0]])

    def build(self, lam):
        """Problem, task and dynamics; `lam` is what closures read."""
        case, outside = self.case, self.named(lam)

        def inner(w, lam, batch):
            v, lam = self.vector(w), self.named(lam)
            x, y, *at = batch
            if case.hazard == "λ in a closure":
                lam = {**lam, **{key: outside[key] for key in lam if key == "penalty"}}
            if case.hazard == "random noise":
                x = x + 0.1 * torch.randn_like(x)
            if case.hazard == "another tensor":
                x = x * self.other
            margins, penalty = x @ v, lam.get("penalty")
            if case.penalty == "targets":
                return LOSSES[case.loss](margins, y + penalty[at[0]], v) + self.decay(v)
            if case.penalty == "example weights":
                parts = [LOSSES[case.loss](margins[[i]], y[[i]], v) for i in range(len(y))]
                return (torch.softmax(penalty, 0)[at[0]] * torch.stack(parts)).sum() + self.decay(v)
            loss = LOSSES[case.loss](margins, y, v)
            if case.penalty == "none":
                return loss + self.decay(v)
            if case.penalty == "smooth l1":
                return loss + penalty.exp() * (v**2 + 0.01).sqrt().sum()
            return loss + 0.5 * (penalty.exp() * v**2).sum()

        def outer(w, lam, batch):
            v, lam = self.vector(w), self.named(lam)
            value = OUTERS[case.outer](batch[0] @ v, batch[1])
            return (
                value + (lam["outer"].exp() * torch.stack([v.sum(), v.square().sum()])).sum()
                if "outer" in lam
                else value
            )

        def init(lam):
            lam = self.named(lam)
            if case.start == "learned":
                return self.pack(lam["start"])
            v = self.constant if case.start == "constant" else torch.zeros_like(self.constant)
            return self.pack(v.abs() + 0.1 if case.dynamics == "a mirror map" else v)

        train = (*self.train, torch.arange(case.rows))
        sampler = bl.Minibatches(train, size=2, seed=case.seed % 97) if case.batches == "minibatches" else train
        return bl.Problem(inner, outer, init), bl.Task(sampler, self.val), self.dynamics(outside)

    def decay(self, v):
        if self.case.hazard == "no second derivative":
            return 0.2 * _Square.apply(v).sum()
        return 0.2 * (v**2).sum()

    def dynamics(self, outside):
        """A dynamics, or a function of λ that returns one."""
        case = self.case
        if "setting" not in self.named(self.lam):
            return self.with_setting(case.lr, case.momentum)

        def of(lam):
            given = outside if case.hazard == "λ in the dynamics' closure" else self.named(lam)
            moved = case.learned == "momentum" and case.dynamics in ("HeavyBall", "Nesterov")
            return self.with_setting(case.lr, given["setting"]) if moved else self.with_setting(given["setting"], 0.5)

        return of

    def with_setting(self, lr, momentum):
        name = self.case.dynamics
        if name in ("HeavyBall", "Nesterov"):
            return getattr(bl, name)(lr, momentum)
        if name in ("AdamW",):
            return bl.AdamW(lr, weight_decay=0.3)
        if name in OWN:
            return getattr(bl, name)(lr)
        optim = torch.optim
        return {
            "schedule": lambda: bl.HeavyBall(lambda t: lr / t**0.5, lambda t: 0.5 / t),
            "ISTA": lambda: bl.ISTA(lr, bl.L1(0.05)),
            "FISTA": lambda: bl.FISTA(lr, bl.L1(0.05)),
            "SGD": lambda: bl.TorchOptim(optim.SGD, lr=lr, momentum=momentum),
            "SGD with decay": lambda: bl.TorchOptim(optim.SGD, lr=lr, weight_decay=0.3),
            "torch's AdamW": lambda: bl.TorchOptim(optim.AdamW, lr=lr, weight_decay=0.3),
            "Adagrad": lambda: bl.TorchOptim(optim.Adagrad, lr=lr),
            "a projection": lambda: _step(lambda v, g: (v - lr * g).clamp(-0.3, 0.3)),
            "clipping": lambda: _step(lambda v, g: v - lr * g.clamp(-0.2, 0.2)),
            "decay": lambda: _step(lambda v, g: v - lr * (g + 0.5 * v)),
            "a mirror map": lambda: _step(lambda v, g: v * torch.exp(-lr * g)),
            "signs": lambda: _step(lambda v, g: v - 0.1 * lr * g.sign()),
        }[name]()


def _step(move):
    return lambda loss, w, state, t: (trees.map(move, w, bl.gradient(loss, w)), state)
