"""The draft tree: best-first order and greedy acceptance against searches over all paths."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip.decoding.tree import ROOT, DraftTree, Node

# A language of three tokens; what follows depends on the whole path.
TOKENS = (0, 1, 2)
Path = tuple[int, ...]
Language = dict[Path, tuple[float, ...]]


def language(seed: int, depth: int = 4) -> Language:
    """Returns the probabilities of the next token after every path shorter than `depth`."""
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for length in range(depth):
        for path in product(TOKENS, repeat=length):
            rows[path] = tuple((2 * torch.randn(3, generator=generator, dtype=torch.float64)).softmax(-1).tolist())
    return rows


def joint(rows: Language, path: Path) -> float:
    """Returns the probability of a path from the definition."""
    return prod(rows[path[:step]][token] for step, token in enumerate(path))


def words(tree: DraftTree, node: int) -> Path:
    """Returns the tokens from the root's child to a node."""
    return tuple(tree.nodes[each].token for each in tree.ancestors(node))


def grown(rows: Language, tree: DraftTree, counts: list[int]) -> None:
    """Offers what the language says after the root and every node, and takes `counts[i]` candidates in step i."""
    passed = [ROOT]
    for count in counts:
        for node in passed:
            path = () if node == ROOT else words(tree, node)
            tree.offer(node, TOKENS, rows.get(path, (0.0,) * 3))
        passed = tree.take(count)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 4))
def test_node_by_node_the_tree_holds_the_likeliest_of_all_paths(seed: int, nodes: int, depth: int) -> None:
    rows = language(seed)
    tree = DraftTree(nodes, depth, ())
    grown(rows, tree, [1] * nodes)
    paths = [path for length in range(1, depth + 1) for path in product(TOKENS, repeat=length)]
    best = sorted(paths, key=lambda path: -joint(rows, path))[:nodes]
    assert [words(tree, node) for node in range(len(tree.nodes))] == best
    assert [node.probability for node in tree.nodes] == pytest.approx([joint(rows, path) for path in best])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 4))
def test_every_step_takes_the_likeliest_children_of_what_has_passed(seed: int, counts: list[int], depth: int) -> None:
    rows = language(seed)
    tree = DraftTree(100, depth, ())
    grown(rows, tree, counts)
    first = 0
    held: set[Path] = {()}
    for count in counts:
        frontier = {(*path, token) for path in held if len(path) < depth for token in TOKENS} - held
        best = sorted(frontier, key=lambda path: -joint(rows, path))[:count]
        assert [words(tree, node) for node in range(first, first + len(best))] == best
        held |= set(best)
        first += len(best)
    assert first == len(tree.nodes)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 9))
def test_parents_stand_before_their_children_and_within_the_budget(seed: int, counts: list[int], limit: int) -> None:
    tree = DraftTree(limit, 4, ())
    grown(language(seed), tree, counts)
    assert len(tree.nodes) == min(limit, len(tree.nodes)) and tree.room == limit - len(tree.nodes)
    for index, node in enumerate(tree.nodes):
        assert ROOT <= node.parent < index
        assert node.depth == len(tree.ancestors(index)) <= 4
    assert tree.depth == max((len(tree.ancestors(index)) for index in range(len(tree.nodes))), default=0)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(0, 10_000))
def test_the_accepted_path_is_the_longest_that_the_targets_spell(data: st.DataObject, seed: int) -> None:
    tree = DraftTree(12, 4, ())
    grown(language(seed), tree, [3, 3, 3, 3])
    targets = data.draw(st.lists(st.sampled_from(TOKENS), min_size=13, max_size=13))
    fitting = []
    for end in range(len(tree.nodes)):
        path = tree.ancestors(end)
        before = [ROOT, *path[:-1]]
        if all(tree.nodes[node].token == targets[1 + above] for above, node in zip(before, path, strict=True)):
            fitting.append(path)
    assert tree.accept(targets) == max(fitting, key=len, default=[])


def branching(max_nodes: int = 10, max_depth: int = 3, eos: tuple[int, ...] = ()) -> DraftTree:
    """Two children of the root, 7 and 8, and two of the better one, 5 and 6."""
    tree = DraftTree(max_nodes, max_depth, eos)
    tree.offer(ROOT, [7, 8, 9], [0.5, 0.3, 0.1])
    tree.take(2)
    tree.offer(0, [5, 6], [0.5, 0.4])
    tree.take(2)
    return tree


def test_nodes_tell_their_parent_depth_and_joint_probability() -> None:
    assert branching().nodes == [
        Node(7, ROOT, 1, 0.5),
        Node(8, ROOT, 1, 0.3),
        Node(5, 0, 2, 0.25),
        Node(6, 0, 2, 0.2),
    ]


def test_acceptance_follows_one_branch_and_ends_where_no_child_fits() -> None:
    tree = branching()
    assert tree.accept([7, 6, 0, 0, 0]) == [0, 3]
    assert tree.accept([8, 6, 5, 0, 0]) == [1]
    assert tree.accept([9, 6, 5, 0, 0]) == []
    # The same token under another parent does not count.
    assert tree.accept([5, 6, 5, 0, 0]) == []


def test_a_tree_without_nodes_accepts_nothing() -> None:
    tree = DraftTree(4, 0, ())
    tree.offer(ROOT, [1], [1.0])
    assert tree.take(4) == [] and tree.accept([1]) == [] and tree.depth == 0


def test_an_end_of_sequence_has_no_children() -> None:
    tree = branching(eos=(7,))
    assert [node.token for node in tree.nodes] == [7, 8, 9]
    assert not tree.can_grow(0) and tree.can_grow(1)


def test_nodes_at_the_last_depth_have_no_children() -> None:
    tree = branching(max_depth=2)
    assert tree.can_grow(1) and not tree.can_grow(2)
    tree.offer(2, [1], [1.0])
    assert [tree.nodes[node].token for node in tree.take(10)] == [9]


def test_a_full_tree_takes_and_wants_no_more() -> None:
    tree = branching(max_nodes=3)
    assert len(tree.nodes) == 3 and tree.room == 0
    assert tree.take(1) == []
    assert not any(tree.can_grow(node) for node in (ROOT, 0, 1, 2))


def test_of_equally_likely_candidates_the_first_that_was_offered_goes_first() -> None:
    tree = DraftTree(10, 3, ())
    tree.offer(ROOT, [4, 3, 2], [0.5, 0.25, 0.25])
    tree.take(1)
    tree.offer(0, [9, 1], [0.5, 0.5])
    assert [tree.nodes[node].token for node in tree.take(4)] == [3, 2, 9, 1]


def test_what_has_no_probability_is_no_candidate() -> None:
    tree = DraftTree(10, 3, ())
    tree.offer(ROOT, [4, 3, 2], [1.0, 0.0, float("nan")])
    assert [tree.nodes[node].token for node in tree.take(3)] == [4]


@pytest.mark.parametrize("parent", [-2, 4])
def test_an_offer_after_no_node_is_refused(parent: int) -> None:
    with pytest.raises(ValueError, match=f"parent={parent}"):
        branching().offer(parent, [1], [1.0])


def test_an_offer_of_tokens_without_probabilities_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1"):
        branching().offer(0, [1, 2], [1.0])
