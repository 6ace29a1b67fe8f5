"""Trees in the shared cache: places and masks against the definition, and every node against its path alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from layerskip.model.cache import SharedCache
from layerskip.model.layered import LayeredModel
from layerskip.model.masks import attention_mask
from layerskip.model.placement import Placement
from tests import kit

CPU = torch.device("cpu")
# A root with three children, of which the second and the third have children of their own.
BRANCHING = [-1, -1, 1, 1, -1, 4, 2]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Returns a node and its ancestors, the highest first; nothing for the root, −1."""
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


@dataclass(frozen=True)
class Forest:
    """A tree in each row, and how many of its last tokens pass."""

    roots: list[int]
    parents: list[list[int]]
    live: list[int]

    @property
    def scratch(self) -> int:
        return max(root + len(nodes) for root, nodes in zip(self.roots, self.parents, strict=True)) + 1

    @property
    def placement(self) -> Placement:
        return Placement.tree(self.roots, self.parents, self.live, self.scratch, CPU)


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Draws one to three trees of up to six nodes; some rows may wait, but not all."""
    rows = draw(st.integers(1, 3))
    roots = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    sizes = draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows))
    parents = [[draw(st.integers(-1, node - 1)) for node in range(size)] for size in sizes]
    live = draw(st.tuples(*(st.integers(0, size + 1) for size in sizes)).filter(any))
    return Forest(roots, parents, list(live))


windows = st.one_of(st.none(), st.integers(1, 12))


# Placement


@given(forests())
def test_nodes_fill_consecutive_slots_and_stand_at_the_position_of_their_depth(forest: Forest) -> None:
    placement = forest.placement
    rows = len(forest.roots)
    slots, positions = placement.slots.expand(rows, -1).tolist(), placement.positions.expand(rows, -1).tolist()
    for row, (root, parents, live) in enumerate(zip(forest.roots, forest.parents, forest.live, strict=True)):
        passing = list(range(-1, len(parents)))[1 + len(parents) - live :]
        assert slots[row][:live] == [root + 1 + node for node in passing]
        assert positions[row][:live] == [root + len(path_to(parents, node)) for node in passing]
        assert slots[row][live:] == [forest.scratch] * (placement.width - live)
        # The scratch slot may lie behind the last position that the model has.
        assert positions[row][live:] == [root] * (placement.width - live)
        assert placement.ends[row] == root + 1 + len(parents)


def test_a_tree_of_a_root_alone_is_a_single_step() -> None:
    placement = Placement.tree([4, 4], [[], []], [1, 1], 9, CPU)
    plain = Placement.of([4, 4], [1, 1], 1, 9, CPU)
    assert (placement.start, placement.view, placement.width) == (plain.start, plain.view, plain.width) == (4, 5, 1)
    assert placement.positions.tolist() == [[4], [4]]
    assert attention_mask(placement, None, torch.float32, causal_by_flag=True) is None


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2]])
def test_a_parent_that_is_no_earlier_node_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match=r"parents\[1\]\["):
        Placement.tree([3, 3], [[], parents], [1, 1], 9, CPU)


def test_nodes_that_reach_the_scratch_slot_are_refused() -> None:
    assert Placement.tree([3], [[-1, -1]], [2], 6, CPU).view == 6
    with pytest.raises(ValueError, match="slot 5 is for dead tokens"):
        Placement.tree([3], [[-1, -1]], [2], 5, CPU)


# Masks


@settings(max_examples=300)
@given(forests(), windows, st.booleans())
def test_mask_equals_the_definition(forest: Forest, window: int | None, causal_by_flag: bool) -> None:
    placement = forest.placement
    mask = attention_mask(placement, window, torch.float32, causal_by_flag)
    for row, (root, parents, live) in enumerate(zip(forest.roots, forest.parents, forest.live, strict=True)):
        for token in range(live):
            node = len(parents) - live + token
            path = path_to(parents, node)
            # Of every token in sight its slot and its position.
            sight = [(slot, slot) for slot in range(root + 1)]
            sight += [(root + 1 + ancestor, root + 1 + above) for above, ancestor in enumerate(path)]
            position = root + len(path)
            expected = sorted(slot for slot, at in sight if window is None or position - at < window)
            if mask is not None:
                line = mask[row if mask.shape[0] > 1 else 0, 0, token]
                assert set(line.tolist()) <= {0.0, torch.finfo(torch.float32).min}
                assert (line == 0).nonzero().flatten().tolist() == expected
            elif placement.width == 1:
                assert expected == list(range(placement.view))
            else:
                assert causal_by_flag and placement.start == 0
                assert expected == list(range(token + 1))


def test_a_window_counts_positions_and_not_slots() -> None:
    """The last node stands two positions behind the root, but seven slots: a window of three shows the root still."""
    mask = attention_mask(Placement.tree([5], [BRANCHING], [1], 20, CPU), 3, torch.float32, causal_by_flag=True)
    assert mask is not None
    # Node 6 follows node 2, which follows node 1.
    assert (mask[0, 0, 0] == 0).nonzero().flatten().tolist() == [5 + 1 + 1, 5 + 1 + 2, 5 + 1 + 6]
    assert Placement.tree([5], [BRANCHING], [1], 20, CPU).positions.tolist() == [[8]]


# Models


class Round:
    """Rows of a model with a committed text each, whose trees pass as the decode loop would have them pass."""

    def __init__(self, model: PreTrainedModel, texts: Sequence[list[int]], num_nodes: int) -> None:
        self.model = LayeredModel(model)
        self.texts = texts
        capacity = max(map(len, texts)) + num_nodes + 1
        self.scratch = capacity - 1
        self.cache = SharedCache(self.model.num_layers, len(texts), capacity)
        # Nodes stand at positions, of which there are no more than the model's, not at slots.
        self.rotary = self.model.rotary_tables(max(map(len, texts)) + num_nodes)
        self.roots = [len(text) - 1 for text in texts]
        prompts = [text[:-1] for text in texts]
        self.run(Placement.prompt([len(prompt) for prompt in prompts], CPU), prompts)

    @torch.no_grad()
    def run(self, placement: Placement, tokens: Sequence[Sequence[int]], stop: int | None = None) -> torch.Tensor:
        """Runs layers 1 to `stop`, or all, over some tokens of each row."""
        ids = torch.tensor([[*row, *[0] * (placement.width - len(row))] for row in tokens])
        hidden = self.model.embed(ids, placement.positions)
        return self.through(hidden, 0, self.model.num_layers if stop is None else stop, placement)

    @torch.no_grad()
    def through(self, hidden: torch.Tensor, start: int, stop: int, placement: Placement) -> torch.Tensor:
        return self.model.run(hidden, start, stop, placement=placement, cache=self.cache, rotary=self.rotary)

    @torch.no_grad()
    def tree(
        self, parents: Sequence[list[int]], tokens: Sequence[list[int]], steps: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Passes trees through layers 1..E, `steps[i][row]` nodes in the i-th pass after the root's, then the rest.

        Returns:
            The exit states of each row, `(1 + nodes, hidden)`, and the full logits,
            `(rows, 1 + most nodes, vocabulary)`.
        """
        rows = range(len(self.texts))
        done = [0 for _ in rows]
        placement = Placement.tree(self.roots, [[] for _ in rows], [1 for _ in rows], self.scratch, CPU)
        first = self.run(placement, [text[-1:] for text in self.texts], kit.EXIT_LAYER)
        states = [[first[row]] for row in rows]
        for counts in steps:
            passing = [tokens[row][done[row] : done[row] + counts[row]] for row in rows]
            done = [before + count for before, count in zip(done, counts, strict=True)]
            sofar = [parents[row][: done[row]] for row in rows]
            placement = Placement.tree(self.roots, sofar, counts, self.scratch, CPU)
            hidden = self.run(placement, passing, kit.EXIT_LAYER)
            for row in rows:
                states[row].append(hidden[row, : counts[row]])
        joined = [torch.cat(own) for own in states]
        placement = Placement.tree(self.roots, parents, [len(own) for own in joined], self.scratch, CPU)
        padded = torch.nn.utils.rnn.pad_sequence(joined, batch_first=True)
        late = self.through(padded, kit.EXIT_LAYER, self.model.num_layers, placement)
        return joined, self.model.logits(late)


