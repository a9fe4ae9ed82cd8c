"""The unit of systemd and the compose file: options and variables exist, and a stop waits for the drain."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from foresay.cli.commands import named

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "foresay.service").read_text(encoding="utf-8")
COMPOSE = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SERVE = named()["serve"]


def started(unit: str) -> list[str]:
    """The words of a unit's ExecStart."""
    [line] = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    return shlex.split(line)


def contained(compose: str) -> dict[str, Any]:
    """The service of a compose file."""
    [service] = yaml.safe_load(compose)["services"].values()
    return service


def unknown(words: list[str], variables: list[str]) -> set[str]:
    """Options and environment variables that `foresay serve` does not have."""
    options = {flag for one in SERVE.params for flag in one.opts}
    allowed = {f"FORESAY_SERVE_{one.name}".upper() for one in SERVE.params}
    allowed |= {"FORESAY_SERVE_", "FORESAY_CACHE", "FORESAY_KERNELS", "FORESAY_API_KEYS"}
    named_ones = {word.partition("=")[0] for word in words if word.startswith("-")}
    return (named_ones - options) | ({one for one in variables if one.startswith("FORESAY_")} - allowed)


def variables(text: str) -> list[str]:
    return re.findall(r"\bFORESAY_[A-Z_]+", text)


def test_options_and_variables_exist() -> None:
    program, command, *words = started(UNIT)
    assert program == "/opt/foresay/bin/foresay" and command == "serve" and "--keys-file" in words
    assert unknown(words, variables(UNIT)) == set()
    service = contained(COMPOSE)
    assert unknown(service["command"], variables(COMPOSE + DOCKERFILE)) == set()
    assert 'ENTRYPOINT ["foresay", "serve"]' in DOCKERFILE and '"127.0.0.1:8000:8000"' in COMPOSE
    planted = started(UNIT.replace("--warmup", "--warm"))
    wrong = "FORESAY_" + "SERVE_PORTS"
    assert unknown(planted, [wrong]) == {"--warm", wrong}, "control"


@pytest.mark.parametrize(
    ("words", "stop"),
    [
        (started(UNIT), re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)),
        (contained(COMPOSE)["command"], [contained(COMPOSE)["stop_grace_period"].removesuffix("s")]),
    ],
)
def test_a_stop_waits_for_the_drain(words: list[str], stop: list[str]) -> None:
    assert int(stop[0]) > int(words[words.index("--drain") + 1])


def test_the_steps_of_the_page_are_those_of_the_unit() -> None:
    text = (ROOT / "docs" / "how-to" / "production.md").read_text(encoding="utf-8")
    for path in ("/etc/foresay/environment", "/etc/foresay/keys"):
        assert path in text and path in UNIT
    assert all(f"{name}=" in text for name in re.findall(r"\$\{(\w+):\?", COMPOSE))
