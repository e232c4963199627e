"""lay_out, imported for the tests of kernels."""

from engine.evaluation.paged import lay_out

__all__ = ["lay_out"]
