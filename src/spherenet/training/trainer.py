"""The loop: batches in, steps of the optimiser, evaluations, checkpoints, until the iterations are done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.data import Augmentation, Batch, Split
from spherenet.errors import CheckpointError, TrainingError
from spherenet.kernels.dispatch import implementation_name
from spherenet.optim import keep_norms, param_groups
from spherenet.runs import Checkpoint, RunDirectory
from spherenet.training.deferred import DeferredSums, widest_dtype
from spherenet.training.distributed import Processes
from spherenet.training.evaluation import Evaluation, autocast, epoch_seed, evaluate, training_order
from spherenet.training.settings import Settings
from spherenet.training.signals import Reporter, StopRequested, StopSignals
from spherenet.training.state import (
    buffers_of,
    load_model_tensors,
    load_optimizer_tensors,
    number,
    optimizer_tensors,
    put_back_buffers,
)

__all__ = ["Outcome", "Trainer"]

MOST_SKIPPED_IN_A_ROW = 25
"""Steps left out one after the other, after which no further one will be different; a loss scale settles in ten."""

Observer = Callable[[nn.Module, Batch], Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: at which step, by which signal (None: it came to its end), how good it was."""

    step: int
    signal: int | None
    accuracy: float | None
    best_accuracy: float | None
    best_step: int | None
    seconds: float


@dataclass
class _Progress:
    """What a run remembers besides tensors; all of it is in the checkpoint."""

    seconds: float = 0.0
    best_accuracy: float = -1.0
    best_step: int = -1
    accuracy: float = -1.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    # Sums since the last row of training metrics.
    loss_sum: float = 0.0
    correct: float = 0.0
    count: float = 0.0


