"""Where the tokens of one pass through a span of layers stand: their positions, and the cache slots they fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True)
class Trees:
    """A draft tree at the end of each row of a batch.

    The root, a row's last committed token, stands at a slot and position of its own number. Node j fills the slot
    j + 1 behind it and stands at the position of its parent plus one.

    Attributes:
        roots: the slot and position of each row's root.
        parents: of each row, the parent of every node: the index of an earlier node, or −1 for the root.
    """

    roots: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]

    @property
    def are_chains(self) -> bool:
        """Whether every node follows the one before it, as without trees."""
        return all(nodes == tuple(range(-1, len(nodes) - 1)) for nodes in self.parents)

    def positions(self, row: int) -> list[int]:
        """Returns the positions of a row's root and nodes."""
        positions = [self.roots[row]]
        for parent in self.parents[row]:
            positions.append(positions[parent + 1] + 1)
        return positions

    def beside(self, row: int) -> list[list[bool]]:
        """Returns for a row's root and each of its nodes, which nodes are neither itself nor its ancestors."""
        beside = [[True] * len(self.parents[row])]
        for node, parent in enumerate(self.parents[row]):
            own = beside[parent + 1].copy()
            own[node] = False
            beside.append(own)
        return beside


@dataclass(frozen=True)
class Placement:
    """The place of `width` tokens in each row of a batch.

    In a row the live tokens come first and fill consecutive cache slots; the rest of the row is dead: padding that
    keeps the batch a rectangle, written to a scratch slot that no live token ever sees. Slot i holds position i,
    except for the nodes of a draft tree, where tokens of several branches stand at the same position.

    Attributes:
        starts: the slot of the first token of each row.
        live: the number of live tokens of each row.
        width: tokens per row.
        view: cache slots that the attention of this pass reads: 0 .. view − 1.
        start: the slot of the first token where all rows stand alike, else `None`.
        scratch: the slot of dead tokens where rows do not stand alike, and but for trees their position.
        device: where `positions` is made.
        trees: what rows end in, up to the last token of this pass; `None` where there are no trees.
    """

    starts: tuple[int, ...]
    live: tuple[int, ...]
    width: int
    view: int
    start: int | None
    scratch: int
    device: torch.device
    trees: Trees | None = None

    @classmethod
    def of(
        cls, starts: Sequence[int], live: Sequence[int], width: int, scratch: int, device: torch.device
    ) -> Placement:
        """Returns the placement of rows whose first token stands at `starts[row]`, `live[row]` of `width` being live.

        Args:
            scratch: the slot (and position) of dead tokens; it must lie behind every live one.
        """
        alike = all(start == starts[0] for start in starts) and all(count == width for count in live)
        view = max(start + count for start, count in zip(starts, live, strict=True))
        return cls(tuple(starts), tuple(live), width, view, starts[0] if alike else None, scratch, device)

    @classmethod
    def prompt(cls, lengths: Sequence[int], device: torch.device) -> Placement:
        """Returns the placement of whole prompts of `lengths` tokens, each row filled up to the longest with padding.

        A prompt's padding lies behind its tokens, where causal attention hides it from them; the tokens that follow
        overwrite it.
        """
        width = max(lengths)
        return cls((0,) * len(lengths), tuple(lengths), width, width, 0, width, device)

    @classmethod
    def tree(
        cls,
        roots: Sequence[int],
        parents: Sequence[Sequence[int]],
        live: Sequence[int],
        scratch: int,
        device: torch.device,
    ) -> Placement:
        """Returns the placement of the last `live[row]` tokens of each row's tree: its root, then its nodes.

        A token sees what stands before its root, the root, its ancestors and itself.

        Args:
            roots: the slot and position of each row's root.
            parents: of each row, the parent of every node, those that passed before included: the index of an earlier
                node, or −1 for the root.
            live: how many of them pass now, at most the root and all nodes; 0 for a row that waits.
            scratch: the slot of dead tokens; they stand at their root's position, so that it need not be one.

        Raises:
            ValueError: a parent that is no earlier node, or nodes that reach the scratch slot.
        """
        for row, nodes in enumerate(parents):
            for node, parent in enumerate(nodes):
                if not -1 <= parent < node:
                    raise ValueError(
                        f"parents[{row}][{node}]={parent}; a parent is an earlier node, 0 to {node - 1}, or -1 for the "
                        "root."
                    )
        starts = [root + 1 + len(nodes) - count for root, nodes, count in zip(roots, parents, live, strict=True)]
        trees = Trees(tuple(roots), tuple(map(tuple, parents)))
        placement = replace(cls.of(starts, live, max(live), scratch, device), trees=trees)
        if placement.view > scratch:
            raise ValueError(
                f"the trees fill slots up to {placement.view - 1}, but slot {scratch} is for dead tokens; make a cache "
                "with a slot more for every node."
            )
        return placement

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The slots of each row that are filled once the pass is done."""
        return tuple(start + count for start, count in zip(self.starts, self.live, strict=True))

    @cached_property
    def slots(self) -> torch.Tensor:
        """The cache slot of every token: `(rows, width)`, or `(1, width)` where all rows stand alike."""
        if self.start is not None:
            return torch.arange(self.start, self.start + self.width, device=self.device).unsqueeze(0)
        offsets = torch.arange(self.width, device=self.device)
        slots = torch.tensor(self.starts, device=self.device).unsqueeze(1) + offsets
        dead = offsets >= torch.tensor(self.live, device=self.device).unsqueeze(1)
        return slots.masked_fill(dead, self.scratch)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The position of every token: `(rows, width)`, or `(1, width)` where all rows stand alike and have no tree."""
        if self.trees is None:
            return self.slots
        positions = []
        for row, (root, live) in enumerate(zip(self.trees.roots, self.live, strict=True)):
            own = self.trees.positions(row)
            positions.append(own[len(own) - live :] + [root] * (self.width - live))
        return torch.tensor(positions, device=self.device)

    @cached_property
    def held(self) -> torch.Tensor:
        """The position that every slot in view holds: `(rows, view)`, or `(1, view)` without trees."""
        if self.trees is None:
            return torch.arange(self.view, device=self.device).unsqueeze(0)
        held = torch.arange(self.view).repeat(len(self.starts), 1)
        for row, root in enumerate(self.trees.roots):
            positions = torch.tensor(self.trees.positions(row))
            held[row, root : root + len(positions)] = positions
        return held.to(self.device)

    @cached_property
    def elsewhere(self) -> torch.Tensor | None:
        """Which slots in view hold a node beside the token's own path, bool `(rows, width, view)`.

        It is `None` where there are none: without trees, and where no tree branches.
        """
        if self.trees is None or self.trees.are_chains:
            return None
        elsewhere = torch.zeros((len(self.starts), self.width, self.view), dtype=torch.bool)
        for row, (root, live) in enumerate(zip(self.trees.roots, self.live, strict=True)):
            if live:
                beside = torch.tensor(self.trees.beside(row)[-live:])
                elsewhere[row, :live, root + 1 : root + 1 + beside.shape[1]] = beside
        return elsewhere.to(self.device)

    @property
    def padding(self) -> tuple[int, ...]:
        """Dead tokens of each row."""
        return tuple(self.width - count for count in self.live)
