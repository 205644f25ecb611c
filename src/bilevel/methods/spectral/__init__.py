"""Quadratic inner objectives: w_T and ∇f_T from the spectrum of the Hessian, at a cost that does not depend on T."""

from bilevel.methods.spectral.method import Spectral

__all__ = ["Spectral"]
