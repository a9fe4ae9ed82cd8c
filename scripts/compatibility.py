"""Print docs/reference/compatibility.md: the ported cases of other servers' tests, counted by class."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clients.cases.suites import all_suites
from clients.cases.table import page

print(page(all_suites()), end="")
