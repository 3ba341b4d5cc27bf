"""`shard_head`: a head whose classes are divided among processes, for more classes than one process can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from spherenet._util.validation import require_module, require_number
from spherenet.errors import InvalidArgument
from spherenet.kernels.classes.sharded import ClassShard, ShardedOutput, gather_rows
from spherenet.layers.head import AngularHead
from spherenet.ops.angular import unit_features
from spherenet.ops.norms import without_autocast, working_dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ShardedHead", "shard_head"]

M = TypeVar("M", bound=nn.Module)


class ShardedHead(AngularHead):
    """`AngularHead` of which each process owns some classes; `shard_head` creates it.

    `weight` and `bias` are DTensors, sharded by class. Calls are collective: all processes of the mesh must make them
    together, each with its own features. Batches may have different sizes.

    Args:
        head: Head to take the weights from, the same in all processes. If it is on the meta device, each process
            initializes its own classes.
        mesh: Processes, in one dimension.
        sample_rate: Fraction of the classes that are used in each training step, greater than 0 and at most 1.
    """

    weight: Any
    bias: Any

    def __init__(self, head: AngularHead, mesh: DeviceMesh, sample_rate: float = 1.0) -> None:
        nn.Module.__init__(self)
        self.in_features, self.num_classes, self.eps = head.in_features, head.num_classes, head.eps
        self.directions = head.directions
        self.scale_invariant = head.scale_invariant
        self.sample_rate = require_number("sample_rate", sample_rate)
        if not 0 < self.sample_rate <= 1:
            raise InvalidArgument("sample_rate", f"must be greater than 0 and at most 1, got {sample_rate!r}.")
        for name in ("weight", "bias"):
            whole: nn.Parameter | None = getattr(head, name)
            parameter = None if whole is None else nn.Parameter(_own_part(whole, mesh), whole.requires_grad)
            self.register_parameter(name, parameter)
        for name, hooks in vars(head).items():
            if name.startswith(("_forward_", "_backward_")) or name == "_is_full_backward_hook":
                setattr(self, name, hooks)
        self.train(head.training)

    @property
    def shard(self) -> ClassShard:
        """The classes that this process owns."""
        mesh = self.weight.device_mesh
        size = -(-self.num_classes // mesh.size())  # as torch.chunk divides them
        return ClassShard(mesh, min(mesh.get_local_rank() * size, self.num_classes), self.num_classes)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights of the own classes from N(0, 2/in_features), and set the bias to 0."""
        generator = torch.Generator(self.weight.device)
        generator.manual_seed((torch.initial_seed() + self.shard.first) % 2**63)  # other numbers in every process
        self.weight.to_local().normal_(std=(2 / self.in_features) ** 0.5, generator=generator)
        if self.bias is not None:
            self.bias.to_local().zero_()

    def forward(self, features: Tensor) -> ShardedOutput:  # type: ignore[override]
        """Return the output for the features [*, in_features] of all processes."""
        shard = self.shard
        error: Exception | None = None
        try:
            self._checked_dtype(features)
        except (TypeError, ValueError) as wrong:
            error = wrong
        count = -1 if error is not None else features.numel() // self.in_features
        device = self.weight.device
        counts = shard.gather(torch.tensor([count], device=device)).flatten().tolist()
        if min(counts) < 0:
            shard.raise_together(error)
        with without_autocast(features):
            dtype = working_dtype(features.dtype)
            rows = gather_rows(features.reshape(-1, self.in_features).to(dtype), counts, shard)
            unit, length = unit_features(rows, self.eps)
            weight, bias = self.weight.to_local(), None if self.bias is None else self.bias.to_local()
            return ShardedOutput(
                unit,
                length.squeeze(-1),
                weight.to(dtype),
                None if bias is None else bias.to(dtype),
                self.eps,
                shard,
                tuple(counts),
                tuple(features.shape[:-1]),
                self.sample_rate if self.training else 1.0,
            )

    def extra_repr(self) -> str:
        """Return the sizes and options."""
        sampled = "" if self.sample_rate == 1 else f", sample_rate={self.sample_rate:g}"
        return f"{super().extra_repr()}, processes={self.weight.device_mesh.size()}{sampled}"


