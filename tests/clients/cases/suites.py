"""All suites, found as SUITES of the modules of the projects' packages."""

from __future__ import annotations

import importlib
from pathlib import Path

from clients.cases.case import Suite

PROJECTS = {"llama_cpp": "llama.cpp", "vllm": "vLLM"}
"""Package -> name of the project."""


def all_suites() -> list[Suite]:
    """Return the suites in the order of their files' names."""
    out: list[Suite] = []
    for package, project in PROJECTS.items():
        for path in sorted((Path(__file__).parent / package).glob("[a-z]*.py")):
            module = importlib.import_module(f"clients.cases.{package}.{path.stem}")
            out += [Suite(project, file, cases) for file, cases in module.SUITES.items()]
    return sorted(out, key=lambda one: (one.project.lower(), one.file))
