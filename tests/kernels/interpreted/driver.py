"""A SphereConv made of the five Triton functions and torch's convolutions, without the operator around them."""

import torch

from spherenet.kernels.sphere_conv import triton as kernels
from spherenet.ops.geometry import convolve, convolve_backward
from spherenet.ops.sphere_conv import Affine, Operation


class TritonSphereConv(torch.autograd.Function):
    """out = beta·(g + bias) + gamma with the gradients of x, weight, k, bias, beta and gamma."""

    @staticmethod
    def forward(ctx, x, weight, k, bias, beta, gamma, operation):
        unit, scale = kernels.unit_weight(weight, operation.eps, x.dtype)
        product = convolve(x, unit, operation.geometry)
        affine = Affine(bias, beta, gamma)
        out, inverse_norm, cosine = kernels.forward(product, x, operation, k, affine)
        ctx.save_for_backward(x, weight, unit, scale, inverse_norm, cosine if operation.save_cosine else out.detach())
        ctx.k, ctx.affine, ctx.operation = k, affine, operation
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, unit, scale, inverse_norm, saved = ctx.saved_tensors
        geometry = ctx.operation.geometry
        needs_x, needs_weight, needs_k, *needs_affine = ctx.needs_input_grad[:6]
        grad_product, spread, sums = kernels.backward(
            grad, saved, inverse_norm, x, ctx.operation, ctx.k, ctx.affine, needs_x, needs_k, any(needs_affine)
        )
        grad_x, grad_unit = convolve_backward(grad_product, x, unit, geometry, needs_x, needs_weight)
        if needs_x:
            grad_x = kernels.correct(grad_x, x, spread, geometry.groups)
        if needs_weight:
            grad_unit = kernels.unit_weight_backward(grad_unit, unit, scale, weight.dtype)
        bias, beta, _ = ctx.affine
        grad_k = grad_bias = grad_beta = grad_gamma = None
        if needs_k:
            grad_k = sums[2] if beta is None else sums[2] * beta
            grad_k = grad_k.sum().reshape(ctx.k.shape) if ctx.k.numel() == 1 else grad_k
        if needs_affine[0]:
            grad_bias = sums[0] if beta is None else sums[0] * beta
        if needs_affine[1]:
            grad_beta = sums[1] if bias is None else sums[1] + sums[0] * bias
        if needs_affine[2]:
            grad_gamma = sums[0]
        return (
            grad_x if needs_x else None,
            grad_unit if needs_weight else None,
            grad_k,
            grad_bias,
            grad_beta,
            grad_gamma,
            None,
        )


def triton_sphere_conv(x, weight, geometry, angle, k=None, affine=(None, None, None), eps=1e-4, save_cosine=None):
    """Evaluate the function above; cosines are saved if the output does not determine them."""
    if save_cosine is None:
        save_cosine = x.dtype in (torch.float16, torch.bfloat16) or any(value is not None for value in affine)
        save_cosine = save_cosine or not angle.is_recoverable
    return TritonSphereConv.apply(x, weight, k, *affine, Operation(angle, geometry, eps, "triton", save_cosine))
