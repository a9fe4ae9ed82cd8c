"""Runner shared by the benchmark scripts: arguments, runs in turn, medians, and tables in RESULTS.md.

Every table names the conditions of its measurement: `publish` writes the processor, its instruction sets, the model, the date
and the commit above the figures, and `--write` is refused where no commit is known. The last line that a script prints is one
JSON object with its figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import foresay
from foresay.decoding.protocols import Logits, ModelInput
from foresay.generation.method import Method
from foresay.integrations.vllm_arguments import model_folder
from foresay.models.sources.packaged import packaged_file
from foresay.records.provenance import machine
from foresay.records.results import Run
from foresay.threads import single_threaded
from foresay_lab.bench.runners import MethodRunner, PromptBlock, Runner, take_turns
from foresay_lab.bench.transformers import TransformersRunner
from foresay_lab.data.datasets import load_items, subset
from foresay_lab.data.requests import PromptRequest, RequestBuilder
from foresay_lab.measure.live_run import Outcome

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
MODEL = "smollm2-135m"
CONTEXT = 128
"""Tokens of context before a timed forward pass."""
INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "BF16",
    "amx_tile": "AMX",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "BF16",
    "sve": "SVE",
}
"""Flags in /proc/cpuinfo, and the names under which they are published."""
Figures = dict[str, Any]
Part = Callable[[], Figures]
Legend = Mapping[str, tuple[str, str]]
"""Key of a figure -> (description, wanted value such as ">= 1.2" or "")."""


class Engine:
    """Another engine in an interpreter of its own; see engines.py."""

    def __init__(self, stack: ExitStack, python: str, kind: str, **arguments: Any) -> None:
        """arguments: of the engine's class, without threads. The process ends with the stack."""
        pipe, command = subprocess.PIPE, [python, str(HERE / "engines.py"), kind]
        given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=given)
        )
        stack.callback(self._process.stdin.close)  # type: ignore[union-attr]
        self._request({"threads": torch.get_num_threads(), **arguments})

    def __call__(self, method: str, **arguments: Any) -> Any:
        """Call a method of the engine. Raises RuntimeError with the engine's error."""
        return self._request([method, arguments])

    def _request(self, message: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        reply = json.loads(self._process.stdout.readline() or '{"error": "the process ended"}')
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["value"]


class EngineRunner:
    """Another engine as a runner of `compared`."""

    exact, shares_noise = True, False

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self._engine = name, engine

    def prepare(self, block: PromptBlock) -> None:
        assert block.params.greedy

    def run(self, block: PromptBlock, requests: Sequence[PromptRequest]) -> Outcome:
        prompts, params = [list(map(int, request.token_ids)) for request in requests], block.params
        size = {"new": params.max_new_tokens, "batch": block.batch_size, "ignore_eos": params.ignore_eos}
        return Outcome(**self._engine("texts", prompts=prompts, **size))


def log(text: str) -> None:
    print(text, flush=True)


def arguments(
    doc: str | None, *, parts: Iterable[str] = (), repeats: int = 0, quick: bool = True
) -> argparse.ArgumentParser:
    """A parser with the options that the scripts share. parts: choices of `--only`. repeats: default of `--repeats`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if parts:
        parser.add_argument("--only", nargs="+", choices=sorted(parts), help="measure these parts only")
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats, help="timed runs of each method or engine")
    if quick:
        parser.add_argument(
            "--quick", action="store_true", help="fewer prompts and tokens: a test of the script itself"
        )
    parser.add_argument("--write", action="store_true", help="write the figures to benchmarks/RESULTS.md")
    parser.add_argument("--section", help="section of RESULTS.md to write (default: the script's name)")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments. `--write` without a known commit, or with `--quick`, is refused before anything is measured."""
    args = parser.parse_args()
    if args.write and commit() is None:
        parser.error("--write needs a git checkout: every published figure names its commit")
    if args.write and getattr(args, "quick", False):
        parser.error("--write and --quick exclude each other: quick figures are not published")
    torch.manual_seed(0)
    return args


def measured(
    parts: Mapping[str, Callable[[], Figures]],
    only: Sequence[str] | None,
    publish: Callable[..., int],
    *,
    part: Callable[[Figures], object] = lambda figures: None,
    until: float = math.inf,
) -> int:
    """Run the parts in order and publish their figures; after a failure those that were measured before it.

    part: called after each part with all figures so far. until: value of perf_counter() after which parts are left out.
    """
    figures: Figures = {}
    try:
        for name in (name for name in parts if only is None or name in only):
            if (began := perf_counter()) > until:
                log(f"{name}: left out, no time is left")
                continue
            log(name)
            found = parts[name]()
            figures |= found
            for key, value in found.items():
                log(f"  {key}: {shown(value)}")
            log(f"  ({perf_counter() - began:.0f} s)")
            part(figures)
    finally:
        code = publish(figures)
    return code


def publish(
    name: str,
    figures: Figures,
    args: argparse.Namespace,
    *,
    legend: Legend,
    model: str = f"{MODEL} in bf16",
    text: Sequence[str] = (),
    last: bool = True,
) -> int:
    """Write a section of RESULTS.md if `--write` was given, and print the figures as one JSON object. Returns 0.

    text: paragraphs and tables after the table of figures. last: false before all are measured, when nothing is printed.
    """
    if args.write and figures:
        section = args.section or name
        body = [f"### benchmarks/{name}.py", environment(model), figure_table(figures, legend), *text]
        write_section(RESULTS, section, "\n\n".join(part for part in body if part))
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    if last:
        log(json.dumps(rounded))
    return 0


def environment(model: str) -> str:
    """One line with everything that figures depend on: processor, instruction sets, threads, PyTorch, model, date and commit."""
    info, threads = machine(), torch.get_num_threads()
    devices = [f"{info['processor']} ({', '.join(instruction_sets()) or 'no vector extensions known'})"]
    devices += info.get("gpus", [])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"{' and '.join(devices)}, {threads} threads; torch {torch.__version__}; {model}; "
        f"{today}; commit {commit() or 'unknown'}."
    )


