"""The training loop: batches, optimiser steps, evaluations by decoding measures, and saving of the best draft.

Owns their order, the time budget and resumption. accelerate handles precision, accumulation and several processes. Knows neither
a draft's structure nor the origin of its texts.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch
from accelerate import Accelerator

from foresay.checks import check_choice, check_float, check_int
from foresay.errors import ConfigError
from foresay.records.lines import LineWriter
from foresay_lab.training.batches import batch_of, epoch_batches
from foresay_lab.training.checkpoints import State, load_checkpoint, save_checkpoint, trainable_parameters
from foresay_lab.training.evaluation import evaluate
from foresay_lab.training.losses import Objective
from foresay_lab.training.optimisers import OPTIMISERS, make_optimisers
from foresay_lab.training.outputs import Text
from foresay_lab.training.processes import Processes
from foresay_lab.training.students import Student
from foresay_lab.training.teacher import TargetOutputs

LOG = "metrics.jsonl"
CHECKPOINT = "checkpoint"
BATCH_TOKENS = 4096
"""Default tokens of a batch."""
MIN_STEPS = 50
"""Steps for which a run of limited time reduces its default batch."""
_PRECISIONS = {"fp32": "no", "bf16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Training hyperparameters. Raises ConfigError for values out of range."""

    epochs: float = 1.0
    minutes: float | None = None
    """Time limit, which applies in addition to the epochs. The learning rate falls towards whichever end comes first."""
    rate: float = 1e-3
    """Peak learning rate."""
    warmup: float = 0.03
    """Share of the run in which the rate rises."""
    floor: float = 0.05
    """Final rate as a share of the peak."""
    batch_tokens: int | None = None
    """Tokens per batch and process, including padding. None: BATCH_TOKENS, or fewer so that `minutes` allow MIN_STEPS steps."""
    accumulate: int = 1
    """Batches per optimiser step."""
    clip: float = 0.5
    """Largest gradient norm."""
    weight_decay: float = 0.0
    optimiser: str = "muon"
    """"muon" for the matrices between hidden states and AdamW for the rest, or "adamw" for all weights."""
    seed: int = 0
    precision: str = "fp32"
    """"fp32" or "bf16": the dtype of matrix products."""
    evaluate_minutes: float = 5.0
    """Minutes between two evaluations. Each evaluation writes a checkpoint, and saves the draft if it is the best so far."""

    def __post_init__(self) -> None:
        unset = [name for name in ("minutes", "batch_tokens") if getattr(self, name) is None]
        for name in ("epochs", "minutes", "clip", "evaluate_minutes"):
            if name not in unset:
                check_float(name, getattr(self, name), 0.0, 1e6)
        for name in ("rate", "warmup", "floor", "weight_decay"):
            check_float(name, getattr(self, name), 0.0, 1.0)
        for name, least in (("batch_tokens", 2), ("accumulate", 1), ("seed", 0)):
            if name not in unset:
                check_int(name, getattr(self, name), least)
        check_choice("optimiser", self.optimiser, OPTIMISERS)
        check_choice("precision", self.precision, tuple(_PRECISIONS))


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts, and a function from a text's index to the target's outputs for it."""

    texts: Sequence[Text]
    outputs_of: Callable[[int], TargetOutputs]


def affordable_batch(seconds_per_token: float, seconds: float) -> int:
    """Return the batch size in tokens, 2 to BATCH_TOKENS, for which MIN_STEPS steps take at most `seconds`."""
    return max(2, min(BATCH_TOKENS, int(max(0.0, seconds) / MIN_STEPS / seconds_per_token)))


class _InterruptedStepError(KeyboardInterrupt):
    """Ctrl-C in the middle of a step, after which the state is inconsistent and not saved."""


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, since half a step would leave inconsistent weights, and half a save a broken draft.

    A second Ctrl-C is not deferred, and leaves the last checkpoint unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def on_signal(*_: object) -> None:
        nonlocal interrupted
        if interrupted:
            raise _InterruptedStepError
        interrupted = True

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted:
        raise KeyboardInterrupt


class Fitting:
    """One training run."""

    def __init__(
        self,
        student: Student,
        objective: Objective,
        training: Corpus,
        held_out: Corpus,
        plan: Plan,
        folder: Path,
        save: Callable[[], None],
        *,
        settings: dict[str, Any] | None = None,
        on_progress: Callable[[float, str], None] = lambda share, note: None,
        tracker: str | None = None,
    ) -> None:
        """student: its parameters that require gradients are trained.

        save: saves the current draft; called whenever it is the best so far. settings: further settings that must not change on
        resumption. on_progress: called with the share of the run that is done, and a note. tracker: "tensorboard" also logs to
        folder/tensorboard.
        """
        self.objective, self.training, self.held_out, self.plan = objective, training, held_out, plan
        self.folder, self.save, self.on_progress = folder, save, on_progress
        self.device = next(student.parameters()).device
        self.processes = Processes(self.device)
        self.settings = {
            "objective": str(objective),
            **(settings or {}),
            **{k: v for k, v in asdict(plan).items() if k not in ("epochs", "minutes", "evaluate_minutes")},
            "processes": self.processes.count,
        }
        self.accelerator = Accelerator(
            mixed_precision=_PRECISIONS[plan.precision],
            log_with=tracker,
            project_dir=folder / "tensorboard" if tracker else None,
            cpu=self.device.type == "cpu",
            device_placement=False,
        )
        if tracker:
            self.accelerator.init_trackers("foresay")
        self.plain = student
        learned = trainable_parameters(student)
        optimisers = make_optimisers(plan.optimiser, student, learned, plan.rate, plan.weight_decay)
        with self.accelerator.main_process_first():
            self.state = load_checkpoint(folder / CHECKPOINT, self.settings, student, optimisers) or State()
        self.resumed_at = self.state.step
        """Optimiser steps made by earlier runs."""
        # no DistributedDataParallel: gradients are summed over processes in _step
        self.student = self.accelerator.prepare_model(student, evaluation_mode=True)
        self.optimisers = [self.accelerator.prepare_optimizer(one) for one in optimisers]
        self._start = perf_counter() - self.state.elapsed_s
        self._losses: list[float] = []
        self._epoch: tuple[int, list[list[int]]] = (-1, [])
        """An epoch, and its batches in order."""

    def run(self) -> Self:
        """Train to the end of the plan, and return this run. Ctrl-C writes a checkpoint and is raised again."""
        is_main = self.processes.is_main
        header = {"settings": self.settings}
        with LineWriter(self.folder / LOG, "foresay-training", 1, header) if is_main else nullcontext() as log:
            self._log = log
            if self.state.step == 0:
                self._evaluate()
                self._choose_batch()
            evaluated = perf_counter()
            try:
                while (share := self._share()) < 1:
                    with _deferred_interrupt():
                        self._step(share)
                    if self.processes.broadcast_first(perf_counter() - evaluated) >= 60 * self.plan.evaluate_minutes:
                        with _deferred_interrupt():
                            self._evaluate()
                        evaluated = perf_counter()
            except _InterruptedStepError:
                raise
            except KeyboardInterrupt:
                self._checkpoint()
                raise
            if self._losses:
                self._evaluate()
        self.processes.wait()
        self.accelerator.end_training()
        return self

    def _choose_batch(self) -> None:
        """Choose the tokens of a batch: by the plan, or else by the measured time per token and the time limit."""
        plan, chosen = self.plan, self.plan.batch_tokens or BATCH_TOKENS
        if plan.batch_tokens is None and plan.minutes is not None:
            seconds_per_token = self.seconds_per_token()
            remaining = 60 * plan.minutes - (perf_counter() - self._start)
            chosen = affordable_batch(seconds_per_token, remaining / plan.accumulate)
        self.state.batch_tokens = int(self.processes.broadcast_first(chosen))

    def seconds_per_token(self) -> float:
        """Return the training time per token of a text of median length, measured by a pass whose gradients are dropped."""
        texts = self.training.texts
        index = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))[len(texts) // 2]
        seconds = 0.0
        for _ in range(2):  # the first pass also allocates memory
            start = perf_counter()
            total, _ = self.student(batch_of([index], texts, self.training.outputs_of).to(self.device), self.objective)
            self.accelerator.backward(total)
            float(total.detach())  # waits for the device
            seconds = perf_counter() - start
        for one in self.optimisers:
            one.zero_grad()
        return seconds / len(texts[index].tokens)

    def _share(self) -> float:
        """Return the share of the run that is done."""
        state, plan = self.state, self.plan
        state.elapsed_s = perf_counter() - self._start
        batches = max(1, self._batches_of_epoch())
        shares = [(state.epoch + state.batch / batches) / plan.epochs if plan.epochs else 1.0]
        if plan.minutes is not None:
            shares.append(state.elapsed_s / (60 * plan.minutes) if plan.minutes else 1.0)
        return self.processes.broadcast_first(max(shares))

    @property
    def _batch_tokens(self) -> int:
        return self.plan.batch_tokens or self.state.batch_tokens or BATCH_TOKENS

    def _batches_of_epoch(self) -> int:
        count = len(self._order(self.state.epoch)) // self.processes.count
        if not count:
            text = f"leaves fewer batches than the {self.processes.count} processes; reduce it"
            raise ConfigError(text, param="batch_tokens")
        return count

    def _order(self, epoch: int) -> list[list[int]]:
        if self._epoch[0] != epoch:
            self._epoch = epoch, epoch_batches(self.training.texts, self._batch_tokens, self.plan.seed, epoch)
        return self._epoch[1]

    def rate(self, share: float) -> float:
        """Return the learning rate after a share of the run: linear warmup, then half a cosine."""
        plan = self.plan
        if share < plan.warmup:
            return plan.rate * share / plan.warmup
        fall = (share - plan.warmup) / max(1e-9, 1 - plan.warmup)
        return plan.rate * (plan.floor + (1 - plan.floor) * (1 + math.cos(math.pi * min(1.0, fall))) / 2)

    def _step(self, share: float) -> None:
        """Make one optimiser step over the accumulated batches of all processes.

        The loss is the mean over all their distributions, independent of how many each batch and process has.
        """
        rate = self.rate(share)
        for group in (group for one in self.optimisers for group in one.param_groups):
            group["lr"] = rate
        sums = torch.zeros(3, dtype=torch.float64)
        for _ in range(self.plan.accumulate):
            batch = self._next_batch()
            self.plain.begin_batch(hash((self.plan.seed, self.state.epoch, self.state.batch, self.processes.index)))
            total, weight = self.student(batch, self.objective)
            sums += torch.tensor([float(total.detach()), float(weight), float(batch.loss_mask().sum())])
            self.accelerator.backward(total)
        sums = self.processes.summed(sums)
        gradients = [one.grad for one in self.student.parameters() if one.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / max(1.0, float(sums[1])))
        self.processes.sum_in_place(gradients)
        self.accelerator.clip_grad_norm_(self.student.parameters(), self.plan.clip)
        for one in self.optimisers:
            one.step()
            one.zero_grad()
        self._losses.append(float(sums[0] / sums[1].clamp(min=1.0)))
        self.state.tokens += int(sums[2])
        self.state.step += 1
        if self.processes.is_main:
            latest = self._losses[-50:]
            self.on_progress(share, f"loss {sum(latest) / len(latest):.3f}, best {self.state.best:.2f}")

    def _next_batch(self) -> Any:
        state, index, count = self.state, self.processes.index, self.processes.count
        if state.batch >= self._batches_of_epoch():
            state.epoch, state.batch = state.epoch + 1, 0
        indices = self._order(state.epoch)[state.batch * count + index]
        state.batch += 1
        return batch_of(indices, self.training.texts, self.training.outputs_of).to(self.device)

    def _evaluate(self) -> None:
        """Evaluate on the held-out texts, save the draft if it is the best, and write a checkpoint."""
        self.plain.eval()
        texts = self.held_out.texts
        order = epoch_batches(texts, self._batch_tokens, 0, 0)[self.processes.index :: self.processes.count]
        batches = (batch_of(indices, texts, self.held_out.outputs_of) for indices in order)
        quality = evaluate(self.plain, batches, self.device, self.processes.summed)
        self.plain.train()
        state = self.state
        state.elapsed_s = perf_counter() - self._start
        values = {"step": state.step, "tokens": state.tokens, "elapsed_s": round(state.elapsed_s, 1)}
        values |= quality.as_dict()
        if self._losses:
            values["loss"] = round(sum(self._losses) / len(self._losses), 5)
        better = quality.best > state.best
        if self._log is not None:
            self._log.append(values)
            self.accelerator.log({k: v for k, v in values.items() if k != "step"}, step=state.step)
        if better and self.processes.is_main:
            self.save()
        if better:
            state.best, state.best_step = quality.best, state.step
        self._losses.clear()
        self._checkpoint()

    def _checkpoint(self) -> None:
        if self.processes.is_main:
            inner = [getattr(one, "optimizer", one) for one in self.optimisers]
            save_checkpoint(self.folder / CHECKPOINT, self.state, self.settings, self.plain, inner)
