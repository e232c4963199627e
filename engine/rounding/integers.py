"""Rounds matrices to 4-bit integers with a scale and a zero point for each group of inputs.

`searched` minimises the squared error of each group. `fed_back` also compensates the error of each
column in the columns that are not rounded yet, as GPTQ does (Frantar et al. 2022), and then
improves codes and scales alternately, by coordinate descent.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TOP = 15  # the largest code
_LEAST = 6e-8  # the smallest positive float16, the scale of groups of zeros
# Shares of a group's range that are tried, as clipping outliers makes the steps finer.
_SHARES = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
_REFITS = 3  # how often scales are fitted again to their codes
_PASSES = 4  # number of passes of coordinate descent; further ones change little
_STEP = 4 << 20  # number of weights that are searched at once, with some float32 temporaries each
_DAMPING = 0.01  # share of the mean diagonal that is added to the Hessian's diagonal
_RIDGE = 0.05  # the same for matrices that compensate for errors of earlier matrices


class Codes(NamedTuple):
    """A 4-bit matrix, whose weights are scale * (code - zero).

    codes: uint8 [out, in].
    scale: float16 [out, groups].
    zeros: uint8 [out, groups].
    """

    codes: Tensor
    scale: Tensor
    zeros: Tensor

    def dense(self) -> Tensor:
        """Dequantise the codes to float32 [out, in]."""
        groups = self.codes.unflatten(1, (self.scale.shape[1], -1)).float()
        groups = (groups - self.zeros.unsqueeze(-1).float()) * self.scale.unsqueeze(-1).float()
        return groups.flatten(1)


def searched(weight: Tensor, group: int, importance: Tensor | None = None) -> Codes:
    """Round a matrix, with the scale and zero point of least squared error for each group.

    Several scales and zero points are tried for each group.

    weight: float32 [out, in].
    group: number of inputs that share a scale and a zero point; it divides the number of inputs.
    importance: float32 [in], the weight of each input's error; None = equal weights.
    """
    width = weight.shape[1]
    scales, zeros, codes = [], [], []
    for part in weight.split(max(1, _STEP // width)):
        groups = part.unflatten(1, (-1, group))
        weigh = torch.ones(width) if importance is None else importance.float()
        scale, zero = _grid(groups, weigh.view(1, -1, group))
        scales.append(scale.half())
        zeros.append(zero.to(torch.uint8))
        codes.append(_coded(groups, scale, zero).flatten(1).to(torch.uint8))
    return Codes(torch.cat(codes), torch.cat(scales), torch.cat(zeros))


def _coded(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    codes = (groups / scale.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1))
    return codes.clamp_(0, TOP)


def _grid(groups: Tensor, weigh: Tensor) -> tuple[Tensor, Tensor]:
    """Find the scale and zero point of each group, float32 [out, groups].

    Scales are representable in float16.

    groups: [out, groups, inputs].
    weigh: [1, groups, inputs], the weight of each squared error.
    """
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    best = torch.full(low.shape, float("inf"))
    best_scale, best_zero = torch.empty_like(low), torch.empty_like(low)

    def attempt(scale: Tensor, zero: Tensor) -> None:
        """Try a scale and zero point for each group; keep them as best where the error is lower."""
        scale = scale.clamp(min=_LEAST).half().float()
        steps = _coded(groups, scale, zero).sub_(zero.unsqueeze(-1))
        error = steps.mul_(scale.unsqueeze(-1)).sub_(groups).square_().mul_(weigh).sum(-1)
        better = error < best
        best.copy_(torch.where(better, error, best))
        best_scale.copy_(torch.where(better, scale, best_scale))
        best_zero.copy_(torch.where(better, zero, best_zero))

    for share in _SHARES:
        scale = ((high - low) * (share / TOP)).clamp_(min=_LEAST)
        middle = (-low * share / scale).round_()
        for shift in (-1, 0, 1):
            attempt(scale, (middle + shift).clamp_(0, TOP))
    for _ in range(_REFITS):
        # the least-squares fit of the scale to the codes
        zero = best_zero.clone()
        steps = _coded(groups, best_scale, zero).sub_(zero.unsqueeze(-1))
        weighed = steps * weigh
        attempt((weighed * groups).sum(-1) / (weighed * steps).sum(-1).clamp_(min=1e-30), zero)
    return best_scale, best_zero


class Feedback(NamedTuple):
    """The statistics of matrices' inputs by which `fed_back` rounds the matrices.

    order: int64 [in], the order in which columns are rounded.
    inverse: float32 [in, in], the upper Cholesky factor of the inverse of the ordered Hessian.
    importance: float32 [in], the mean square of each input, relative to the mean of all.
    hessian: float32 [in, in], damped, in the order of the inputs.
    correction: float32 [in, in]; W + W @ correction applied to the rounded model's inputs
        approximates W applied to the unrounded model's inputs. None = the inputs are equal.
    due: float32 [out, in], the least-squares matrix from the inputs to the difference between the
        unrounded model's residual and the rounded model's. None = no difference.
    """

    order: Tensor
    inverse: Tensor
    importance: Tensor
    hessian: Tensor
    correction: Tensor | None = None
    due: Tensor | None = None

    @classmethod
    def of(
        cls,
        hessian: Tensor,
        tokens: int,
        missing: Tensor | None = None,
        owed: Tensor | None = None,
    ) -> "Feedback | None":
        """Compute the feedback from a Hessian; None if it is zero, because no token reached the
        matrices.

        A short text is a poor estimate of correlations between inputs. So off-diagonal elements are
        shrunk, as if there were one further token for each input, with independent inputs.

        hessian: float32 [in, in], the sum of x x^T over the calibration's inputs x.
        tokens: the number of inputs x.
        missing, owed: as in engine.rounding.calibration.Inputs.
        """
        diagonal = hessian.diagonal()
        mean = float(diagonal.mean())
        if not mean > 0:
            return None
        diagonal = diagonal / mean
        certain = tokens / (tokens + len(hessian)) / mean
        hessian = hessian * certain
        hessian.diagonal().copy_(diagonal)
        order = diagonal.argsort(descending=True, stable=True)
        inverse = _inverse_root(hessian[order][:, order])
        correction = due = None
        if missing is not None or owed is not None:
            ridge = torch.linalg.cholesky(hessian + _RIDGE * torch.eye(len(hessian)))
            if missing is not None:
                correction = torch.cholesky_solve(missing * certain, ridge).t()
            if owed is not None:
                due = torch.cholesky_solve(owed * certain, ridge).t()
        hessian.diagonal().add_(_DAMPING)
        return cls(order, inverse, diagonal + _DAMPING, hessian, correction, due)

    def aim(self, weight: Tensor) -> Tensor:
        """Return the matrix to round: it compensates for errors of earlier matrices.

        weight: float32 [out, in].
        """
        aimed = weight
        if self.correction is not None:
            aimed = aimed + weight @ self.correction
        if self.due is not None and self.due.shape == weight.shape:
            aimed = aimed + self.due
        return aimed


def fed_back(weight: Tensor, group: int, feedback: Feedback) -> Codes:
    """Round a matrix column by column, so that later columns compensate for errors of earlier ones.

    Columns with the largest inputs are rounded first, while most others can still change. Scales
    and zero points are those of `searched`, so groups follow the order of the inputs.

    weight: float32 [out, in].
    group: number of inputs that share a scale and a zero point.
    """
    order, inverse, importance, hessian = feedback[:4]
    weight = feedback.aim(weight)
    scale, zeros = searched(weight, group, importance)[1:]
    groups = order.div(group, rounding_mode="floor")
    steps, zero = scale.float()[:, groups].t().contiguous(), zeros.float()[:, groups].t()
    # [in, out], so that each column of the matrix is contiguous
    remaining = weight.t()[order].contiguous()
    codes = torch.empty_like(remaining)
    width, block = len(remaining), 64
    for begin in range(0, width, block):
        end = min(begin + block, width)
        errors = torch.empty(end - begin, remaining.shape[1])
        for at in range(begin, end):
            code = (remaining[at] / steps[at]).round_().add_(zero[at]).clamp_(0, TOP)
            codes[at] = code
            error = (remaining[at] - (code - zero[at]) * steps[at]) / inverse[at, at]
            remaining[at + 1 : end].addr_(inverse[at, at + 1 : end], error, alpha=-1)
            errors[at - begin] = error
        remaining[end:].addmm_(inverse[begin:end, end:].t(), errors, alpha=-1)
    return _descended(weight, codes[order.argsort()], scale, zeros, hessian)


def _descended(
    weight: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor, hessian: Tensor
) -> Codes:
    """Reduce the error of a matrix's outputs by coordinate descent; return the new codes.

    Each update, of one column's codes or one group's scales, is optimal with all others fixed. So
    the error never grows, except by the rounding of scales to float16.

    weight: float32 [out, in].
    codes: float32 [in, out], which are changed in place.
    scale, zeros: see Codes.
    hessian: see Feedback.
    """
    weight, steps, zero = weight.t(), scale.float().t().contiguous(), zeros.float().t()
    group = len(weight) // len(steps)
    diagonal = hessian.diagonal()
    rounded = ((codes.unflatten(0, (-1, group)) - zero.unsqueeze(1)) * steps.unsqueeze(1)).flatten(
        0, 1
    )
    # half the negative gradient of the error with respect to the weights
    slope = hessian @ (weight - rounded)
    for _ in range(_PASSES):
        for at in range(len(steps)):
            inputs = slice(at * group, (at + 1) * group)
            among, towards, before = hessian[inputs, inputs], slope[inputs].clone(), rounded[inputs]
            values = before.clone()
            for offset in range(group):
                wanted = values[offset] + towards[offset] / diagonal[inputs][offset]
                code = (wanted / steps[at]).round_().add_(zero[at]).clamp_(0, TOP)
                change = (code - zero[at]) * steps[at] - values[offset]
                codes[inputs][offset], values[offset] = code, values[offset] + change
                towards.addr_(among[offset], change, alpha=-1)
            counts = codes[inputs] - zero[at]
            gain = (counts * towards).sum(0) / (counts * (among @ counts)).sum(0).clamp_(min=1e-30)
            steps[at] = (steps[at] + gain).clamp_(min=_LEAST).half().float()
            values = counts * steps[at]
            slope.addmm_(hessian[:, inputs], values - before, alpha=-1)
            rounded[inputs] = values
    return Codes(codes.t().to(torch.uint8).contiguous(), steps.t().half().contiguous(), zeros)


def _inverse_root(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a Hessian whose mean diagonal is 1.

    Damping grows until the matrix is positive definite.
    """
    damping = _DAMPING
    while True:
        damped = hessian + damping * torch.eye(len(hessian))
        root, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            inverse = torch.cholesky_inverse(root)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not bool(failed):
                return upper
        damping *= 10
