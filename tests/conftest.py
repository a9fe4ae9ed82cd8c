"""Shared fixtures. Tests run offline, and a skip outside tests/gpu fails the run."""

from __future__ import annotations

import gc
import itertools
import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("FORESAY_PACKED_GB", "0")  # tests load hundreds of small files; test_packed.py removes it
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles every module anew
# next to another process of the same run, the programs that tests start share the cores too
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("COLUMNS", "LINES"):  # which pytest-xdist sets, as if someone had requested 80 columns
        os.environ.pop(name, None)

import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
torch.set_num_threads(1)  # tiny models are slower with more, and other processes are not disturbed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="also the tests marked long, every mutated file and every cell"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Modules stay, so that the collector of garbage leaves them out; their loggers pass records on to the root's.

    pytest adds its handlers, six times a test, to each logger that does not, of which PyTorch has 50.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A table of the workers' minutes by folder, after a run of more than one."""
    seconds = Counter[str]()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            parts = report.nodeid.partition("::")[0].split("/")
            seconds["/".join(parts[1:3] if len(parts) > 3 else parts[1:-1])] += report.duration
    if seconds.total() > 60:
        terminalreporter.section(f"minutes by folder: {seconds.total() / 60:.1f}")
        for folder, spent in seconds.most_common():
            terminalreporter.write_line(f"{spent / 60:6.1f}  {folder}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and Path(str(item.fspath)).parent != Path(__file__).parent / "gpu"
    ):
        report.outcome = "failed"
        report.longrepr = f"a skip outside tests/gpu is a failure: {report.longrepr}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tiny models take one thread; the real one takes both cores, unless a second process of the same run has one."""
    real = {"smollm2_fp32", "smollm2_bf16"} & set(getattr(item, "fixturenames", ()))
    torch.set_num_threads(2 if real and "PYTEST_XDIST_WORKER" not in os.environ else 1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    # without a GPU, torch.manual_seed formats the stack for each kind of device that may be there later
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(scope="session")
def broken_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Call with the name of a fault, within a `with`: the kernels have it.

    They are compiled once for all workers, and kept for later runs in pytest's cache unless that is off.
    """
    from helpers.broken_kernels import broken_kernels

    base = tmp_path_factory.getbasetemp()
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("kernels") if cache else base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return partial(broken_kernels, folder / "broken-kernels")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The dequantised SmolLM2-135M-Instruct, in the cache the tests share with the user."""
    from foresay.models.sources.load_options import LoadOptions
    from foresay.models.sources.packaged import converted

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gguf's and transformers' own
        return converted("smollm2-135m", LoadOptions())


@pytest.fixture(scope="session")
def smollm2_fp32(smollm2_folder: Path) -> Any:
    """SmolLM2 in float32 as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def smollm2_bf16(smollm2_folder: Path) -> Any:
    """SmolLM2 in bf16 as foresay loads it."""
    from foresay.models.sources.load_options import LoadOptions
    from foresay.models.sources.loading import load_model

    return load_model(smollm2_folder, LoadOptions(dtype="bf16"))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)
