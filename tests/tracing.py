"""What stands in for compiling where only the tracing matters."""

from torch.fx.experimental.proxy_tensor import make_fx

from bilevel.engine.kernels import Kernel


def traced(function, inputs):
    """As `compile_function`, without a C++ compiler: it fixes the same, in a hundredth of the time."""
    graph = make_fx(function)(*(x.detach().clone() for x in inputs))
    return Kernel(lambda args: graph(*args))
