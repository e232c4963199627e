"""lay_out, where the tests of kernels look for it."""

from engine.evaluation.paged import lay_out

__all__ = ["lay_out"]
