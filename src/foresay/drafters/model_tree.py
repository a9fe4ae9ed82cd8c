"""Trees of a draft model's continuations."""

from __future__ import annotations

from collections.abc import Sequence

from foresay.checks import check_int
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LanguageModel, LengthPolicy
from foresay.decoding.rows import Rows
from foresay.drafters.model import ModelDrafter
from foresay.errors import UnsupportedModelError


class ModelTreeDrafter(ModelDrafter):
    """Draft trees with a smaller model that has the target's token ids; budgets count nodes."""

    def __init__(self, model: LanguageModel, target_vocab_size: int, *, branches: int = 2, width: int = 1) -> None:
        """branches: children per node. width: nodes per level that get children; each level takes one draft pass.

        Raises UnsupportedModelError if the draft model does not support tree attention.
        """
        super().__init__(model, target_vocab_size)
        self.branches = check_int("branches", branches, 1, 16)
        self.width = check_int("width", width, 1, 16)
        if not model.capabilities.trees:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not take trees; draft chains with it (drafter model)"
            )

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft a tree of at most `budget` nodes for each row."""
        return self.propose_trees(rows, budget, policy, branches=self.branches, width=self.width)
