"""The training loop: batches, optimizer steps, evaluations and checkpoints until all iterations are done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.data import Batch, Dataset, Split
from spherenet.errors import DataError
from spherenet.models.test_time import require_views
from spherenet.models.transformer import has_normalized_weights, keep_normalized
from spherenet.optim import keep_norms
from spherenet.runs import RunDirectory
from spherenet.training.averaging import WeightAverage
from spherenet.training.balance import single_class_warning, total_weight
from spherenet.training.build import build_augmentation, build_penalty, compiled, lambda_setter
from spherenet.training.checkpoints import restore, snapshot, write
from spherenet.training.config import TrainConfig
from spherenet.training.deferred import DeferredSums, StepSums, sum_dtype
from spherenet.training.distributed import Processes
from spherenet.training.evaluation import Evaluation, epoch_seed, evaluate, training_order
from spherenet.training.faults import MAX_SKIPPED_IN_A_ROW, fault_error, require_finite_weights, skip_error
from spherenet.training.optimizers import build_optimizer, set_learning_rates
from spherenet.training.probes import Probes, probe_batch
from spherenet.training.protocols import Protocols
from spherenet.training.reporter import Reporter
from spherenet.training.sharding import gradient_norm, is_sharded, joint_micro_batches, require_shardable, shard_model
from spherenet.training.signals import StopRequested, StopSignals
from spherenet.training.state import Counters, Outcome, buffer_copies, optimizer_tensors, restore_buffers

__all__ = ["Trainer"]


class Trainer:
    """Train a model as configured and write the run directory.

    On a GPU no step waits for the device: sums are fetched when they are logged, saved or evaluated. A loss that is not
    finite is then reported with its step, and the weights are those before it.

    Args:
        model: Module (images, labels) → (loss, scores), e.g. a `Classifier`.
        dataset: Training and test images.
        config: Options of the run. Data, network and loss options are not used: model and data set are given.
        processes: Processes of the run. Only the main one writes to `run`.
        run: Run directory.
        penalty: Function of the model whose value is added to the loss of each step; None for the regularizers of
            `config`.
        reporter: Receiver of progress in the main process.

    Raises:
        ValueError: If the batch size does not fit the data set or the processes.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        config: TrainConfig,
        processes: Processes,
        run: RunDirectory,
        *,
        penalty: Callable[[nn.Module], Tensor] | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self.dataset, self.config, self.processes, self.run_directory = dataset, config, processes, run
        self.reporter = reporter if reporter is not None and processes.is_main else Reporter()
        self.augmentation = build_augmentation(config)
        require_views(config.tta, *dataset.preprocessing.size)
        self.penalty = penalty or build_penalty(config, model)
        self.set_lambda = lambda_setter(config, model)
        self.probes = Probes(self.reporter.warned) if config.probes else None
        device = processes.device
        require_shardable(config, processes)
        self.sharded = is_sharded(config, processes)
        model = model.to(device)
        if config.channels_last and config.sharding == "ddp":  # FSDP requires contiguous weights
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # With a sharded head the loss is that of all processes: the images of each micro-batch over all of them.
        self.joint_sizes: list[int] | None = None
        if self.sharded:
            self.joint_sizes = joint_micro_batches(config, processes.world) if config.shard_head else None
            shard_model(model, config, processes)
        self.optimizer = build_optimizer(config, model)
        self.kept_norms = keep_norms(self.optimizer, model, config.keep_norms_mode) if config.keep_norms else None
        if has_normalized_weights(model):
            keep_normalized(self.optimizer, model)
        self.uses_ddp = processes.world > 1 and config.sharding == "ddp"
        self.ddp = processes.wrap(model, sync_batch_norm=config.sync_batch_norm) if self.uses_ddp else model
        # SyncBatchNorm may have replaced modules: the model that is saved and evaluated is the one that is trained.
        self.model: nn.Module = self.ddp.get_submodule("module") if self.uses_ddp else self.ddp
        self.average = WeightAverage(self.model, self.optimizer, config)
        self.protocols = Protocols(self.model, dataset.train, config, processes)
        for split in filter(None, (dataset.validation, dataset.test)):
            self.protocols.require_batches(split)
        if config.bn_eval is not None and not self.protocols.names:
            self.reporter.warned("bn_eval has no effect: the network has no BatchNorm layers with running statistics.")
        self.buffers = [*self.model.buffers(), *self.protocols.buffers()]  # what a forward pass changes
        self.forward = compiled(self.ddp) if config.compile else self.ddp
        self.autocast = torch.autocast(
            device.type, getattr(torch, config.precision), enabled=config.precision != "float32"
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        self.sum_dtype = sum_dtype(device)
        self.deferred: DeferredSums | None = None  # the CPU does not need it: values are available at once
        is_fused = config.choice("optimizer").name != "muon"  # only fused optimizers can skip a step on the device
        if device.type != "cpu" and is_fused:
            self.deferred = DeferredSums(device, config.batch_size, sticky=config.on_nan == "stop")
        self.progress, self.patience = Counters(), config.patience or math.inf
        self._last_means = (math.nan, math.nan)
        self.step = 0
        training_order(dataset.train.labels, config, processes)  # raises ValueError before anything is written

    def resume(self) -> list[str]:
        """Load the newest valid checkpoint, if there is one.

        Returns:
            Warnings about corrupt checkpoints that were skipped and about changes that affect the result.

        Raises:
            CheckpointError: If all checkpoints are corrupt, or if the newest valid one does not fit the model.
        """
        warnings = restore(self)
        if self.progress.best_step not in self.run_directory.checkpoints.steps("best", up_to=self.step):
            # The best checkpoint was replaced after this step. With changed options the run may never reach it again.
            self.progress.best_accuracy, self.progress.best_step = -1.0, -1
        return warnings

    def forget_evaluations(self) -> None:
        """Remove the best checkpoint, because later accuracies are those of other images or statistics.

        It is removed at once: if the run is killed before its next checkpoint, the resumed run must not find it.
        """
        progress = self.progress
        progress.best_accuracy, progress.best_step, progress.accuracy, progress.not_better = -1.0, -1, -1.0, 0
        if self.processes.is_main:
            self.run_directory.checkpoints.remove_best()

    def train(self, stop: StopSignals) -> Outcome:
        """Train from the current step to the last one, or until a stop is requested.

        Args:
            stop: Signals that request a stop. The current step is finished and saved first.

        Raises:
            TrainingError: If a loss or gradient is not finite, unless `config.on_nan` is "skip", if too many steps in
                a row are skipped, or if weights are not finite.
        """
        config, progress = self.config, self.progress
        micro_batches = self.dataset.train.batches(
            training_order(self.dataset.train.labels, config, self.processes, self.step),
            device=self.processes.device,
            augmentation=self.augmentation,
            seed=config.seed,
            workers=config.workers,
            while_waiting=stop.check,
        )
        self.model.train()
        self.reporter.started(self.step, config.iterations)
        start, stopped = time.monotonic() - progress.seconds, False
        try:
            with stop.deferred():
                if self.step == config.iterations and progress.best_step < 0:  # the evaluations were forgotten
                    with self.average.applied():
                        self._evaluate()
                    self._save()
                while self.step < config.iterations and not stopped and progress.not_better < self.patience:
                    stopped = self._step(micro_batches, stop)
                    if config.average_weights:
                        self.average.update(self.step)
                    every = (config.log_every, config.eval_every, config.checkpoint_every)
                    due = self.step == config.iterations or any(self.step % interval == 0 for interval in every)
                    if self.deferred is not None and (stopped or due):
                        stopped = self._fetch_deferred() or stopped
                    progress.seconds = time.monotonic() - start
                    self._after_step(last=self.step == config.iterations, stopped=stopped)
        except (StopRequested, DataError) as error:
            # No batch arrived. If this was the first micro-batch of the step, nothing has changed since the last step.
            if config.accumulate > 1 or self.processes.world > 1 or not self.model.training:
                raise
            if self.deferred is not None:
                self._fetch_deferred()
            self._require_finite()
            self._save()
            if isinstance(error, DataError):  # a broken image must not cost the steps before it
                raise DataError(f"{str(error).rstrip('.')}; the run is saved at step {self.step}.") from None
            stopped = True
        finally:
            self.reporter.finished()
            micro_batches.close()  # ends the workers of a loader
        stopped_early = self.step < config.iterations and progress.not_better >= self.patience
        signal = (stop.received or 15) if stopped and self.step < config.iterations and not stopped_early else None
        return progress.outcome(self.step, signal, stopped_early=stopped_early)

    def _step(self, micro_batches: Iterator[Batch], stop: StopSignals) -> bool:
        """Make one optimizer step and return whether the processes agree to stop after it."""
        config, processes = self.config, self.processes
        # Random numbers of the network (dropout) depend on seed, step and process only, so there is no state to save.
        torch.manual_seed(epoch_seed(config.seed, self.step * processes.world + processes.rank))
        set_learning_rates(self.optimizer, config, self.step)
        if self.set_lambda is not None:
            self.set_lambda(self.step)
        buffers = buffer_copies(self.buffers) if config.on_nan == "skip" else None
        loss_sum = correct_sum = torch.zeros((), dtype=self.sum_dtype, device=processes.device)
        batch_indices: list[Tensor] = []
        for number in range(config.accumulate):
            last = number == config.accumulate - 1
            batch = next(micro_batches)
            batch_indices.append(batch.indices)
            weight = total_weight(self.model, batch.labels)
            images = weight * processes.world if self.joint_sizes is None else self.joint_sizes[number]
            with nullcontext() if last or not self.uses_ddp else self.ddp.no_sync():  # type: ignore[operator]
                loss, correct = self._forward_backward(batch, images, add_penalty=last)
            loss_sum = loss_sum + loss.to(self.sum_dtype) * weight
            correct_sum = correct_sum + correct
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = gradient_norm(gradients) if self.sharded else torch.nn.utils.get_total_norm(gradients)
        # Infinite float16 gradients are expected: the scaler skips the step and reduces its scale.
        fault = ~(loss_sum.isfinite() & (norm.isfinite() | self.scaler.is_enabled()))
        stop_requested = stop.received is not None
        own = StepSums(loss_sum, correct_sum, fault, torch.full_like(loss_sum, stop_requested), ~norm.isfinite())
        indices = torch.cat(batch_indices)
        totals = processes.total(torch.stack([value.to(self.sum_dtype) for value in own]))
        if self.deferred is not None:
            self._finish_on_device(self.deferred, StepSums(*totals), norm, indices, buffers)
            # Several processes agree to stop when the sums are fetched.
            return processes.world == 1 and stop_requested
        sums = StepSums(*totals.tolist())
        if sums.faults and config.on_nan == "stop":
            self._raise_fault(sums.loss, norm.item(), config.learning_rate_at(self.step), indices)
        if sums.faults or sums.overflows:
            self._count_skips(1, self.progress.skipped_in_a_row + 1)
        else:
            self.progress.skipped_in_a_row = 0
        if sums.faults:
            assert buffers is not None
            restore_buffers(self.buffers, buffers)
        else:
            self.scaler.step(self.optimizer)
            self.progress.add(sums.loss, sums.correct, config.batch_size)
        self.scaler.update()  # also after a fault, because the scaler has recorded its gradients
        self.optimizer.zero_grad()
        self.step += 1
        self.reporter.stepped(self.step, sums.loss / config.batch_size, sums.correct / config.batch_size)
        return bool(sums.stop_requests)

    def _forward_backward(self, batch: Batch, images: Tensor | int, *, add_penalty: bool) -> tuple[Tensor, Tensor]:
        """Add the gradient of a micro-batch; return its mean loss and its number of correct predictions.

        `images` is the weight of its mean loss, the number of images or the sum of their class weights.
        """
        with self.autocast:
            loss, scores = self.forward(batch.images, batch.labels)
        # DDP averages over processes: each micro-batch is weighted by its images, whatever the sizes of the others.
        total = loss * (images / self.config.batch_size)
        if add_penalty and self.penalty is not None:
            total = total + self.penalty(self.model)
        self.scaler.scale(total).backward()
        # A sharded head returns predictions in place of scores.
        predictions = scores.detach().argmax(1) if scores.dim() > 1 else scores
        return loss.detach(), (predictions == batch.labels).sum()

    def _finish_on_device(
        self, deferred: DeferredSums, sums: StepSums, norm: Tensor, indices: Tensor, buffers: list[Tensor] | None
    ) -> None:
        """Make the optimizer step, unless there is a fault, without waiting for the device."""
        skip = deferred.add(self.step, sums, norm, indices)
        optimizer: Any = self.optimizer
        if self.scaler.is_enabled():  # it skips steps with infinite gradients by itself
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.found_inf = skip.float()
            optimizer.step()
            del optimizer.found_inf
        optimizer.zero_grad()
        if buffers is not None:
            restore_buffers(self.buffers, buffers, condition=skip)
        self.step += 1
        self.reporter.stepped(self.step, *self._last_means)

    def _fetch_deferred(self) -> bool:
        """Add the sums of the device to the counters; return whether the processes agree to stop.

        Raises TrainingError for a fault, unless `config.on_nan` is "skip".
        """
        assert self.deferred is not None
        fetched, progress = self.deferred.fetch(), self.progress
        if fetched.fault is not None and self.config.on_nan == "stop":
            self.step, loss_sum, norm, indices = fetched.fault
            self._raise_fault(loss_sum, norm, self.config.learning_rate_at(self.step), indices)
        progress.add(fetched.loss_sum, fetched.correct, fetched.images)
        if fetched.images:
            self._last_means = (fetched.loss_sum / fetched.images, fetched.correct / fetched.images)
        self._count_skips(fetched.skipped, fetched.skipped_in_a_row)
        return fetched.stop_requested

    def _count_skips(self, skipped: int, in_a_row: int) -> None:
        """Count steps skipped by `on_nan` or by the scaler. Raises TrainingError for too many of them."""
        progress = self.progress
        progress.skipped += skipped
        progress.skipped_in_a_row = in_a_row
        if in_a_row >= MAX_SKIPPED_IN_A_ROW or progress.skipped == self.config.iterations:
            raise skip_error(self.step, int(in_a_row), self.run_directory.checkpoints)

    def _raise_fault(self, loss_sum: float, norm: float, learning_rate: float, indices: Tensor) -> None:
        """Log a loss or gradient that is not finite, and raise TrainingError."""
        loss = loss_sum / self.config.batch_size
        self._log("fault", loss=loss, gradient_norm=norm, learning_rate=learning_rate, indices=indices.tolist())
        raise fault_error(self.step, loss, learning_rate, indices, self.run_directory.checkpoints)

    def _after_step(self, *, last: bool, stopped: bool) -> None:
        """Log, evaluate and save if it is due."""
        config, progress = self.config, self.progress
        evaluates = self.step % config.eval_every == 0 or last
        if self.step % config.log_every == 0 or last:
            if progress.count:
                self._log(
                    "train",
                    loss=progress.loss_sum / progress.count,
                    accuracy=progress.correct / progress.count,
                    learning_rate=config.learning_rate_at(self.step - 1),
                    skipped=progress.skipped,
                )
            progress.loss_sum = progress.correct = progress.count = 0.0
        saves = self.step % config.checkpoint_every == 0 or last or stopped
        if evaluates or saves:
            self._require_finite()
        if evaluates:
            with self.average.applied():
                self._evaluate()
        if saves or progress.not_better >= self.patience:
            self._save()

    def _require_finite(self) -> None:
        """Raise TrainingError in all processes if something that would be saved is not finite."""
        state = optimizer_tensors(self.optimizer, self.model) | self.protocols.state_dict() | self.average.tensors()
        require_finite_weights(self.model, self.processes, self.step, state, self.run_directory.checkpoints)

    def _log(self, split: str, **values: Any) -> None:
        """Add a row to the metrics, in the main process."""
        if self.processes.is_main:
            row = {"step": self.step, "split": split, **values, "seconds": round(self.progress.seconds, 3)}
            self.run_directory.append(row)
            self.reporter.logged(row)

    def evaluate(self, split: Split | None = None, protocol: str | None = None) -> Evaluation:
        """Evaluate a split, by default the test images, in all processes with the buffers that are saved.

        `protocol` are the BatchNorm statistics, by default the first of `config.bn_eval`.
        """
        protocol = protocol or self.protocols.primary
        config, classes = self.config, len(self.dataset.classes)
        split = self.dataset.test if split is None else split
        options: dict[str, Any] = {"precision": config.precision, "workers": config.workers, "together": self.sharded}
        options |= {"batch_size": config.eval_batch_size, "mixed": protocol == "batch"}
        options["progress"] = self.reporter.evaluating
        if self.step == config.iterations:  # several views take several times as long
            options["tta"] = config.tta
        with self.average.applied():
            self.processes.broadcast(self.model.buffers())
            with self.protocols.applied(protocol):
                return evaluate(self.model, split, classes, self.processes, **options)

    def _evaluate(self) -> None:
        """Evaluate, log, and save the best checkpoint, selected on the validation images if there are any."""
        progress, is_main = self.progress, self.processes.is_main
        first: dict[str, Evaluation] = {}  # with the primary protocol, which is the first
        for name, split in {"test": self.dataset.test, "validation": self.dataset.validation}.items():
            for protocol in (self.protocols.names or (None,)) if split is not None else ():
                evaluation = self.evaluate(split, protocol)
                named = {} if protocol is None else {"protocol": protocol}
                self._log(name, **evaluation.as_row(), **named)
                first.setdefault(name, evaluation)
        progress.accuracy, progress.balanced_accuracy = first["test"].accuracy, first["test"].balanced_accuracy
        if first["test"].tta_accuracy is not None:
            progress.tta_accuracy = first["test"].tta_accuracy
        if warning := single_class_warning(first["test"], self.dataset.classes, "test"):
            self.reporter.warned(warning)
        if self.probes is not None and (is_main or self.sharded):
            batch = probe_batch(self.dataset.test, self.config.eval_batch_size, self.processes.device)
            self._log("probes", **self.probes(self.model, batch))
        selected_on, accuracy = [(name, evaluation.accuracy) for name, evaluation in first.items()][-1]
        if progress.is_best(accuracy, self.step):
            state = {"accuracy": progress.accuracy, "selected_on": selected_on, "selection_accuracy": accuracy}
            write(self, {"model": self.model.state_dict()}, state, best=True)

    def _save(self) -> None:
        """Save a checkpoint, in the main process or, if weights are sharded, in all processes."""
        if self.processes.is_main or self.sharded:
            write(self, *snapshot(self))
