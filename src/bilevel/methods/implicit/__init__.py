"""Implicit differentiation: ∇f from one linear system at the inner solution."""

from bilevel.methods.implicit.method import Implicit

__all__ = ["Implicit"]