def instruction_sets(cpuinfo: str | None = None) -> list[str]:
    """Published names of the vector extensions that /proc/cpuinfo reports; empty where there is no such file."""
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((set(value.split()) for name, _, value in lines if name.strip() in ("flags", "Features")), set())
    return [name for flag, name in INSTRUCTION_SETS.items() if flag in flags]


def commit() -> str | None:
    """The commit of this checkout, "+" added for uncommitted changes other than RESULTS.md; None outside a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno", "--", ":/", f":(exclude){RESULTS}")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def figure_table(figures: Figures, legend: Legend) -> str:
    """Figures with their descriptions and wanted values, as a Markdown table."""
    rows = []
    for key, value in figures.items():
        description, wanted = legend.get(key, ("", ""))
        rows.append((f"{description} (`{key}`)" if description else f"`{key}`", shown(value), wanted))
    return table(("figure", "measured", "wanted"), rows)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def write_section(path: Path, name: str, body: str) -> None:
    """Replace the text between a section's markers; a new section is added at the end."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = path.read_text(encoding="utf-8")
    if begin not in old:
        old = f"{old.rstrip()}\n\n{begin}\n{end}\n"
    head, _, rest = old.partition(begin)
    path.write_text(f"{head}{begin}\n{body}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def spread(values: Sequence[float]) -> float:
    """Relative difference between neighbouring measurements of the same thing that 9 in 10 do not exceed; 0 for fewer than 2."""
    apart = sorted(abs(b / a - 1) for a, b in pairwise(values))
    return apart[int(0.9 * len(apart))] if apart else 0.0


@dataclass
class Timings:
    """Timed runs of one method or engine, each next to runs of plain decoding."""

    runs: list[Run] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    """Speed over plain decoding, prompts included; 1 for plain decoding itself."""
    decoding_gains: list[float] = field(default_factory=list)
    """The same over the time in decoding steps alone; empty for other engines."""

    @property
    def rate(self) -> float:
        """Median tokens per second, prompts included."""
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def gain(self) -> float:
        return statistics.median(self.gains)

    @property
    def stats(self) -> Mapping[str, Any]:
        """Counts of the last run."""
        return self.runs[-1].stats

    def __str__(self) -> str:
        return f"{self.gain:.2f}x ({min(self.gains):.2f} to {max(self.gains):.2f})"


def compared(
    plain: Runner,
    runners: Sequence[Runner],
    block: PromptBlock,
    repeats: int,
    *,
    between: int = 1,
    same_output: bool = True,
) -> dict[str, Timings]:
    """Run methods and engines in turn with plain decoding; name -> timings, plain decoding first.

    A ratio compares neighbours in time, because shared machines drift. between: runs between two of plain decoding. A run
    that fails is logged and left out. Raises AssertionError if a method of foresay gives other greedy output than plain
    decoding, unless same_output is false.
    """
    turns = [(repeat, runner) for repeat in range(repeats) for runner in runners]
    out: dict[str, Timings] = {plain.name: Timings()}
    own = {runner.name for runner in runners if isinstance(runner, MethodRunner)}
    for run, _ in take_turns(plain, turns, block, warm=replace(block, asks=block.asks[:1]), between=between):
        name = run.cell.method
        if not isinstance(run, Run):
            log(f"  {name} failed: {run.error}")
            continue
        assert not (same_output and name in own and run.identical is False), f"{name}: {run.note}"
        timings = out.setdefault(name, Timings())
        timings.runs.append(run)
        timings.gains.append(1.0 if run.speed_up is None else run.speed_up)
        if run.stats:
            near = out[plain.name].runs[-2:]
            each = statistics.mean(one.stats["total_s"] / one.tokens for one in near if one.stats)
            timings.decoding_gains.append(each * run.tokens / run.stats["total_s"])
    for name, timings in out.items():
        log(f"  batch {block.batch_size}: {name:<40} {timings.rate:7.1f} tokens/s  {timings}")
    return out


def plain_of(target: foresay.Generator) -> MethodRunner:
    return MethodRunner(target, Method("none"))


@dataclass(frozen=True)
class OwnDrafter:
    """A method under a name of its own, whose drafter may be a class of the benchmark instead of an expression."""

    name: str
    drafter: str | Callable[[], Any]
    length: Any

    def generator(self, target: foresay.Generator, batch_size: int) -> foresay.Generator:
        return foresay.change(target, drafter=self.drafter, length=self.length, max_batch_size=batch_size)

    def runner(self, target: foresay.Generator) -> MethodRunner:
        return MethodRunner(target, cast(Method, self))


def mixed(target: foresay.Generator, batch: int, quick: bool) -> PromptBlock:
    """Shipped prompts, categories in equal parts, at least two batches of them; 64 tokens each."""
    count = {1: 4, 8: 12, 32: 35}[batch] if quick else {1: 7, 8: 21, 32: 49}[batch]
    asks = RequestBuilder(target).first(subset(load_items(), count))
    return PromptBlock("mixed", asks, batch, foresay.SamplingParams(max_new_tokens=24 if quick else 64))


def interpreters(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the Python interpreters of other engines (docs/how-to/other-engines.md)."""
    parser.add_argument("--vllm", help="Python interpreter of an environment with vLLM")
    parser.add_argument("--llamacpp", help="Python interpreter of an environment with llama-cpp-python")


OTHERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "vLLM": ("vllm", {}),
    "vLLM, n-grams": ("vllm", {"ngram": 5}),
    "llama.cpp": ("llama.cpp", {}),
    "llama.cpp, lookup": ("llama.cpp", {"lookup": 10}),
}
"""Name of another engine -> its kind and arguments."""


@contextmanager
def opened(
    args: argparse.Namespace, names: Sequence[str], target: foresay.Generator, dtype: str = "bf16", file: str = ""
) -> Iterator[list[Runner]]:
    """Load the engines whose interpreters were given, and transformers. file: GGUF file for llama.cpp."""
    pythons, runners = {"vllm": args.vllm, "llama.cpp": args.llamacpp}, list[Runner]()
    with ExitStack() as stack:
        for name in names:
            began = perf_counter()
            if name not in OTHERS:
                runners.append(TransformersRunner(name, target, dtype))
            elif (python := pythons[OTHERS[name][0]]) is not None:
                kind, more = OTHERS[name]
                model = model_folder(MODEL) if kind == "vllm" else file or str(packaged_file(MODEL))
                whole = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
                runners.append(EngineRunner(name, Engine(stack, python, kind, model=model, dtype=whole, **more)))
            else:
                continue
            log(f"  {name}: loaded in {perf_counter() - began:.0f} s")
        yield runners


def filled(model: Any, token_ids: torch.Tensor, **more: Any) -> Any:
    """A cache filled with token_ids [B, T]. more: further fields of the model's input."""
    batch, width = token_ids.shape
    cache = model.new_cache()
    cache.add_rows(batch)
    model.forward(ModelInput(token_ids, [width] * batch, **({"logits": Logits.NONE} | more)), cache)
    return cache


def random_prompt(batch: int = 1, device: torch.device | str = "cpu", vocabulary: int = 4000) -> torch.Tensor:
    """Random token ids [batch, CONTEXT]."""
    ids = torch.randint(5, vocabulary, (batch, CONTEXT), generator=torch.Generator().manual_seed(0))
    return ids.to(device)


def pass_seconds(
    passes: Sequence[tuple[Any, Any, ModelInput]], repeats: int = 60, wait: Callable[[], None] = lambda: None
) -> list[float]:
    """Median seconds of each forward pass (model, cache, input), taken in turn after CONTEXT tokens.

    wait: called before and after each timed pass, to wait for a device.
    """
    took: list[list[float]] = [[] for _ in passes]
    with single_threaded():  # as in the engine
        for _ in range(repeats):
            for times, (model, cache, given) in zip(took, passes, strict=True):
                wait()
                began = perf_counter()
                model.forward(given, cache)
                wait()
                times.append(perf_counter() - began)
                cache.truncate([CONTEXT] * given.token_ids.shape[0])
    return [statistics.median(times) for times in took]
