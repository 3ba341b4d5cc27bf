"""Evaluation protocols: the mean and variance that BatchNorm layers use when a network is evaluated.

- `running`: the layers' own moving averages, with torch's momentum. They are saved with the model.
- `lagging`: moving averages that change slowly, as in TensorFlow 1. After each training batch with mean μ and biased
  variance σ², m ← αm + (1 − α)μ and v ← αv + (1 − α)σ². They start at m = 0 and v = `bn_lag_variance`, without
  correction of this start, and are saved beside the model.
- `batch`: the statistics of each test batch. The test images are in a fixed random order, in batches of nearly equal
  size, because batches of a single class or image would have other statistics.
- `precise`: mean and biased variance over `bn_precise_images` training images without augmentation, measured before
  each evaluation. The images pass the network in batches of the size that layers are trained on (or slightly more),
  normalized by their own statistics; the moments of all batches are averaged, weighted by their number of images.

Protocols change neither training nor the running statistics. Of several processes, `lagging` uses the batches of the
main process, as `running` does without SyncBatchNorm; `precise` averages over all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spherenet.data import Split
from spherenet.errors import CheckpointError, InvalidArgument
from spherenet.training.config import TrainConfig
from spherenet.training.deferred import sum_dtype
from spherenet.training.distributed import Processes
from spherenet.training.evaluation import mixed_batches
from spherenet.training.sharding import is_sharded

__all__ = ["Protocols"]


class Protocols:
    """BatchNorm layers of a model and the statistics that evaluations give them.

    Args:
        model: The model that is trained. Its layers are changed only within `applied`.
        train: Training images, for `precise`.
        config: Names of the protocols and their options.
        processes: Processes of the run.

    Attributes:
        names: Protocols of the run, the primary one first; empty if the model has no BatchNorm layer with running
            statistics.
    """

    def __init__(self, model: nn.Module, train: Split, config: TrainConfig, processes: Processes) -> None:
        self._model, self._train, self._config, self._processes = model, train, config, processes
        self._layers: dict[str, _BatchNorm] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None
        }
        self.names: tuple[str, ...] = tuple(config.bn_eval or ("running",)) if self._layers else ()
        if "batch" in self.names and config.eval_batch_size < 2:
            raise InvalidArgument(
                "eval_batch_size", f"must be at least 2 with batch in bn_eval, got {config.eval_batch_size}."
            )
        if "lagging" in self.names and is_sharded(config, processes):
            raise InvalidArgument("bn_eval", "must be without lagging if weights are sharded, got lagging.")
        measured = min(config.bn_precise_images, len(train))
        if "precise" in self.names and measured < 2 * processes.world:
            raise InvalidArgument(
                "bn_precise_images", f"must be at least {2 * processes.world}, two images per process, got {measured}."
            )
        self._lagging: dict[str, Tensor] = {}
        if "lagging" in self.names:
            for name, layer in self._layers.items():
                assert layer.running_mean is not None
                self._lagging[f"{name}.mean"] = torch.zeros_like(layer.running_mean)
                variance = torch.full_like(layer.running_mean, config.bn_lag_variance)
                self._lagging[f"{name}.variance"] = variance
                layer.register_forward_pre_hook(self._update(name))

    @property
    def primary(self) -> str | None:
        """The protocol of the best checkpoint and the summary."""
        return self.names[0] if self.names else None

    def require_batches(self, split: Split) -> None:
        """Raise ValueError if a split has too few images for the statistics of batches."""
        smallest = 2 * self._processes.world
        if "batch" in self.names and len(split) < smallest:
            raise InvalidArgument("bn_eval", f"must not have batch for fewer than {smallest} images, got {len(split)}.")

    def buffers(self) -> list[Tensor]:
        """Return the lagging statistics, which a skipped step must not change."""
        return list(self._lagging.values())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the lagging statistics as "layer.mean" and "layer.variance"."""
        return dict(self._lagging)

    def load_state_dict(self, state: Mapping[str, Tensor], source: str) -> list[str]:
        """Load what `state_dict` returned.

        Returns:
            A warning if there is nothing to load because the run had no lagging statistics before.

        Raises:
            CheckpointError: If the statistics do not fit the model.
        """
        if not self._lagging:
            return []
        if not state:
            return [f"{source} has no lagging BatchNorm statistics: they start here."]
        for name, tensor in self._lagging.items():
            saved = state.get(name)
            if saved is None or saved.shape != tensor.shape or not saved.is_floating_point():
                raise CheckpointError(f"{source} does not fit the model: its lagging {name} is missing or another one.")
            tensor.copy_(saved)
        return []

    def _update(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Return a hook that updates the lagging statistics of a layer with each batch that it is trained on."""
        mean, variance = self._lagging[f"{name}.mean"], self._lagging[f"{name}.variance"]
        weight = 1 - self._config.bn_lag_momentum

        @torch.no_grad()
        def update(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if layer.training:
                batch_mean, batch_variance = _moments(inputs[0])
                mean.lerp_(batch_mean.to(mean.dtype), weight)
                variance.lerp_(batch_variance.to(variance.dtype), weight)

        return update

    @contextmanager
    def applied(self, protocol: str | None) -> Iterator[None]:
        """Let the layers use the statistics of a protocol within the block. All processes must call it."""
        if protocol in (None, "running"):
            yield
            return
        saved = {name: (layer.running_mean, layer.running_var) for name, layer in self._layers.items()}
        try:
            if protocol == "lagging":
                self._set(self._shared_lagging())
            else:
                # Without running statistics, a layer in eval mode uses those of the batch.
                self._set({})
                if protocol == "precise":
                    self._set(self._precise())
            yield
        finally:
            for name, (mean, variance) in saved.items():
                self._layers[name].running_mean, self._layers[name].running_var = mean, variance

    def _set(self, statistics: Mapping[str, Tensor]) -> None:
        for name, layer in self._layers.items():
            layer.running_mean, layer.running_var = (
                statistics.get(f"{name}.mean"),
                statistics.get(f"{name}.variance"),
            )

    def _shared_lagging(self) -> Mapping[str, Tensor]:
        """Return the lagging statistics of the main process in all processes."""
        self._processes.broadcast(self._lagging.values())
        return self._lagging

    @torch.no_grad()
    def _precise(self) -> dict[str, Tensor]:
        """Measure mean and variance of the input of each layer over training images."""
        config, processes = self._config, self._processes
        device, dtype = processes.device, sum_dtype(processes.device)
        # Sums of mean, second moment and number of images.
        sums = {
            name: torch.zeros(3, layer.num_features, dtype=dtype, device=device) for name, layer in self._layers.items()
        }

        def measure(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def add(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
                mean, variance = (moment.to(dtype) for moment in _moments(inputs[0]))
                sums[name] += len(inputs[0]) * torch.stack([mean, variance + mean.square(), torch.ones_like(mean)])

            return add

        handles = [layer.register_forward_pre_hook(measure(name)) for name, layer in self._layers.items()]
        was_training = self._model.training
        self._model.eval()
        batch_size = max(2, config.batch_size // processes.world // config.accumulate)  # that of training
        order = mixed_batches(len(self._train), batch_size, processes, config.bn_precise_images)
        autocast = torch.autocast(device.type, getattr(torch, config.precision), enabled=config.precision != "float32")
        try:
            for batch in self._train.batches(order, device=device, augmentation=None, workers=config.workers):
                with autocast:
                    self._model(batch.images)
        finally:
            self._model.train(was_training)
            for handle in handles:
                handle.remove()
        statistics: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            mean, square, count = processes.total(sums[name])
            mean, square = mean / count, square / count
            statistics[f"{name}.mean"] = mean.to(_dtype(layer))
            statistics[f"{name}.variance"] = (square - mean.square()).clamp(min=0).to(_dtype(layer))
        return statistics


def _dtype(layer: _BatchNorm) -> torch.dtype:
    dtype: torch.dtype = layer.weight.dtype if layer.affine else torch.float32
    return dtype


def _moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel, in float32 or float64."""
    values = inputs.detach()
    values = values if values.dtype == torch.float64 else values.float()
    dims = [dim for dim in range(values.dim()) if dim != 1]
    variance, mean = torch.var_mean(values, dims, correction=0)
    return mean, variance
