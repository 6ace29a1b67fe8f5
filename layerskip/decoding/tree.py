"""The draft tree of one row in one round: which candidates pass the early layers, and which of them are accepted.

The nodes are the likeliest continuations by the exit's own word: best first by joint probability, as in EAGLE-2 (Li et
al., 2024, arXiv 2406.16858). Greedy acceptance keeps the path that the full model itself would have taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

ROOT = -1


@dataclass(frozen=True)
class Node:
    """A drafted token.

    Attributes:
        token: its id.
        parent: the index of the node that it follows; `ROOT`, −1, for the row's last committed token.
        depth: how many tokens behind the root it stands; 1 for the root's children.
        probability: that of its whole path by the exit, the product over the path.
    """

    token: int
    parent: int
    depth: int
    probability: float


class DraftTree:
    """Nodes that have passed or are about to, and the frontier: their children that may follow.

    Attributes:
        nodes: in the order in which they pass, so that a parent stands before its children.
    """

    def __init__(self, max_nodes: int, max_depth: int, eos_token_ids: Collection[int]) -> None:
        """Makes a tree without nodes.

        Args:
            max_nodes: how many nodes it may have.
            max_depth: how deep they may lie.
            eos_token_ids: tokens that nothing follows.
        """
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.eos_token_ids = frozenset(eos_token_ids)
        self.nodes: list[Node] = []
        # A heap, the best first: a negative probability, the number of the offer, and the candidate.
        self._frontier: list[tuple[float, int, Node]] = []
        self._offers = 0

    @property
    def depth(self) -> int:
        """The depth of the deepest node; 0 without nodes."""
        return max((node.depth for node in self.nodes), default=0)

    @property
    def room(self) -> int:
        """How many more nodes there may be."""
        return self.max_nodes - len(self.nodes)

    def can_grow(self, parent: int) -> bool:
        """Whether a node, or the root, may have children: there is room, it is not at the last depth and no EOS."""
        if parent == ROOT:
            return self.room > 0 and self.max_depth > 0
        node = self.nodes[parent]
        return self.room > 0 and node.depth < self.max_depth and node.token not in self.eos_token_ids

    def offer(self, parent: int, tokens: Sequence[int], probabilities: Sequence[float]) -> None:
        """Adds the children of a node to the frontier; none where `can_grow` denies it.

        Args:
            parent: the index of the node, or `ROOT`.
            tokens: the exit's choices after it, each once, the best first.
            probabilities: of these tokens after the parent. What has none, or NaN, is no candidate.

        Raises:
            ValueError: a parent that is no node, or other than one probability for each token.
        """
        if not ROOT <= parent < len(self.nodes):
            raise ValueError(f"parent={parent} is no node of this tree; it has {len(self.nodes)}.")
        if len(tokens) != len(probabilities):
            raise ValueError(f"there are {len(tokens)} tokens but {len(probabilities)} probabilities.")
        if not self.can_grow(parent):
            return
        above, depth = (1.0, 0) if parent == ROOT else (self.nodes[parent].probability, self.nodes[parent].depth)
        for token, probability in zip(tokens, probabilities, strict=True):
            if probability > 0:
                child = Node(token, parent, depth + 1, above * probability)
                heapq.heappush(self._frontier, (-child.probability, self._offers, child))
                self._offers += 1

    def take(self, count: int) -> list[int]:
        """Makes nodes of the best `count` candidates; of equal ones the first that was offered.

        Returns:
            Their indices; fewer where the frontier or the room does not suffice.
        """
        first = len(self.nodes)
        for _ in range(min(count, self.room, len(self._frontier))):
            self.nodes.append(heapq.heappop(self._frontier)[2])
        return list(range(first, len(self.nodes)))

    def ancestors(self, node: int) -> list[int]:
        """Returns the path from the root's child to a node, itself included."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def accept(self, targets: Sequence[int]) -> list[int]:
        """Returns the nodes that are accepted: the path from the root along the full model's own choices.

        Args:
            targets: these choices; `targets[0]` follows the root, `targets[1 + j]` node j. What the round emits behind
                the path is the target after its last node.
        """
        children = {(node.parent, node.token): index for index, node in enumerate(self.nodes)}
        path: list[int] = []
        child = children.get((ROOT, targets[0]))
        while child is not None:
            path.append(child)
            child = children.get((child, targets[1 + child]))
        return path
