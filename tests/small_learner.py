"""A learner that is small enough for float64 and finite differences, and episodes for it."""

import torch
from torch import nn

import bilevel as bl
from bilevel.models import omniglot_net

WAYS, SHAPE = 3, (1, 12, 12)


def network(seed=0):
    torch.manual_seed(seed)
    return omniglot_net.build(channels=1, filters=4)


def torch_network(seed=0):
    """The same with torch's own batch norm, which has a scale too."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.Flatten()
    )


def episodes(count=3, shots=2, queries=4, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def pictures(each):
        images = torch.rand(count, WAYS * each, *SHAPE, generator=generator)
        return images, torch.arange(WAYS).repeat_interleave(each).expand(count, -1).clone()

    return bl.Task(pictures(shots), pictures(queries))


def one(batch, i):
    return bl.Task(tuple(x[i] for x in batch.train), tuple(x[i] for x in batch.val))


def learner(module=None, **settings):
    return bl.HyperRepresentation(module or network(), SHAPE, **{"steps": 4, "inner_lr": 0.3, **settings})
