"""The training loop: batches in, steps of the optimiser, evaluations in the terms of decoding, the best draft kept.

Owns the order of these, the budget of time, and what a run that was killed goes on with. accelerate carries precision,
accumulation and several processes. Knows neither what a draft is made of nor where its texts come from.
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
from typing import Any

import torch
from accelerate import Accelerator

from foresay.checks import check_float, check_int
from foresay.errors import ConfigError
from foresay.records.lines import LineWriter
from foresay.training.batches import batch_of, in_order
from foresay.training.checkpoints import State, learned, load_checkpoint, save_checkpoint
from foresay.training.evaluation import evaluate
from foresay.training.losses import Objective
from foresay.training.optimisers import OPTIMISERS, make_optimisers
from foresay.training.outputs import Text
from foresay.training.processes import Processes
from foresay.training.teacher import Shown

LOG = "metrics.jsonl"
CHECKPOINT = "checkpoint"
BATCH_TOKENS = 4096
"""Tokens of a batch by default."""
MIN_STEPS = 50
"""Steps that a run of limited time should make, for which its default batch is made smaller."""
_PRECISIONS = {"fp32": "no", "bf16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to train. Raises ConfigError for values out of range."""

    epochs: float = 1.0
    minutes: float | None = None
    """Ends the run, whatever the epochs; the learning rate falls towards whichever end is nearer."""
    rate: float = 1e-3
    """The learning rate at its height."""
    warmup: float = 0.03
    """Share of the run in which the rate rises."""
    floor: float = 0.05
    """What is left of the rate in the end, as a share of its height."""
    batch_tokens: int | None = None
    """Tokens of a batch and process, pads included; None: BATCH_TOKENS, or fewer so that `minutes` allow MIN_STEPS steps."""
    accumulate: int = 1
    """Batches of a step."""
    clip: float = 0.5
    """Longest gradient."""
    weight_decay: float = 0.0
    optimiser: str = "muon"
    """"muon" for the matrices between hidden states, or "adamw" for everything."""
    seed: int = 0
    precision: str = "fp32"
    """"fp32" or "bf16", what matrix products are computed in."""
    evaluate_minutes: float = 5.0
    """Between two evaluations, each of which is kept if it is the best, and writes a checkpoint."""

    def __post_init__(self) -> None:
        check_float("epochs", self.epochs, 0.0, 1e6)
        if self.minutes is not None:
            check_float("minutes", self.minutes, 0.0, 1e6)
        check_float("rate", self.rate, 0.0, 1.0)
        for name in ("warmup", "floor"):
            check_float(name, getattr(self, name), 0.0, 1.0)
        if self.batch_tokens is not None:
            check_int("batch_tokens", self.batch_tokens, 2)
        check_int("accumulate", self.accumulate, 1)
        check_float("clip", self.clip, 0.0, 1e6)
        check_float("weight_decay", self.weight_decay, 0.0, 1.0)
        check_int("seed", self.seed, 0)
        check_float("evaluate_minutes", self.evaluate_minutes, 0.0, 1e6)
        if self.optimiser not in OPTIMISERS:
            raise ConfigError(f"optimiser={self.optimiser!r} must be one of {', '.join(OPTIMISERS)}")
        if self.precision not in _PRECISIONS:
            raise ConfigError(f"precision={self.precision!r} must be 'fp32' or 'bf16'")

    def binding(self) -> dict[str, Any]:
        """What a run that goes on must agree with: all but its budget."""
        return {k: v for k, v in asdict(self).items() if k not in ("epochs", "minutes", "evaluate_minutes")}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts, and what the target shows of each by its index."""

    texts: Sequence[Text]
    show: Callable[[int], Shown]


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended."""

    state: State
    resumed_at: int
    """Optimiser steps that an earlier run had made."""


def affordable_batch(seconds_per_token: float, seconds: float) -> int:
    """Tokens of a batch, BATCH_TOKENS at most, of which MIN_STEPS take no longer than `seconds`; 2 at least."""
    return max(2, min(BATCH_TOKENS, int(max(0.0, seconds) / MIN_STEPS / seconds_per_token)))


class _TornError(KeyboardInterrupt):
    """Ctrl-C in the middle of a step, from which nothing can go on."""


