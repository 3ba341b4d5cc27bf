"""Sharded training: heads divided by class, backbones by FSDP2 or HSDP, and operations on their tensors (DTensor)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.errors import InvalidArgument, RunError
from spherenet.layers import AngularHead, shard_head
from spherenet.training.config import TrainConfig
from spherenet.training.distributed import Processes

__all__ = [
    "gradient_norm",
    "is_divided",
    "is_sharded",
    "joint_micro_batches",
    "local",
    "require_shardable",
    "shard_model",
    "split_by_mesh",
]


def is_sharded(config: TrainConfig, processes: Processes) -> bool:
    """Return whether weights are divided among processes. A single process trains as if the options were not set."""
    return processes.world > 1 and (config.shard_head or config.sharding != "ddp")


def require_shardable(config: TrainConfig, processes: Processes) -> None:
    """Raise ValueError for options that sharded training does not support."""
    if config.sample_rate < 1 and not (config.shard_head and processes.world > 1):
        raise InvalidArgument(
            "sample_rate", f"must be 1 unless several processes train with --shard-head, got {config.sample_rate:g}."
        )
    if not is_sharded(config, processes):
        return
    if config.precision == "float16":
        raise InvalidArgument("precision", "must be float32 or bfloat16 if weights are sharded, got float16.")
    if config.compile:
        raise InvalidArgument("compile", "must be off if weights are sharded.")
    if config.average_weights:
        raise InvalidArgument("average_weights", f"must be 0 if weights are sharded, got {config.average_weights:g}.")


def shard_model(model: nn.Module, config: TrainConfig, processes: Processes) -> None:
    """Divide the weights of a model among the processes as configured, in place, before the optimizer is created.

    Raises:
        ValueError: If the head cannot be divided.
        RunError: If the processes per machine do not divide all processes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device, world = processes.device.type, processes.world
    owned: set[nn.Parameter] = set()
    if config.shard_head:
        shard_head(model, init_device_mesh(device, (world,)), sample_rate=config.sample_rate)
        owned = {p for module in model.modules() if isinstance(module, AngularHead) for p in module.parameters()}
    if config.sharding == "ddp":
        return
    if config.sync_batch_norm and device == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if config.sharding == "fsdp":
        mesh = init_device_mesh(device, (world,))
    else:
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if world % per_machine:
            raise RunError(f"every machine must have the same number of processes, got {world} with {per_machine}.")
        names = ("replicate", "shard")
        mesh = init_device_mesh(device, (world // per_machine, per_machine), mesh_dim_names=names)
    # FSDP does not divide numbers without a dimension, such as a k that all filters share.
    numbers = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    for number in numbers:
        number.register_post_accumulate_grad_hook(processes.average_gradient)  # type: ignore[no-untyped-call]
    for block in (*_blocks(model), model):
        fully_shard(block, mesh=mesh, ignored_params=owned | numbers)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights are gathered together: the parts of the network that have weights."""
    features = getattr(model, "features", model)
    blocks: list[nn.Module] = []
    for child in features.children():
        children = child.children() if isinstance(child, (nn.ModuleList, nn.Sequential)) else [child]
        blocks += [block for block in children if any(parameter.dim() for parameter in block.parameters())]
    return blocks


def joint_micro_batches(config: TrainConfig, world: int) -> list[int]:
    """Return the number of images of each micro-batch over all processes."""
    own = [config.batch_size // world + (rank < config.batch_size % world) for rank in range(world)]
    count = config.accumulate
    return [sum(size // count + (number < size % count) for size in own) for number in range(count)]


def is_divided(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Tensor:
    """Return the rows of a tensor that this process holds, the tensor itself if it is not a DTensor."""
    rows: Tensor = tensor.to_local() if is_divided(tensor) else tensor
    return rows


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients together, some of which are DTensors on different meshes."""
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(_layout(gradient), []).append(gradient)
    norms: list[Any] = [torch.nn.utils.get_total_norm(group) for group in groups.values()]
    return torch.nn.utils.get_total_norm(
        [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    )


def split_by_mesh(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups in which all parameters have the same mesh, as fused optimizers require."""
    result = []
    for group in groups:
        by_mesh: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(_layout(parameter), []).append(parameter)
        result += [{**group, "params": parameters} for parameters in by_mesh.values()] or [group]
    return result


def _layout(tensor: Tensor) -> Any:
    """Return the mesh and placements of a DTensor, None for other tensors."""
    mesh = getattr(tensor, "device_mesh", None)
    return None if mesh is None else (mesh, tensor.placements)  # type: ignore[attr-defined]
