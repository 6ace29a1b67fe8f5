"""Rounds that draft a tree of likely tokens for each row; greedy decoding without processors."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from layerskip.decoding.exit_head import ExitHead
from layerskip.decoding.passes import Passes
from layerskip.decoding.rounds import Outcome, Scored, Verdict
from layerskip.decoding.rows import DecodeSettings, Row
from layerskip.decoding.tree_drafting import best_choices, draft_trees, keep_paths


class TreeRounds:
    """Drafts trees with the early layers, verifies all their nodes in one pass of the rest, keeps the best path."""

    def __init__(self, passes: Passes, head: ExitHead, settings: DecodeSettings, tree_nodes: int) -> None:
        """Makes ready for the rounds of one call, whose cache has a slot more for every node.

        Args:
            head: what the likeliest tokens are found with.
            settings: with E and γ, which bounds the depth of a tree.
            tree_nodes: at most how many nodes a tree has.
        """
        self.passes = passes
        self.head = head
        self.settings = settings
        self.tree_nodes = tree_nodes

    def run(self, rows: Sequence[Row]) -> Outcome:
        """Drafts and verifies; see `Rounds`."""
        depths = [self.settings.room(row) for row in rows]
        drafts = draft_trees(self.passes, rows, self.settings, self.tree_nodes, depths, self._likeliest)
        drafted = time.perf_counter()
        exit_layer = self.settings.exit_layer
        hidden = self.passes.run(rows, drafts.states, exit_layer, self.settings.depth, drafts.placement)
        logits = self.passes.model.logits(hidden)
        paths, verdicts = [], []
        for tree, targets in zip(drafts.trees, logits.argmax(-1).tolist(), strict=True):
            path = tree.accept(targets)
            places = [0, *(node + 1 for node in path)]
            accepted = [tree.nodes[node].token for node in path]
            paths.append(path)
            verdicts.append(Verdict(tree.depth, len(tree.nodes), accepted, targets[places[-1]], places))
        keep_paths(self.passes, rows, paths)
        return Outcome(exit_layer, drafts.steps, verdicts, Scored(logits, logits), drafted)

    def _likeliest(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the likeliest tokens after exit states `(n, hidden)` and their probabilities, `(n, k)` each."""
        draft_head = self.head.draft_head
        if draft_head is None:
            return best_choices(self.passes.model.logits(states))
        return best_choices(draft_head.logits(states), draft_head.token_ids)