@torch.no_grad()
def plain(model: PreTrainedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the exit state, `(hidden,)`, and the logits, `(vocabulary,)`, at the end of a text without a cache."""
    output = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return output.hidden_states[kit.EXIT_LAYER][0, -1], output.logits[0, -1]


TEXTS = [kit.PROMPT, [60, 2, 71, 13, 9], [8, 20, 31, 60, 2, 9, 77, 12, 4, 4, 15, 31, 40]]
PARENTS = [BRANCHING, [-1, 0, 0, 1, 2], [-1, -1, -1, 2, 3, 4, 0]]
TOKENS = [[4, 8, 15, 16, 23, 42, 4], [30, 31, 32, 33, 34], [50, 51, 52, 53, 54, 55, 56]]
# Nodes of each row in every pass: different numbers, and none where a row has finished.
STEPS = [[2, 1, 3], [3, 4, 0], [2, 0, 4]]
FAMILIES = [
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("qwen3", "sdpa"),
    ("qwen3", "eager"),
    ("gemma2", "eager"),
    ("gemma3_text", "sdpa"),
    ("gpt2", "sdpa"),
]


def build(family: str, implementation: str) -> PreTrainedModel:
    return kit.build(kit.CONFIGS[family](), attn_implementation=implementation)


@pytest.mark.parametrize(("family", "implementation"), FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_node_has_the_state_and_the_logits_of_its_path_alone(family: str, implementation: str, rows: int) -> None:
    """The windows of 6 are shorter than two of the texts, and the third passes its own within the tree."""
    model = build(family, implementation)
    steps = [counts[:rows] for counts in STEPS]
    states, logits = Round(model, TEXTS[:rows], 7).tree(PARENTS[:rows], TOKENS[:rows], steps)
    for row in range(rows):
        for node in range(-1, len(PARENTS[row])):
            path = [TOKENS[row][ancestor] for ancestor in path_to(PARENTS[row], node)]
            state, full = plain(model, TEXTS[row] + path)
            torch.testing.assert_close(states[row][1 + node], state, rtol=0, atol=1e-5)
            torch.testing.assert_close(logits[row, 1 + node], full, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "implementation"), FAMILIES)
def test_without_the_tree_mask_the_nodes_see_each_other(
    family: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control for the test above."""
    model = build(family, implementation)
    monkeypatch.setattr(Placement, "elsewhere", None)
    states, logits = Round(model, TEXTS[:1], 7).tree(PARENTS[:1], TOKENS[:1], [[2], [3], [2]])
    for node in (5, 6):
        path = [TOKENS[0][ancestor] for ancestor in path_to(BRANCHING, node)]
        state, full = plain(model, TEXTS[0] + path)
        assert (states[0][1 + node] - state).abs().max() > 1e-3
        assert (logits[0, 1 + node] - full).abs().max() > 1e-3


@pytest.mark.parametrize(("family", "implementation"), FAMILIES)
def test_a_slot_is_not_a_position(family: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another control: nodes at the positions of their slots."""
    model = build(family, implementation)
    monkeypatch.setattr(Placement, "positions", property(lambda placement: placement.slots))
    _, logits = Round(model, TEXTS[:1], 7).tree(PARENTS[:1], TOKENS[:1], [[2], [3], [2]])
    _, full = plain(model, TEXTS[0] + [8, 15, 4])
    assert (logits[0, 7] - full).abs().max() > 1e-3


@pytest.mark.parametrize(("family", "implementation"), FAMILIES)
def test_after_compaction_all_layers_hold_what_a_fresh_prefill_of_the_accepted_text_does(
    family: str, implementation: str
) -> None:
    model = build(family, implementation)
    tree = Round(model, TEXTS, 7)
    tree.tree(PARENTS, TOKENS, STEPS)
    paths = [path_to(PARENTS[0], 6), path_to(PARENTS[1], 4), path_to(PARENTS[2], 5)]
    assert [len(path) for path in paths] == [3, 3, 4]
    tree.cache.compact(
        [root + 1 for root in tree.roots],
        [[root + 1 + node for node in path] for root, path in zip(tree.roots, paths, strict=True)],
    )
    accepted = [text + [tokens[node] for node in path] for text, tokens, path in zip(TEXTS, TOKENS, paths, strict=True)]
    tree.cache.rollback([len(text) for text in accepted])
    for row, text in enumerate(accepted):
        fresh = Round(model, [[*text, 0]], 0)
        for held, expected in zip(tree.cache.shared_layers, fresh.cache.shared_layers, strict=True):
            for name in ("keys", "values"):
                own, alone = getattr(held, name)[row, :, : len(text)], getattr(expected, name)[0, :, : len(text)]
                torch.testing.assert_close(own, alone, rtol=0, atol=1e-5)


def test_trees_may_fill_more_slots_than_the_model_has_positions() -> None:
    """Dead tokens go to a slot that is no position of a model whose positions are learned."""
    model = kit.build(kit.gpt2_config(n_positions=16))
    parents, tokens = [[-1] * 12, [-1, -1]], [list(range(12)), [5, 6]]
    tree = Round(model, [kit.PROMPT, TEXTS[1]], 12)
    _, logits = tree.tree(parents, tokens, [[12, 2]])
    assert tree.scratch > 16
    for row, text in enumerate([kit.PROMPT, TEXTS[1]]):
        for node, token in enumerate(tokens[row]):
            _, full = plain(model, [*text, token])
            torch.testing.assert_close(logits[row, 1 + node], full, rtol=0, atol=1e-5)
