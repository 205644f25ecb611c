"""Inner objectives that say what they are, so that a method written for their structure can be used.

A structure is called like any other inner objective, `inner(w, lam, batch)`; every method works on it. Methods that
know it, such as `DualDescent` on `LinearClassifiers`, find it in `problem.inner`. Writing the same objective as a
function of your own gives the same numbers and only costs speed.
"""

from __future__ import annotations

from bilevel.structures.linear_classifiers import LinearClassifiers

__all__ = ["LinearClassifiers"]
