"""Predictions of the lab against live runs on SmolLM2-135M: replays, tuning, simulated load; and what two workers gain.

    python benchmarks/lab.py [--quick] [--only PART ...] [--keep FILE] [--write]

The shipped prompts and those of benchmarks/prompts.json are split into halves. Half A is recorded and profiled; from it the
throughput of every drafter x length x batch size is predicted, and written to a results file before half B is run. Then every
configuration decodes prompts of half B live, plain decoding between them. Tuning sees half A alone and is compared with the
best of the sweep on half B, both run again in turn.

A shared machine drifts: plain decoding alone may be a third faster after half an hour. So two things are compared: the predicted
throughput, and the predicted gain over plain decoding times the throughput of plain decoding next to it.

Floor: a pass reads 269 MB of weights, however many tokens it scores; a replay reads none of them, so that its cost is foresay's
own loop.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from common import HERE, MODEL, Figures, arguments, log, measured, parsed, publish, spread, table

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.method import PLAIN, Method
from foresay.lengths import ConstantLength
from foresay.records.profile import Profile
from foresay.records.recording import Recording
from foresay.records.results import Cell, Prediction, Results, Run
from foresay.spec.recipes import read_drafter, read_length
from foresay_lab.bench.bench import BenchSettings, Progress, bench
from foresay_lab.bench.runners import sampling_name
from foresay_lab.candidates import pick
from foresay_lab.data.datasets import halves, load_items, subset
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.measure.live_run import run_live
from foresay_lab.measure.profile import measure, medians
from foresay_lab.replay.arrivals import poisson
from foresay_lab.replay.record import record
from foresay_lab.replay.replay import replay
from foresay_lab.replay.simulate import SimulatedLoad, simulate
from foresay_lab.tune import Tuner
from foresay_lab.workers import work
from foresay_lab.workers.pool import Pool
from foresay_lab.workers.processes import Processes

LEGEND = {
    "replay_cost_share": ("time of a replay / of live decoding, the slowest n-gram drafter", ""),
    "predicted_within_10pct": ("share of gains predicted within 10%, or twice the spread", ""),
    "predicted_within_10pct_strictly": ("share of gains predicted within 10%", ""),
    "median_error": ("median error of a predicted gain", ""),
    "with_drift_within_10pct": ("the same of throughputs, drift of the machine included", ""),
    "with_drift_within_10pct_strictly": ("the same of throughputs within 10%", ""),
    "bound": ("the larger of 10% and twice the spread", ""),
    "plain_spread": ("difference between neighbouring runs of plain decoding", ""),
    "tune_gap": ("how much slower the tuned method is than the best", ""),
    "tune_time_share": ("time of tuning / of the sweep", ""),
    "workers2_gain": ("two processes / one", ">= 1.5"),
    "load_throughput_error": ("largest error of simulated throughput under load", "<= 0.15"),
    "load_latency_error": ("largest error of simulated mean latency under load", "<= 0.15"),
}
DRAFTERS = ("prompt_lookup", "max_gram", "ngram_store", "suffix", "self(6)")
GAMMAS = (1, 2, 3, 4, 6, 8)
BATCHES = (1, 8)
ROWS = 8
"""Most rows under load."""
PROFILE_EVERY_S = 4.0
"""Seconds of a load between two measurements of its forward passes."""


def replay_cost(target: Any, tokens: int) -> dict[str, float]:
    """Time to replay one output of about 1,000 tokens over the time to decode it live, for each n-gram drafter."""
    [item] = [item for item in load_items() if item.id == "editing-01"]
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        recording = record(target, [item], Path(folder) / "one.jsonl", params)
    asks = RequestBuilder(target).first([item])
    shares = {}
    for drafter in DRAFTERS[:4]:
        method = Method(drafter, "4")
        live = run_live(method.generator(target, 1), asks, params)
        build = method.generator(target, 1).make_drafter
        took = min(replay(recording, build(), ConstantLength(4)).seconds for _ in range(3))
        shares[drafter] = took / live.seconds
        log(f"  replay of {recording.num_tokens} tokens, {drafter}: {took:.3f} s of {live.seconds:.1f} s live")
    return shares


def sweep_methods() -> list[Method]:
    return [Method(drafter, str(gamma)) for drafter in DRAFTERS for gamma in GAMMAS]


class Sweep:
    def __init__(self, quick: bool, folder: Path) -> None:
        self.new = 16 if quick else 20
        self.folder = folder
        self.params = SamplingParams(max_new_tokens=self.new, ignore_eos=True)
        self.target = foresay.load(MODEL, drafter="none", dtype="bf16", max_batch_size=16)
        others = [replace(item, id=f"prompts/{item.id}") for item in load_items(str(HERE / "prompts.json"))]
        # the same mix of categories and lengths in both: otherwise the comparison would be one of prompts
        self.seen, self.unseen = halves([*load_items(), *others])
        # three quarters of half B, of every category and length, to save time
        ranked = sorted(self.unseen, key=lambda item: (item.category, len(str(item.prompt))))
        self.unseen = [item for i, item in enumerate(ranked) if i % 4 != 3]
        if quick:
            self.seen, self.unseen = subset(self.seen, 35), subset(self.unseen, 14)
        self.tuner: Tuner
        self.seconds: dict[str, float] = {}

    def predict(self) -> list[Prediction]:
        """Record and profile half A, and predict every configuration. Nothing of half B has been run."""
        began = perf_counter()
        recording = record(self.target, self.seen, self.folder / "a.jsonl", self.params)
        self.seconds["record"] = perf_counter() - began
        self.tuner = Tuner(self.target, recording)
        candidates = self.tuner.search(sweep_methods(), BATCHES)
        self.seconds |= self.tuner.tuning.seconds
        assert not self.tuner.tuning.failed, self.tuner.tuning.failed
        return [
            Prediction(
                Cell(c.method.name, "half B", c.batch_size, sampling_name(self.params)),
                c.expected.tokens_per_s,
                c.expected.tokens_per_pass,
            )
            for c in candidates
            if c.expected is not None  # None: a replay cannot predict it
        ]

    def tune(self) -> dict[int, str]:
        """The method that tuning picks at each batch size, with a short live run of the best three."""
        chosen = {}
        for size in BATCHES:
            candidates = [c for c in self.tuner.tuning.candidates if c.batch_size == size]
            best, _ = pick(candidates, count=3)
            began = perf_counter()
            self.tuner.confirm(best)
            self.seconds["confirm"] = self.seconds.get("confirm", 0.0) + perf_counter() - began
            chosen[size] = self.tuner.tuning.best.candidate.method.name if self.tuner.tuning.best else PLAIN
        return chosen

    def run(self, predictions: list[Prediction], path: Path) -> Results:
        """Run every configuration live over half B."""
        began = perf_counter()
        settings = self.settings(sweep_methods(), BATCHES, self.unseen, repeats=1, between=5)
        results = bench(self.target, settings, path, predictions=predictions, on_run=report)
        self.seconds["sweep"] = perf_counter() - began
        return results

    def again(self, size: int, names: set[str]) -> dict[str, float]:
        """Speed-ups of some methods, each run three times in turn with plain decoding."""
        methods = [method for method in sweep_methods() if method.name in names]
        settings = self.settings(methods, (size,), self.unseen[::3], repeats=3, between=1)
        runs = bench(self.target, settings, self.folder / f"again-{size}.jsonl", on_run=report).runs
        gains: dict[str, list[float]] = {}
        for run in runs:
            gains.setdefault(run.cell.method, []).append(1.0 if run.speed_up is None else run.speed_up)
        return {name: statistics.median(found) for name, found in gains.items()} | {PLAIN: 1.0}

    def settings(
        self, methods: list[Method], sizes: tuple[int, ...], items: list[PromptItem], *, repeats: int, between: int
    ) -> BenchSettings:
        return BenchSettings(
            methods=methods,
            datasets={"half B": RequestBuilder(self.target).first(items)},
            params=(self.params,),
            batch_sizes=sizes,
            repeats=repeats,
            between=between,
        )


def report(progress: Progress) -> None:
    if isinstance(progress.last, Run):
        log(f"  {progress.done}/{progress.total} {progress.last.cell}: {progress.last.speed_up:.2f}x")


def compare(results: Results) -> tuple[list[dict[str, Any]], float]:
    """Predicted and measured values of each cell, and the spread of neighbouring runs of plain decoding."""
    predicted = {one.cell: one for one in results.predictions}
    plain: dict[int, list[float]] = {}
    for run in results.runs:
        if run.cell.method == PLAIN:
            plain.setdefault(run.cell.batch_size, []).append(run.seconds)
    apart = max(map(spread, plain.values()))
    rows = []
    for run in results.runs:
        if run.cell in predicted and run.cell.method != PLAIN:
            one = predicted[run.cell]
            gain = one.tokens_per_s / predicted[replace(run.cell, method=PLAIN)].tokens_per_s
            assert run.speed_up is not None
            rows.append(
                {
                    "method": run.cell.method,
                    "batch": run.cell.batch_size,
                    "predicted": one.tokens_per_s,
                    "measured": run.tokens_per_s,
                    "error": one.tokens_per_s / run.tokens_per_s - 1,
                    "gain": gain,
                    "gain_error": gain / run.speed_up - 1,
                    "speed_up": run.speed_up,
                    "identical": run.identical,
                }
            )
    return rows, apart


def share(rows: list[dict[str, Any]], error: str, bound: float) -> float:
    return sum(bool(abs(row[error]) <= bound) for row in rows) / len(rows)


def tune_gap(sweep: Sweep, rows: list[dict[str, Any]], chosen: dict[int, str]) -> float:
    """How much slower the tuned method is than the best of the sweep on half B, at the worse batch size.

    The highest of 30 noisy figures is too high, so the best three and the tuned method are run again.
    """
    gaps = []
    for size, name in chosen.items():
        swept = {row["method"]: row["speed_up"] for row in rows if row["batch"] == size}
        gains = sweep.again(size, {name, *sorted(swept, key=lambda n: -swept[n])[:3]})
        gaps.append(1 - gains[name] / max(gains.values()))
        best = max(gains, key=lambda n: gains[n])
        log(f"  batch {size}: tuned {name} {gains[name]:.2f}x, best {best} {gains[best]:.2f}x")
    return max(gaps)


def rows_table(rows: list[dict[str, Any]]) -> str:
    header = (
        "drafter",
        "length",
        "batch",
        "tokens/s, predicted",
        "measured",
        "error",
        "gain, predicted",
        "measured",
        "error",
    )
    out = []
    for row in sorted(rows, key=lambda r: (r["batch"], r["method"])):
        drafter, length = row["method"].rsplit(", ", 1)
        rates = (f"{row['predicted']:.1f}", f"{row['measured']:.1f}", f"{100 * row['error']:+.0f}%")
        gains = (f"{row['gain']:.2f}x", f"{row['speed_up']:.2f}x", f"{100 * row['gain_error']:+.0f}%")
        out.append((drafter, length, row["batch"], *rates, *gains))
    return table(header, out)


def workers(quick: bool) -> Figures:
    """Prompts answered by two processes of one thread against one process of one thread; loading is not timed."""
    items = subset(load_items(), 12 if quick else 32)
    params = foresay.SamplingParams(max_new_tokens=32 if quick else 64, ignore_eos=True)
    load = {"target": MODEL, "drafter": "none", "dtype": "bf16", "max_batch_size": 8}
    setup = work.record_setup(load, items, params, chat=True)
    took: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(1 if quick else 3):
        for count in took:
            with Pool(Processes(setup, count, threads=1), count) as pool, tempfile.TemporaryDirectory() as folder:
                began = perf_counter()
                work.record(pool, items, Path(folder) / "r.jsonl")
                took[count].append(perf_counter() - began)
    one, two = (statistics.median(times) for times in took.values())
    log(f"  one worker {one:.1f} s, two {two:.1f} s")
    return {"workers2_gain": one / two}


def load(quick: bool) -> Figures:
    """Largest errors of simulated load against live load: three rates, plain and with the suffix drafter."""
    target = foresay.load(MODEL, drafter="none", dtype="bf16")
    items = subset(load_items(), 12 if quick else 36)
    params = foresay.SamplingParams(max_new_tokens=32 if quick else 64)
    with tempfile.TemporaryDirectory() as folder:
        saved = record(target.with_settings(max_batch_size=ROWS), items, Path(folder) / "r.jsonl", params)
    full = simulate(saved, profile(target), [0.0] * len(items), None, read_length("0"), batch_size=ROWS)
    most = len(items) / full.seconds
    errors: dict[str, list[float]] = {"throughput": [], "latency": []}
    for drafter in ("none", "suffix"):
        for share in (0.3, 0.6, 0.9):
            arrivals = poisson(share * most, len(items), seed=1)
            simulated, (tokens_per_s, latency_s) = both(target, drafter, saved, arrivals, params)
            errors["throughput"].append(abs(simulated.tokens_per_s / tokens_per_s - 1))
            errors["latency"].append(abs(simulated.mean("latency") / latency_s - 1))
            log(
                f"  {drafter:<7} {share * most:.2f}/s: {simulated.tokens_per_s:6.1f} tokens/s simulated, {tokens_per_s:6.1f} "
                f"live; mean latency {simulated.mean('latency'):.2f} s simulated, {latency_s:.2f} live"
            )
    return {f"load_{name}_error": max(found) for name, found in errors.items()}


def profile(target: foresay.Generator) -> Profile:
    """The time of forward passes at this moment, measured in a few seconds."""
    return measure(
        target, batches=(1, 2, 4, ROWS), columns=(1, 3, 13), contexts=(128, 384), fills=(16, 64, 256), repeats=2
    )


def both(
    target: foresay.Generator,
    drafter: str,
    saved: Recording,
    times: Sequence[float],
    params: foresay.SamplingParams,
) -> tuple[SimulatedLoad, tuple[float, float]]:
    """A simulated load, and `live` of the same load, with passes measured before, during and after it."""
    method, profiles = Method(drafter), [profile(target)]
    generator = method.generator(target, ROWS)
    measured_live = live(generator, saved, times, params, lambda: profiles.append(profile(target)))
    profiles.append(profile(target))
    policy = read_length(method.own_length if drafter != "none" else 0)
    made = read_drafter(drafter).prepare(target.resources)() if target.resources else None
    return simulate(saved, medians(profiles), times, made, policy, batch_size=ROWS), measured_live


def live(
    generator: foresay.Generator,
    saved: Recording,
    times: Sequence[float],
    params: foresay.SamplingParams,
    aside: Callable[[], None],
) -> tuple[float, float]:
    """Run a load live: (tokens/s from the first arrival to the last token, mean seconds from arrival to end).

    aside: called between two steps about every PROFILE_EVERY_S seconds, while the clock of the load is stopped. The speed of
    a shared machine changes within a minute, so a profile measured before or after a load does not describe it.
    """
    generator.generate([list(saved.records[0].prompt)], replace(params, max_new_tokens=8))  # warm
    session = generator.session()
    arrived: dict[int, float] = {}
    ended: dict[int, float] = {}
    tokens, began, due = 0, perf_counter(), PROFILE_EVERY_S
    while len(ended) < len(times):
        now = perf_counter() - began
        if now >= due:
            aside()
            due = now + PROFILE_EVERY_S
            began = perf_counter() - now
        while len(arrived) < len(times) and times[len(arrived)] <= now:
            record = saved.records[len(arrived)]
            number = session.submit(list(record.prompt), params, text=False)
            arrived[number] = times[len(arrived)]
        if not session.has_work:
            sleep(max(0.0, times[len(arrived)] - now))
            continue
        for chunk in session.step():
            tokens += len(chunk.step.token_ids)
            if chunk.finish_reason is not None:
                ended[chunk.index] = perf_counter() - began
    return tokens / (max(ended.values()) - times[0]), statistics.fmean(ended[i] - arrived[i] for i in ended)


def predictions(args: argparse.Namespace, text: list[str]) -> Figures:
    """Predicted throughput and tuning on half A of the prompts, measured on half B. text: gets the table."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(args.quick, Path(folder))
        log("replay against live decoding")
        shares = replay_cost(sweep.target, 300 if args.quick else 1000)
        log("predicting from half A")
        predicted = sweep.predict()
        log(f"tuning on half A ({', '.join(f'{k} {v:.0f} s' for k, v in sweep.seconds.items())})")
        chosen = sweep.tune()
        path = args.keep or Path(folder) / "results.jsonl"
        log(f"running half B, {len(predicted)} predictions written to {path}")
        rows, apart = compare(sweep.run(predicted, path))
        gap = tune_gap(sweep, rows, chosen)
    bound = max(0.1, 2 * apart)
    tuning = sum(v for k, v in sweep.seconds.items() if k != "sweep")
    figures: Figures = {
        "replay_cost_share": max(shares.values()),
        "predicted_within_10pct": share(rows, "gain_error", bound),
        "predicted_within_10pct_strictly": share(rows, "gain_error", 0.1),
        "median_error": statistics.median(abs(row["gain_error"]) for row in rows),
        "with_drift_within_10pct": share(rows, "error", bound),
        "with_drift_within_10pct_strictly": share(rows, "error", 0.1),
        "bound": bound,
        "plain_spread": apart,
        "tune_gap": gap,
        "tune_time_share": tuning / sweep.seconds["sweep"],
        "identical": all(row["identical"] for row in rows),
    }
    text.append(
        f"Predicted from half A of the prompts ({len(sweep.seen)}), measured on half B ({len(sweep.unseen)}); {sweep.new} tokens "
        f"each, greedy, tokens per second with prompts included. Tuned on half A: "
        f"{', '.join(f'batch {size}: {name}' for size, name in chosen.items())}."
    )
    text.append(rows_table(rows))
    return figures


def main() -> int:
    parser = arguments(__doc__, parts=("predictions", "workers", "load"))
    parser.add_argument("--keep", type=Path, help="keep the results file here; a stopped run is resumed from it")
    args, text = parsed(parser), list[str]()
    parts = {
        "predictions": partial(predictions, args, text),
        "workers": partial(workers, args.quick),
        "load": partial(load, args.quick),
    }
    return measured(parts, args.only, partial(publish, "lab", args=args, legend=LEGEND, text=text))


if __name__ == "__main__":
    sys.exit(main())
