"""Drafting a tree for every row: the early layers' passes, and what verification goes on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from layerskip.decoding.passes import Passes
from layerskip.decoding.rows import DecodeSettings, Row
from layerskip.decoding.tree import ROOT, DraftTree
from layerskip.model.placement import Placement

# From exit states `(n, hidden)` to the tokens that may follow, the best first, and their probabilities: `(n, k)` each.
Head = Callable[[Tensor], tuple[Tensor, Tensor]]

# How many children a node may have. An exit that is right 0.46 of the time among its first two choices is right 0.62
# among four and 0.75 among eight: each doubling brings less, and one round seldom has room for more than eight.
NUM_CHILDREN = 8


def best_choices(logits: Tensor, token_ids: Tensor | None = None, count: int = NUM_CHILDREN) -> tuple[Tensor, Tensor]:
    """Returns the likeliest tokens, the best first, and their softmax probabilities in fp32: `(..., count)` each.

    Args:
        logits: `(..., vocabulary)`, or of a draft head, `(..., ids)`.
        token_ids: whose logits these are, `(ids,)`; `None` for the whole vocabulary.
        count: how many; fewer where there are no more logits.
    """
    probabilities, best = logits.softmax(-1, dtype=torch.float32).topk(min(count, logits.shape[-1]))
    return (best if token_ids is None else token_ids[best]), probabilities


@dataclass(frozen=True)
class TreeDrafts:
    """What a round drafts as trees.

    Attributes:
        trees: of each row.
        states: the exit states of each root and its nodes, `(rows, 1 + most nodes, hidden)`; what lies behind a row's
            last node means nothing.
        placement: where these stand, for layers E+1..L.
        steps: how often layers 1..E ran beside the root's pass.
    """

    trees: list[DraftTree]
    states: Tensor
    placement: Placement
    steps: int


def draft_trees(
    passes: Passes, rows: Sequence[Row], settings: DecodeSettings, tree_nodes: int, depths: Sequence[int], head: Head
) -> TreeDrafts:
    """Drafts a tree after each row's last token, in one pass of layers 1..E for each level whatever its width.

    A pass takes the best candidates of any depth, as many as spread the row's remaining nodes evenly over its
    remaining passes. The pass after the last one is verification; no state is computed twice.

    Args:
        passes: of the call; its cache holds a slot more for every node. Dead tokens go to the cache's last slot.
        rows: the active rows, in the cache's order; their tallies count nodes where they pass.
        settings: E, γ and the EOS tokens. A tree is at most γ tokens deep, in as many passes.
        tree_nodes: how many nodes a tree may have.
        depths: how many tokens each row's budget leaves for drafts, which bounds its tree likewise; 0 drafts nothing.
        head: what follows exit states.

    Raises:
        ValueError: a cache too small for the nodes.
    """
    depths = [min(depth, settings.num_draft_tokens) for depth in depths]
    trees = [DraftTree(tree_nodes, depth, settings.stops.eos_token_ids) for depth in depths]
    taken = [[ROOT] for _ in rows]
    passed = [taken]
    states = [_pass(passes, rows, settings.exit_layer, trees, taken)]
    for step in range(max(depths)):
        left = [max(0, depth - step) for depth in depths]
        _offer(head, trees, taken, left, states[-1])
        taken = [tree.take(ceil(tree.room / count) if count else 0) for tree, count in zip(trees, left, strict=True)]
        if not any(taken):
            break
        passed.append(taken)
        states.append(_pass(passes, rows, settings.exit_layer, trees, taken))
        for row, nodes in zip(rows, taken, strict=True):
            row.tally.draft_tokens_processed += len(nodes)
    placement = _place(passes, rows, trees, [1 + len(tree.nodes) for tree in trees])
    return TreeDrafts(trees, _joined(states, passed), placement, len(passed) - 1)


def keep_paths(passes: Passes, rows: Sequence[Row], paths: Sequence[Sequence[int]]) -> None:
    """Moves the keys and values of accepted nodes to the slots of their positions, in all layers.

    Args:
        passes: of the call, after verification.
        rows: the active rows, before what the round emits is appended to them.
        paths: of each row, as `DraftTree.accept` returns it.
    """
    firsts = [row.committed for row in rows]
    passes.cache.compact(firsts, [[first + node for node in path] for first, path in zip(firsts, paths, strict=True)])


def _place(passes: Passes, rows: Sequence[Row], trees: Sequence[DraftTree], live: Sequence[int]) -> Placement:
    """Returns where the last `live[row]` of each row's root and nodes stand."""
    roots = [row.committed - 1 for row in rows]
    parents = [[node.parent for node in tree.nodes] for tree in trees]
    return Placement.tree(roots, parents, live, passes.cache.capacity - 1, passes.model.device)


def _pass(
    passes: Passes, rows: Sequence[Row], exit_layer: int, trees: Sequence[DraftTree], taken: Sequence[list[int]]
) -> Tensor:
    """Runs layers 1..E over the last nodes of each tree, `taken[row]`, or its root; returns `(rows, width, hidden)`."""
    placement = _place(passes, rows, trees, [len(nodes) for nodes in taken])
    tokens = []
    for row, tree, nodes in zip(rows, trees, taken, strict=True):
        own = [row.tokens[-1] if node == ROOT else tree.nodes[node].token for node in nodes]
        tokens.append(own + [row.tokens[-1]] * (placement.width - len(own)))
    return passes.run(rows, passes.embed(tokens, placement), 0, exit_layer, placement)


def _offer(
    head: Head, trees: Sequence[DraftTree], taken: Sequence[list[int]], left: Sequence[int], states: Tensor
) -> None:
    """Offers each tree what follows the nodes that have just passed; the head runs over those alone that may grow."""
    growing = [
        (row, column, node)
        for row, (tree, nodes) in enumerate(zip(trees, taken, strict=True))
        for column, node in enumerate(nodes)
        if left[row] and tree.can_grow(node)
    ]
    if not growing:
        return
    index, column = ([entry[part] for entry in growing] for part in (0, 1))
    tokens, probabilities = head(states[index, column])
    # One read from the device: token ids are below 2^24, so that float32 holds them.
    ids, chances = torch.stack([tokens.float(), probabilities]).tolist()
    for (row, _, node), choices, likely in zip(growing, ids, chances, strict=True):
        trees[row].offer(node, [int(token) for token in choices], likely)


def _joined(states: Sequence[Tensor], passed: Sequence[Sequence[list[int]]]) -> Tensor:
    """Returns the states of all passes side by side, `(rows, width, hidden)`, the live ones of each row first."""
    together = states[0] if len(states) == 1 else torch.cat(list(states), dim=1)
    live: list[list[int]] = [[] for _ in range(together.shape[0])]
    first = 0
    for block, taken in zip(states, passed, strict=True):
        for row, nodes in enumerate(taken):
            live[row] += range(first, first + len(nodes))
        first += block.shape[1]
    width = max(map(len, live))
    if all(len(columns) == first for columns in live):
        return together
    filled = torch.tensor([columns + [0] * (width - len(columns)) for columns in live], device=together.device)
    return together[torch.arange(len(live), device=together.device).unsqueeze(1), filled]
