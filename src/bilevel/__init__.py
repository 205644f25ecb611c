"""Gradient-based hyperparameter optimisation and meta-learning as one bilevel problem.

Franceschi, Frasconi, Salzo, Grazzi and Pontil, "Bilevel Programming for Hyperparameter Optimization and Meta-Learning",
ICML 2018.
"""

import lazy_loader

__version__ = "0.2.0"

# The names are listed in __init__.pyi, and imported when first used: the command line starts without torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
