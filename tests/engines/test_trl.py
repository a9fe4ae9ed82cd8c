"""trl's GRPOTrainer with foresay's rollouts, as examples/trl_rollouts.py has them: `make test-engines`."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_rollouts.py"


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_training_with_rollouts_raises_the_reward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A random model writes the rewarded letter once in 28; the rollouts of later steps are those of the trained weights."""
    monkeypatch.chdir(tmp_path)
    rewards = runpy.run_path(str(EXAMPLE))["main"](30)
    assert len(rewards) == 30 and rewards[0] < 0.15 and sum(rewards[-5:]) / 5 > 0.3