class Trainer:
    """Trains a model that answers `model(images, labels)` with (loss, scores).

    penalty: what is added to each step's loss, for instance the orthogonality of the sphere layers.
    On a GPU no step waits for the device: sums are fetched when they are logged, saved or evaluated, and a loss
    that is not finite is reported then, with the step at which it arose and the weights as they were before it.
    before_step: told the number of each step before its forward pass, for schedules inside the model.
    observe: makes a row of numbers of the model and one batch of the test split at each evaluation.
    The run directory is written by the main process alone.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Split,
        test: Split,
        num_classes: int,
        settings: Settings,
        processes: Processes,
        run: RunDirectory,
        *,
        augmentation: Augmentation,
        penalty: Callable[[nn.Module], Tensor] | None = None,
        keep_weight_norms: bool = False,
        before_step: Callable[[int], None] | None = None,
        observe: Observer | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self.settings = settings
        self.processes = processes
        self.run_directory = run
        self.train_split, self.test_split, self.num_classes = train, test, num_classes
        self.augmentation = augmentation
        self.penalty, self.before_step, self.observe = penalty, before_step, observe
        self.reporter = (reporter or Reporter()) if processes.is_main else Reporter()
        model = model.to(processes.device)
        if settings.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = _optimizer(model, settings)
        self.kept_norms = keep_norms(self.optimizer, model) if keep_weight_norms else None
        wrapped = processes.wrap(model, sync_batch_norm=settings.sync_batch_norm)
        # SyncBatchNorm may have replaced modules: what is saved and evaluated is what is trained.
        self.model: nn.Module = wrapped.get_submodule("module") if processes.world > 1 else wrapped
        self.ddp = wrapped
        self.forward = torch.compile(wrapped) if settings.compile else wrapped
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=settings.precision == "float16")
        self.progress = _Progress()
        # The CPU has every number at hand; other devices are asked at log points only.
        self.deferred = None if processes.device.type == "cpu" else self._deferred_sums()
        self._shown = (math.nan, math.nan)
        self.step = 0
        self._order()  # a batch that cannot be is refused before anything is written

    def resume(self) -> list[str]:
        """Go on from the newest whole checkpoint; return a sentence for each damaged one that was passed over.

        A run that was killed before its first checkpoint begins again. Raises CheckpointError where all are
        damaged, or where the newest is not of this model.
        """
        checkpoint, complaints = self.run_directory.newest_checkpoint()
        if checkpoint is None:
            if complaints:
                raise CheckpointError(f"{self.run_directory.path} has no valid checkpoint: {complaints[0]}")
            return ["there is no checkpoint yet: the run begins again."]
        source = f"the checkpoint of step {checkpoint.step}"
        load_model_tensors(self.model, checkpoint.tensors.get("model", {}), source)
        remembered = checkpoint.tensors.get("optimizer", {})
        complaints += load_optimizer_tensors(self.optimizer, self.model, remembered, source)
        if self.kept_norms is not None:
            self.kept_norms.load_state_dict(checkpoint.tensors.get("kept_norms", {}))
        if self.scaler.is_enabled() and "scaler" in checkpoint.state:  # it is not where the precision was changed
            scaling = {name: number(checkpoint.state["scaler"], name) for name in self.scaler.state_dict()}
            self.scaler.load_state_dict(scaling)
        counters = checkpoint.state.get("progress", {})
        if isinstance(counters, Mapping):
            counters = {"skipped_in_a_row": 0, **counters}  # earlier versions had none
        self.progress = _Progress(**{name: number(counters, name) for name in asdict(self.progress)})  # type: ignore[arg-type]
        self.progress.best_step = int(self.progress.best_step)
        self.step = checkpoint.step
        if self.progress.best_step not in self.run_directory.checkpoints.steps("best", up_to=self.step):
            # A later one took its place and is made again, or not: with other options the run is another one from here.
            self.progress.best_accuracy, self.progress.best_step = -1.0, -1
        before, now = checkpoint.state.get("implementation"), implementation_name(self.processes.device.type)
        if isinstance(before, str) and before != now:
            complaints.append(
                f"{source} was computed by the implementation {before[:40]!r}, now {now!r} computes: "
                "results differ by rounding from those of a run that was never interrupted."
            )
        return complaints

    def train(self, stop: StopSignals) -> Outcome:
        """Train from where the run is to its end, or to the step at which a signal asks it to leave.

        Raises TrainingError at a loss or gradient that is not finite, unless the settings say to skip such steps.
        """
        settings = self.settings
        pieces = self.train_split.batches(
            self._order(),
            device=self.processes.device,
            augmentation=self.augmentation,
            seed=settings.seed,
            workers=settings.workers,
            while_waiting=stop.check,
        )
        self.model.train()
        self.reporter.started(self.step, settings.iterations)
        began = time.monotonic() - self.progress.seconds
        stopped = False
        try:
            with stop.deferred():
                while self.step < settings.iterations and not stopped:
                    stopped = self._step(pieces, stop)
                    if self.deferred is not None and (stopped or self._something_is_due()):
                        stopped = self._fetch_deferred() or stopped
                    self.progress.seconds = time.monotonic() - began
                    self._after_step(last=self.step == settings.iterations, stopped=stopped)
        except StopRequested:
            # No batch came. Before the first piece of a step nothing has changed since the last one: it can be saved.
            if settings.accumulate > 1 or self.processes.world > 1:
                raise
            if self.deferred is not None:
                self._fetch_deferred()
            self._require_finite_weights()
            self._save()
            stopped = True
        finally:
            self.reporter.finished()
            close = getattr(pieces, "close", None)  # ends the workers of a loader
            if close is not None:
                close()
        progress = self.progress
        evaluated = progress.best_step >= 0
        return Outcome(
            self.step,
            (stop.received or 15) if stopped and self.step < settings.iterations else None,
            progress.accuracy if evaluated else None,
            progress.best_accuracy if evaluated else None,
            progress.best_step if evaluated else None,
            progress.seconds,
        )

    def _deferred_sums(self) -> DeferredSums:
        settings = self.settings
        return DeferredSums(self.processes.device, settings.batch_size, sticky=settings.on_nan == "stop")

    def _something_is_due(self) -> bool:
        """Whether a row of metrics, an evaluation or a checkpoint follows this step."""
        settings = self.settings
        every = (settings.log_every, settings.eval_every, settings.checkpoint_every)
        return self.step == settings.iterations or any(self.step % interval == 0 for interval in every)

    def _order(self) -> Iterator[tuple[int, Tensor]]:
        settings = self.settings
        return training_order(
            len(self.train_split),
            settings.batch_size,
            settings.seed,
            self.step,
            self.processes.share,
            settings.accumulate,
        )

    def _step(self, pieces: Iterator[Batch], stop: StopSignals) -> bool:
        """Make one step of the optimiser; return whether the processes agree to leave after it."""
        settings, processes = self.settings, self.processes
        # What a network draws (dropout) depends on seed, step and process: nothing to save, nothing to restore.
        torch.manual_seed(epoch_seed(settings.seed, self.step * processes.world + processes.rank))
        learning_rate = settings.learning_rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        buffers = buffers_of(self.model) if settings.on_nan == "skip" else None
        wide = widest_dtype(processes.device)
        # loss, correct, not finite, to leave, left out by the scaler
        sums = torch.zeros(5, dtype=wide, device=processes.device)
        seen: list[Tensor] = []
        for piece in range(settings.accumulate):
            last = piece == settings.accumulate - 1
            batch = next(pieces)
            seen.append(batch.indices)
            with nullcontext() if last or processes.world == 1 else self.ddp.no_sync():  # type: ignore[operator]
                loss, correct = self._forward_backward(batch, add_penalty=last)
            sums[0] += loss.to(wide) * len(batch.labels)
            sums[1] += correct
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # Infinite float16 gradients are ordinary: the scaler leaves that step out and scales less.
        finite = sums[0].isfinite() & (norm.isfinite() | self.scaler.is_enabled())
        sums[2] = ~finite
        sums[3] = stop.received is not None
        sums[4] = ~norm.isfinite()
        if self.deferred is not None:
            # Several processes agree when the sums are fetched.
            leaving_alone = processes.world == 1 and stop.received is not None
            self._conclude_on_device(self.deferred, sums, norm, torch.cat(seen), buffers)
            return leaving_alone
        loss_sum, correct_sum, faults, leaving, overflows = processes.total(sums).tolist()
        if faults and settings.on_nan == "stop":
            self._refuse_to_go_on(loss_sum / settings.batch_size, norm.item(), learning_rate, torch.cat(seen))
        self._count_skips(skipped=bool(faults or overflows))
        if faults:
            self.scaler.update()  # it has seen the gradients; the next step's are new to it
            self.optimizer.zero_grad()
            assert buffers is not None
            put_back_buffers(self.model, buffers)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.progress.loss_sum += loss_sum
            self.progress.correct += correct_sum
            self.progress.count += settings.batch_size
        self.step += 1
        self.reporter.stepped(self.step, loss_sum / settings.batch_size, correct_sum / settings.batch_size)
        return bool(leaving)

    def _conclude_on_device(
        self, deferred: DeferredSums, sums: Tensor, norm: Tensor, indices: Tensor, buffers: list[Tensor] | None
    ) -> None:
        """Let the optimizer make its step unless the device finds a fault, without waiting for the device."""
        left_out = deferred.add(self.step, self.processes.total_on_device(sums), norm, indices)
        optimizer: Any = self.optimizer
        if self.scaler.is_enabled():  # it leaves out steps with infinite gradients by itself
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.found_inf = left_out.float()
            optimizer.step()
            del optimizer.found_inf
        optimizer.zero_grad()
        if buffers is not None:
            put_back_buffers(self.model, buffers, where=left_out)
        self.step += 1
        self.reporter.stepped(self.step, *self._shown)

    def _fetch_deferred(self) -> bool:
        """Take over what the device has summed up; return whether the processes agree to leave.

        Raises TrainingError at a fault, unless the settings say to skip such steps.
        """
        assert self.deferred is not None
        fetched, settings = self.deferred.fetch(), self.settings
        if fetched.fault is not None and settings.on_nan == "stop":
            fault = fetched.fault
            self.step = fault.step
            rate = settings.learning_rate_at(fault.step)
            self._refuse_to_go_on(fault.loss_sum / settings.batch_size, fault.norm, rate, fault.indices)
        progress = self.progress
        progress.loss_sum += fetched.loss_sum
        progress.correct += fetched.correct
        progress.count += fetched.images
        if fetched.images:
            self._shown = (fetched.loss_sum / fetched.images, fetched.correct / fetched.images)
        progress.skipped += fetched.skipped
        progress.skipped_in_a_row = fetched.skipped_in_a_row
        self._refuse_endless_skips()
        return fetched.leaving

    def _count_skips(self, *, skipped: bool) -> None:
        """Count a step that is left out, by `on_nan` or by the scaler; TrainingError when there is no end to them."""
        progress = self.progress
        progress.skipped += skipped
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if skipped else 0
        self._refuse_endless_skips()

    def _refuse_endless_skips(self) -> None:
        progress = self.progress
        none_left = progress.skipped == self.settings.iterations
        if progress.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW or none_left:
            raise TrainingError(
                f"the loss or its gradient is not finite at step {self.step}, as in the "
                f"{int(progress.skipped_in_a_row) - 1} steps before it; the last checkpoint is intact, "
                "a lower learning rate or another precision may help."
            )

    def _require_finite_weights(self) -> None:
        """Raise TrainingError in all processes if a weight or buffer is not finite: such a model is never saved."""
        tensors = {name: tensor for name, tensor in self.model.state_dict().items() if tensor.is_floating_point()}
        bad = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
        if self.processes.total(torch.tensor(float(bool(bad)), device=self.processes.device)).item():
            which = f" ({bad[0]} is the first)" if bad else ""
            raise TrainingError(
                f"weights are not finite after step {self.step}{which}; the last checkpoint is intact, "
                "a lower learning rate may help."
            )

    def _forward_backward(self, batch: Batch, *, add_penalty: bool) -> tuple[Tensor, Tensor]:
        """Add the gradient of a piece of the batch; return its mean loss and how many it got right."""
        if self.before_step is not None:
            self.before_step(self.step)
        with autocast(self.processes.device, self.settings.precision):
            loss, scores = self.forward(batch.images, batch.labels)
        # DDP takes the mean over processes: each piece counts by its pictures, whatever the sizes of the parts.
        total = loss * (len(batch.labels) * self.processes.world / self.settings.batch_size)
        if add_penalty and self.penalty is not None:
            total = total + self.penalty(self.model)
        self.scaler.scale(total).backward()
        return loss.detach(), (scores.detach().argmax(1) == batch.labels).sum()

    def _after_step(self, *, last: bool, stopped: bool) -> None:
        """Log, evaluate and save where it is time to."""
        settings = self.settings
        evaluates = self.step % settings.eval_every == 0 or last
        saves = self.step % settings.checkpoint_every == 0 or last or stopped
        if self.step % settings.log_every == 0 or last:
            self._log_training()
        if evaluates or saves:
            self._require_finite_weights()
        if evaluates:
            self._evaluate()
        if saves:
            self._save()

    def _log_training(self) -> None:
        progress = self.progress
        if progress.count:
            self._log(
                "train",
                loss=progress.loss_sum / progress.count,
                accuracy=progress.correct / progress.count,
                learning_rate=self.settings.learning_rate_at(self.step - 1),
                skipped=progress.skipped,
            )
        progress.loss_sum = progress.correct = progress.count = 0.0

    def _evaluate(self) -> None:
        evaluation = self.evaluate()
        self._log("test", loss=evaluation.loss, accuracy=evaluation.accuracy, count=evaluation.count)
        progress = self.progress
        progress.accuracy = evaluation.accuracy
        if self.observe is not None and self.processes.is_main:
            self._log("observed", **self.observe(self.model, self._first_test_batch()))
        if evaluation.accuracy > progress.best_accuracy:
            progress.best_accuracy, progress.best_step = evaluation.accuracy, self.step
            if self.processes.is_main:
                best = Checkpoint(self.step, {"model": self.model.state_dict()}, {"accuracy": evaluation.accuracy})
                self.run_directory.save(best, best=True)

    def evaluate(self) -> Evaluation:
        """Evaluate the model as it is on the test split, in all processes with the buffers that are saved."""
        settings = self.settings
        self.processes.share_buffers(self.model)
        return evaluate(
            self.model,
            self.test_split,
            self.num_classes,
            self.processes,
            batch_size=settings.eval_batch_size,
            precision=settings.precision,
            workers=settings.workers,
        )

    def _first_test_batch(self) -> Batch:
        order = iter([(0, torch.arange(min(len(self.test_split), self.settings.eval_batch_size)))])
        return next(iter(self.test_split.batches(order, device=self.processes.device, augmentation=None)))

    def _save(self) -> None:
        if not self.processes.is_main:
            return
        tensors: dict[str, Mapping[str, Tensor]] = {
            "model": self.model.state_dict(),
            "optimizer": optimizer_tensors(self.optimizer, self.model),
        }
        if self.kept_norms is not None:
            tensors["kept_norms"] = self.kept_norms.state_dict()
        state: dict[str, Any] = {
            "progress": asdict(self.progress),
            "world": self.processes.world,
            "implementation": implementation_name(self.processes.device.type),
        }
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        self.run_directory.save(Checkpoint(self.step, tensors, state))

    def _log(self, split: str, **numbers: Any) -> None:
        if self.processes.is_main:
            row = {"step": self.step, "split": split, **numbers, "seconds": round(self.progress.seconds, 3)}
            self.run_directory.append(row)
            self.reporter.logged(row)

    def _refuse_to_go_on(self, loss: float, norm: float, learning_rate: float, indices: Tensor) -> None:
        self._log("fault", loss=loss, gradient_norm=norm, learning_rate=learning_rate, indices=indices.tolist())
        what = "gradient" if math.isfinite(loss) else "loss"
        shown = ", ".join(map(str, indices[:8].tolist())) + (", …" if len(indices) > 8 else "")
        raise TrainingError(
            f"the {what} is not finite at step {self.step} (loss {loss:g}, learning rate {learning_rate:g}, training "
            f"pictures {shown}); the last checkpoint is intact, --on-nan skip leaves such steps out."
        )


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = param_groups(model, settings.weight_decay)
    if settings.decay_all:
        for group in groups:
            group["weight_decay"] = settings.weight_decay
    if settings.optimizer == "adam":
        return torch.optim.Adam(groups, lr=settings.learning_rate, fused=True)
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, fused=True)