@contextmanager
def _whole() -> Iterator[None]:
    """Within, Ctrl-C waits for the end, since half a step would be in the weights of one optimiser, and half a draft on disk.

    A second one does not wait, and leaves the last checkpoint as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise _TornError
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


class Fitting:
    """One run."""

    def __init__(
        self,
        student: Any,
        objective: Objective,
        learn: Corpus,
        held_out: Corpus,
        plan: Plan,
        folder: Path,
        keep: Callable[[], None],
        *,
        settings: dict[str, Any] | None = None,
        on_progress: Callable[[float, str], None] = lambda share, note: None,
        tracker: str | None = None,
    ) -> None:
        """student: a module and a Student, whose parameters that want gradients are trained.

        keep: writes the draft as it is, called whenever it is the best so far. settings: what else a run that goes on must agree
        with. on_progress: called with the share of the run that is done. tracker: "tensorboard" also logs to folder/tensorboard.
        """
        self.objective, self.learn, self.held_out, self.plan = objective, learn, held_out, plan
        self.folder, self.keep, self.on_progress = folder, keep, on_progress
        self.device = next(student.parameters()).device
        self.processes = Processes(self.device)
        self.settings = {
            "objective": str(objective),
            **(settings or {}),
            **plan.binding(),
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
        optimisers = make_optimisers(plan.optimiser, student, learned(student), plan.rate, plan.weight_decay)
        with self.accelerator.main_process_first():
            self.state = load_checkpoint(folder / CHECKPOINT, self.settings, student, optimisers) or State()
        self.resumed_at = self.state.step
        self.student = self.accelerator.prepare_model(student, evaluation_mode=True)  # gradients are summed here
        self.optimisers = [self.accelerator.prepare_optimizer(one) for one in optimisers]
        self._began = perf_counter() - self.state.elapsed_s
        self._losses: list[float] = []
        self._known: tuple[int, list[list[int]]] = (-1, [])
        """An epoch, and the order of its batches."""

    def run(self) -> Report:
        """Train to the end of the plan; Ctrl-C leaves a checkpoint, and is raised again."""
        writes = self.processes.writes
        header = {"settings": self.settings}
        with LineWriter(self.folder / LOG, "foresay-training", 1, header) if writes else nullcontext() as log:
            self._log = log
            if self.state.step == 0:
                self._evaluate()
                self._choose_batch()
            evaluated = perf_counter()
            try:
                while (share := self._share()) < 1:
                    with _whole():
                        self._step(share)
                    if self.processes.broadcast_first(perf_counter() - evaluated) >= 60 * self.plan.evaluate_minutes:
                        with _whole():
                            self._evaluate()
                        evaluated = perf_counter()
            except _TornError:
                raise
            except KeyboardInterrupt:
                self._checkpoint()
                raise
            if self._losses:
                self._evaluate()
        self.processes.wait()
        self.accelerator.end_training()
        return Report(self.state, self.resumed_at)

    def _choose_batch(self) -> None:
        """Settle the tokens of a batch, by the time that one text takes where the plan leaves them open and limits the time."""
        plan, chosen = self.plan, self.plan.batch_tokens or BATCH_TOKENS
        if plan.batch_tokens is None and plan.minutes is not None:
            each = self.seconds_per_token()
            left = 60 * plan.minutes - (perf_counter() - self._began)
            chosen = affordable_batch(each, left / plan.accumulate)
        self.state.batch_tokens = int(self.processes.broadcast_first(chosen))

    def seconds_per_token(self) -> float:
        """Seconds that a token of a middling text takes to be learned, by a pass whose gradients are dropped."""
        texts = self.learn.texts
        index = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))[len(texts) // 2]
        seconds = 0.0
        for _ in range(2):  # the first one also allocates
            began = perf_counter()
            total, _ = self.student(batch_of([index], texts, self.learn.show).to(self.device), self.objective)
            self.accelerator.backward(total)
            float(total.detach())  # waits for the device
            seconds = perf_counter() - began
        for one in self.optimisers:
            one.zero_grad()
        return seconds / len(texts[index].tokens)

    def _share(self) -> float:
        """How much of the run is done."""
        state, plan = self.state, self.plan
        state.elapsed_s = perf_counter() - self._began
        batches = max(1, self._batches_of_epoch())
        shares = [(state.epoch + state.batch / batches) / plan.epochs if plan.epochs else 1.0]
        if plan.minutes is not None:
            shares.append(state.elapsed_s / (60 * plan.minutes) if plan.minutes else 1.0)
        return self.processes.broadcast_first(max(shares))

    @property
    def _batch_tokens(self) -> int:
        return self.plan.batch_tokens or self.state.batch_tokens or BATCH_TOKENS

    def _batches_of_epoch(self) -> int:
        found = len(self._order(self.state.epoch)) // self.processes.count
        if not found:
            raise ConfigError(f"there are fewer batches than the {self.processes.count} processes; make them smaller")
        return found

    def _order(self, epoch: int) -> list[list[int]]:
        if self._known[0] != epoch:
            self._known = epoch, in_order(self.learn.texts, self._batch_tokens, self.plan.seed, epoch)
        return self._known[1]

    def rate(self, share: float) -> float:
        """The learning rate after a share of the run: up in a line, down in half a cosine."""
        plan = self.plan
        if share < plan.warmup:
            return plan.rate * share / plan.warmup
        fall = (share - plan.warmup) / max(1e-9, 1 - plan.warmup)
        return plan.rate * (plan.floor + (1 - plan.floor) * (1 + math.cos(math.pi * min(1.0, fall))) / 2)

    def _step(self, share: float) -> None:
        """One step of the optimiser, over as many batches as the plan accumulates and every process has.

        The loss is the mean over all of their laws, however many each batch and process holds.
        """
        rate = self.rate(share)
        for group in (group for one in self.optimisers for group in one.param_groups):
            group["lr"] = rate
        sums = torch.zeros(3, dtype=torch.float64)
        for _ in range(self.plan.accumulate):
            batch = self._next_batch()
            total, weight = self.student(batch, self.objective)
            sums += torch.tensor([float(total.detach()), float(weight), float(batch.taught().sum())])
            self.accelerator.backward(total)
        sums = self.processes.summed(sums)
        self._mean_gradients(1.0 / max(1.0, float(sums[1])))
        self.accelerator.clip_grad_norm_(self.student.parameters(), self.plan.clip)
        for one in self.optimisers:
            one.step()
            one.zero_grad()
        self._losses.append(float(sums[0] / sums[1].clamp(min=1.0)))
        self.state.tokens += int(sums[2])
        self.state.step += 1
        if self.processes.writes:
            latest = self._losses[-50:]
            self.on_progress(share, f"loss {sum(latest) / len(latest):.3f}, best {self.state.best:.2f}")

    def _mean_gradients(self, factor: float) -> None:
        """The sum of all processes' gradients, times a factor."""
        gradients = [one.grad for one in self.student.parameters() if one.grad is not None]
        torch._foreach_mul_(gradients, factor)
        self.processes.add_up(gradients)

    def _next_batch(self) -> Any:
        state, here, many = self.state, self.processes.index, self.processes.count
        if state.batch >= self._batches_of_epoch():
            state.epoch, state.batch = state.epoch + 1, 0
        indices = self._order(state.epoch)[state.batch * many + here]
        state.batch += 1
        return batch_of(indices, self.learn.texts, self.learn.show).to(self.device)

    def _evaluate(self) -> None:
        """Evaluate on what is held out; keep the draft if it is the best, and write a checkpoint."""
        self.plain.eval()
        texts = self.held_out.texts
        order = in_order(texts, self._batch_tokens, 0, 0)[self.processes.index :: self.processes.count]
        batches = (batch_of(indices, texts, self.held_out.show) for indices in order)
        quality = evaluate(self.plain, batches, self.device, self.processes.summed)
        self.plain.train()
        state = self.state
        state.elapsed_s = perf_counter() - self._began
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        values = {
            "step": state.step,
            "tokens": state.tokens,
            "elapsed_s": round(state.elapsed_s, 1),
            **quality.as_dict(),
        }
        values |= {} if loss is None else {"loss": round(loss, 5)}
        better = quality.best > state.best
        if self._log is not None:
            self._log.append(values)
            self.accelerator.log({k: v for k, v in values.items() if k != "step"}, step=state.step)
        if better and self.processes.writes:
            self.keep()
        if better:
            state.best, state.best_step = quality.best, state.step
        self._losses.clear()
        self._checkpoint()

    def _checkpoint(self) -> None:
        if self.processes.writes:
            inner = [getattr(one, "optimizer", one) for one in self.optimisers]
            save_checkpoint(self.folder / CHECKPOINT, self.state, self.settings, self.plain, inner)
