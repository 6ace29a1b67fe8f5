"""A generation call that drafts trees, moved by hand, and what its output must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.decoding.passes import Passes
from layerskip.decoding.rows import DecodeSettings, Row
from layerskip.decoding.stopping import Stops
from layerskip.decoding.tree import DraftTree
from layerskip.decoding.tree_drafting import NUM_CHILDREN, Head, best_choices, draft_trees, keep_paths
from layerskip.model.cache import SharedCache
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement
from tests import kit

CPU = torch.device("cpu")
PROMPTS = [kit.PROMPT, [60, 2, 71, 13], [8, 20, 31, 60, 2, 9, 77, 12, 4, 4, 15, 31]]
BUDGET = 24


@dataclass(frozen=True, eq=False)
class RecordedPasses(Passes):
    """Notes of every pass where it began and ended, and the live tokens of each row."""

    seen: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)

    def run(self, rows: Sequence[Row], hidden: Tensor, start: int, stop: int, placement: Placement) -> Tensor:
        self.seen.append((start, stop, placement.live))
        return super().run(rows, hidden, start, stop, placement)


def head_of(model: PreTrainedModel, count: int = NUM_CHILDREN) -> Head:
    """Returns a head that names so many choices."""
    layered = LayeredModel(model)
    return lambda states: best_choices(layered.logits(states), count=count)


class Call:
    """A generation call whose every round drafts trees, moved by hand as the decode loop would."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[list[int]],
        tree_nodes: int,
        num_draft_tokens: int,
        *,
        eos: frozenset[int] = frozenset(),
        head: Head | None = None,
        budget: int = BUDGET,
    ) -> None:
        self.model = LayeredModel(model)
        self.tree_nodes = tree_nodes
        self.settings = DecodeSettings(kit.EXIT_LAYER, kit.NUM_LAYERS, num_draft_tokens, Stops(budget, eos))
        self.head = head_of(model) if head is None else head
        self.prompts = prompts
        self.rows = [Row(index, len(prompt)) for index, prompt in enumerate(prompts)]
        self.order = list(self.rows)
        self.rounds = 0
        # Positions end where the budget does; only slots go on for the nodes.
        positions = max(map(len, prompts)) + budget
        cache = SharedCache(kit.NUM_LAYERS, len(prompts), positions + tree_nodes)
        self.passes = RecordedPasses(self.model, cache, self.model.rotary_tables(positions), positions - 1)

    @property
    def active(self) -> list[Row]:
        return [row for row in self.order if row.finish_reason is None]

    @torch.inference_mode()
    def prefill(self) -> None:
        """Emits the first token of each row."""
        lengths = [len(prompt) for prompt in self.prompts]
        placement = Placement.prompt(lengths, CPU)
        ids = [[*prompt, *[0] * (placement.width - len(prompt))] for prompt in self.prompts]
        hidden = self.passes.run(self.rows, self.passes.embed(ids, placement), 0, kit.NUM_LAYERS, placement)
        targets = self.model.logits(hidden).argmax(-1).tolist()
        self.emit([[target[length - 1]] for target, length in zip(targets, lengths, strict=True)])

    @torch.inference_mode()
    def draft(self, depths: Sequence[int] | None = None) -> tuple[list[DraftTree], Tensor, Placement]:
        """Drafts as deep as the budget allows, or `depths`."""
        if depths is None:
            depths = [self.settings.stops.max_new_tokens - len(row.tokens) - 1 for row in self.active]
        drafts = draft_trees(self.passes, self.active, self.settings, self.tree_nodes, depths, self.head)
        return drafts.trees, drafts.states, drafts.placement

    @torch.inference_mode()
    def round(self) -> None:
        """Drafts, verifies, accepts and rolls back."""
        rows = self.active
        trees, states, placement = self.draft()
        hidden = self.passes.run(rows, states, kit.EXIT_LAYER, kit.NUM_LAYERS, placement)
        targets = self.model.logits(hidden).argmax(-1).tolist()
        paths = [tree.accept(target) for tree, target in zip(trees, targets, strict=True)]
        keep_paths(self.passes, rows, paths)
        emitted = []
        for tree, path, target in zip(trees, paths, targets, strict=True):
            emitted.append([*[tree.nodes[node].token for node in path], target[path[-1] + 1 if path else 0]])
        self.rounds += len(rows)
        self.emit(emitted)

    def emit(self, emitted: Sequence[list[int]]) -> None:
        """Appends what each active row emits up to its first stop, and rolls the cache back."""
        rows = self.active
        for row, tokens in zip(rows, emitted, strict=True):
            for token in tokens:
                row.tokens.append(token)
                row.finish_reason = self.settings.stops.reason(row.index, row.tokens, None, None)
                if row.finish_reason is not None:
                    break
        self.passes.cache.rollback([row.committed - 1 for row in rows])
        left = len(rows)
        for place in reversed(range(left)):
            if self.order[place].finish_reason is not None:
                left -= 1
                self.passes.cache.swap(place, left)
                self.order[place], self.order[left] = self.order[left], self.order[place]

    def run(self) -> list[list[int]]:
        """Returns the new tokens of each row."""
        self.prefill()
        while self.active:
            self.round()
        return [row.tokens for row in self.rows]


def references(model: PreTrainedModel, prompts: Sequence[list[int]], budget: int = BUDGET) -> list[list[int]]:
    """Returns what plain greedy `generate` emits for each prompt alone."""
    return [kit.reference(model, kit.prompt_tensor(prompt), budget)[0, len(prompt) :].tolist() for prompt in prompts]


def started(model: PreTrainedModel, tree_nodes: int, num_draft_tokens: int, eos: frozenset[int] = frozenset()) -> Call:
    """Returns a call after prefill."""
    call = Call(model, PROMPTS, tree_nodes, num_draft_tokens, eos=eos)
    call.prefill()
    return call
