"""A SphereConv from the five Triton functions and torch's convolutions, without the operator that joins them."""

import torch

from spherenet.kernels import triton as kernels
from spherenet.kernels.interface import Affine, Angle
from spherenet.ops import sphere_conv as composite


class TritonSphereConv(torch.autograd.Function):
    """out = beta·(g + bias) + gamma with the gradients of x, weight, k, bias, beta and gamma."""

    @staticmethod
    def forward(ctx, x, weight, k, bias, beta, gamma, geometry, eps, name, keep_cosine):
        unit, scale = kernels.unit_weight(weight, eps, x.dtype)
        product = composite.conv_product(x, unit, *geometry)
        angle, affine = Angle(name, k), Affine(bias, beta, gamma)
        size = tuple(weight.shape[2:])
        out, inverse_norm, cosine = kernels.forward(product, x, size, geometry, eps, angle, affine, keep_cosine)
        ctx.save_for_backward(x, weight, unit, scale, inverse_norm, cosine if keep_cosine else out.detach())
        ctx.angle, ctx.affine, ctx.geometry, ctx.keeps_cosine = angle, affine, geometry, keep_cosine
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, unit, scale, inverse_norm, known = ctx.saved_tensors
        size, geometry = tuple(weight.shape[2:]), ctx.geometry
        needs_x, needs_weight, needs_k, *needs_affine = ctx.needs_input_grad[:6]
        grad_product, spread, sums = kernels.backward(
            grad, known, ctx.keeps_cosine, inverse_norm, x, size, geometry, ctx.angle, ctx.affine,
            needs_x, needs_k, any(needs_affine),
        )  # fmt: skip
        if weight.dim() == 2:
            grad_x, grad_unit = grad_product @ unit, grad_product.t() @ x
        else:
            grad_x, grad_unit, _ = torch.ops.aten.convolution_backward(
                grad_product, x, unit, None, geometry.stride, geometry.padding, geometry.dilation, False,
                (0,) * len(size), geometry.groups, (needs_x, needs_weight, False),
            )  # fmt: skip
        if needs_x:
            grad_x = kernels.correct(grad_x, x, spread, geometry.groups)
        if needs_weight:
            grad_unit = kernels.unit_weight_backward(grad_unit, unit, scale, weight.dtype)
        bias, beta, _ = ctx.affine
        grad_k = grad_bias = grad_beta = grad_gamma = None
        if needs_k:
            grad_k = sums[2] if beta is None else sums[2] * beta
            grad_k = grad_k.sum().reshape(ctx.angle.k.shape) if ctx.angle.k.numel() == 1 else grad_k
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
            *(None,) * 4,
        )


def triton_sphere_conv(x, weight, geometry, name, k=None, affine=(None, None, None), eps=1e-4, keep_cosine=None):
    """Evaluate the function above; cosines are kept when the output does not determine them."""
    if keep_cosine is None:
        keep_cosine = x.dtype in (torch.float16, torch.bfloat16) or any(value is not None for value in affine)
    return TritonSphereConv.apply(x, weight, k, *affine, geometry, eps, name, keep_cosine)