def shard_head(model: M, mesh: DeviceMesh, *, sample_rate: float = 1.0) -> M:
    """Divide the classes of a model's `AngularHead` among processes, so that none holds all weights or all logits.

    Each process owns the rows of about num_classes/processes classes, their gradients and the state of the optimizer
    for them. The features and labels of all processes are gathered, each process computes the logits of the classes it
    owns, and the softmax is combined from one maximum and a few sums per row. All losses support such a head. The loss
    is that of the whole batch, the same in every process:

        loss = model(images, labels, return_scores=False)    # the mean over the batches of all processes

    Gradients fit DDP and FSDP, which average the gradients of the other parameters over processes. The weights of the
    head belong to one process each and must be left out of DDP and FSDP.

    In place of scores, `model(images, labels)` returns the predicted classes of the own images, and `model(images)` a
    DTensor with the scores of all processes, sharded by class. Call `shard_head` in all processes, with the same
    weights, before the optimizer is created.

    Args:
        model: Module that contains one `AngularHead`, or a head.
        mesh: Processes, in one dimension, e.g. `init_device_mesh("cpu", (world,))`.
        sample_rate: Fraction of the classes that is used in each training step, as in Partial FC (An et al., 2021): the
            labels of the batch and other classes at random, whose terms are weighted so that sums over all classes have
            the right expectation. 1 for all classes.

    Returns:
        The model, changed in place, or the new head if `model` is a head.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model does not have one head, there are fewer classes than processes, or heads differ between
            processes. The error is the same in all processes.

    Example:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
        >>> model = sn.shard_head(sn.create_model("cnn-9", num_classes=1_000_000, loss="arcface"), mesh)
    """
    require_module("model", model)
    if mesh.ndim != 1:
        raise InvalidArgument("mesh", f"must have one dimension, got {mesh.ndim}.")
    heads = {name: module for name, module in model.named_modules() if isinstance(module, AngularHead)}
    sizes = [(head.num_classes, *head.weight.shape[1:]) for head in heads.values()]
    _require_same_heads(sizes, mesh)
    if len(heads) != 1:
        raise InvalidArgument("model", f"must have one AngularHead, got {len(heads)}.")
    name, head = next(iter(heads.items()))
    if isinstance(head, ShardedHead):
        raise InvalidArgument("model", "must have a head that is not sharded yet.")
    if is_parametrized(head):
        raise InvalidArgument("model", "must have a head without parametrizations; remove them first.")
    if head.num_classes < mesh.size():
        raise InvalidArgument(
            "num_classes", f"must be at least the number of processes, {mesh.size()}, got {head.num_classes}."
        )
    new = ShardedHead(head, mesh, sample_rate)
    if head.weight.is_meta:
        new.reset_parameters()
    if not name:
        return new  # type: ignore[return-value]
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)
    return model


def _own_part(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a DTensor sharded by class, of which this process holds its own rows only."""
    from torch.distributed.tensor import DTensor, Shard

    rows = [*whole.detach().chunk(mesh.size())]
    rank = mesh.get_local_rank()
    own = rows[rank] if rank < len(rows) else whole.detach()[:0]
    own = torch.empty_like(own, device=mesh.device_type) if whole.is_meta else own.clone()
    part: Tensor = DTensor.from_local(own, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    return part


def _require_same_heads(sizes: list[tuple[int, ...]], mesh: DeviceMesh) -> None:
    """Raise ValueError in all processes if their heads have different numbers of classes or features."""
    import torch.distributed as dist

    everywhere: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everywhere, sizes, group=mesh.get_group())
    for rank, other in enumerate(everywhere):
        if other != everywhere[0]:
            raise InvalidArgument(
                "model",
                f"must have the same head in all processes, got (classes, features) {everywhere[0]} in process 0 "
                f"and {other} in process {rank}.",
            )
