"""Rounds of draft trees: what is drafted, what it costs, and that greedy output is that of plain decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.decoding.tree import ROOT
from layerskip.decoding.tree_drafting import NUM_CHILDREN, best_choices
from layerskip.model.cache import SharedCache
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from tests import kit
from tests.decoding.tree_kit import PROMPTS, Call, head_of, references, started

MODELS = {
    "mixed": kit.mixed,
    "identical": kit.identical,
    "l4": kit.l4,
    "gemma2": lambda: kit.graded("gemma2", "some"),
}


@pytest.fixture(name="model", scope="module", params=MODELS)
def every_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


@pytest.fixture(name="plain", scope="module")
def plain_tokens(model: PreTrainedModel) -> list[list[int]]:
    return references(model, PROMPTS)


# Output


@pytest.mark.parametrize(("tree_nodes", "num_draft_tokens"), [(8, 1), (16, 2), (8, 3), (16, 4)])
def test_greedy_output_is_that_of_plain_decoding(
    model: PreTrainedModel, plain: list[list[int]], tree_nodes: int, num_draft_tokens: int
) -> None:
    assert Call(model, PROMPTS, tree_nodes, num_draft_tokens).run() == plain


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2"])
def test_greedy_output_is_that_of_plain_decoding_in_every_other_family(family: str) -> None:
    model = kit.graded(family, "some")
    assert Call(model, PROMPTS, 8, 3).run() == references(model, PROMPTS)


def test_one_row_gives_the_same_as_in_a_batch(model: PreTrainedModel) -> None:
    alone = [Call(model, [prompt], 8, 3).run()[0] for prompt in PROMPTS]
    assert alone == Call(model, PROMPTS, 8, 3).run()


def test_a_path_is_cut_at_an_end_of_sequence() -> None:
    model = kit.identical()
    plain = references(model, PROMPTS)
    eos = plain[0][6]
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in plain]
    assert expected != plain
    assert Call(model, PROMPTS, 8, 4, eos=frozenset({eos})).run() == expected


def test_learned_positions_suffice_up_to_the_last_one() -> None:
    model = kit.graded("gpt2", "some")
    budget = model.config.n_positions - max(map(len, PROMPTS))
    assert Call(model, PROMPTS, 16, 3, budget=budget).run() == references(model, PROMPTS, budget)


def test_without_moving_the_accepted_path_the_output_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control for the tests above."""
    model = kit.identical()
    monkeypatch.setattr(SharedCache, "compact", lambda *arguments: None)
    assert Call(model, PROMPTS, 16, 4).run() != references(model, PROMPTS)


# Acceptance


def agreement(model: PreTrainedModel, count: int) -> float:
    """Returns how often the model's own next token is among the exit's first `count`, on greedy text."""
    layered, hits, total = LayeredModel(model), 0, 0
    for prompt in PROMPTS:
        ids = kit.reference(model, kit.prompt_tensor(prompt))
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[kit.EXIT_LAYER][0, len(prompt) - 1 : -1]
            tokens, _ = best_choices(layered.logits(states), count=count)
        hits += int((tokens == ids[0, len(prompt) :, None]).any(-1).sum())
        total += len(tokens)
    return hits / total


def test_where_the_right_token_is_seldom_first_a_tree_accepts_more_than_a_chain() -> None:
    # The head's scale decides how sure of itself the exit is, but not what it would choose first.
    model = kit.build(kit.llama_config(), spread=24.0)
    assert agreement(model, 1) < 0.6
    assert agreement(model, 4) > 0.8
    rounds = []
    for tree_nodes, children in ((4, 1), (16, NUM_CHILDREN)):
        call = Call(model, PROMPTS, tree_nodes, 4, head=head_of(model, children))
        assert call.run() == references(model, PROMPTS)
        rounds.append(call.rounds)
    chain, tree = rounds
    assert tree < 0.8 * chain


def test_with_one_choice_after_every_state_the_tree_is_a_chain() -> None:
    model = kit.mixed()
    call = Call(model, PROMPTS, 4, 4, head=head_of(model, 1))
    call.prefill()
    for tree in call.draft()[0]:
        assert [node.parent for node in tree.nodes] == [ROOT, 0, 1, 2]


# Work


@pytest.mark.parametrize("rows", [1, 3])
def test_both_spans_process_prompts_nodes_and_roots_once(model: PreTrainedModel, rows: int) -> None:
    call = Call(model, PROMPTS[:rows], 8, 3)
    with kit.counted_layers(model) as counts:
        call.run()
    tallies = [row.tally for row in call.rows]
    nodes = sum(tally.draft_tokens_processed for tally in tallies)
    expected = sum(map(len, PROMPTS[:rows])) + nodes + call.rounds
    assert nodes > 0
    assert sum(tally.early_layer_tokens for tally in tallies) == expected
    assert sum(tally.late_layer_tokens for tally in tallies) == expected
    # Where the rows of a batch take different numbers in a pass, the early layers see more padding than the late ones,
    # which run over all nodes at once.
    padded = expected + sum(tally.padding_tokens for tally in tallies)
    assert counts[: kit.EXIT_LAYER] == [padded] * kit.EXIT_LAYER
    assert all(expected <= count <= padded for count in counts[kit.EXIT_LAYER :])
    assert rows > 1 or padded == expected


@pytest.mark.parametrize(
    ("tree_nodes", "num_draft_tokens", "spread"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (16, 3, [6, 5, 5]), (3, 4, [1, 1, 1]), (8, 1, [8]), (0, 4, [])],
)
def test_a_round_spreads_its_nodes_over_a_pass_for_each_level(
    tree_nodes: int, num_draft_tokens: int, spread: list[int]
) -> None:
    call = Call(kit.mixed(), PROMPTS, tree_nodes, num_draft_tokens)
    call.prefill()
    call.passes.seen.clear()
    call.round()
    early = [(0, kit.EXIT_LAYER, (count,) * 3) for count in [1, *spread]]
    assert call.passes.seen == [*early, (kit.EXIT_LAYER, kit.NUM_LAYERS, (1 + tree_nodes,) * 3)]
    assert [row.tally.draft_tokens_processed for row in call.rows] == [tree_nodes] * 3


def test_the_head_runs_only_over_states_that_others_may_follow() -> None:
    seen = []

    def head(states: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(states))
        return best_choices(layered.logits(states))

    model = kit.mixed()
    layered = LayeredModel(model)
    call = Call(model, PROMPTS, 8, 2, head=head)
    call.prefill()
    call.round()
    # The roots, then the nodes of the first pass; nothing follows the last.
    assert seen == [3, 12]


# Trees


def test_what_a_budget_leaves_bounds_each_rows_tree_and_its_passes() -> None:
    call = started(kit.mixed(), 6, 3)
    trees, states, placement = call.draft([0, 1, 9])
    assert all(tree.depth <= depth for tree, depth in zip(trees, [0, 1, 3], strict=True))
    assert [len(tree.nodes) for tree in trees] == [0, 6, 6]
    assert {node.depth for node in trees[1].nodes} == {1}
    assert placement.live == (1, 7, 7)
    assert states.shape[:2] == (3, 7)
    # The root's pass, then all nodes of the second row at once beside the first two of the third.
    assert [live for _, _, live in call.passes.seen[-4:]] == [(1, 1, 1), (0, 6, 2), (0, 0, 2), (0, 0, 2)]


def test_nothing_is_drafted_where_no_budget_leaves_anything() -> None:
    call = started(kit.mixed(), 6, 3)
    trees, states, placement = call.draft([0, 0, 0])
    assert [tree.nodes for tree in trees] == [[], [], []]
    assert states.shape[:2] == (3, 1) and placement.live == (1, 1, 1)


def test_an_end_of_sequence_in_the_tree_has_no_children() -> None:
    model = kit.mixed()
    free = started(model, 12, 3).draft()[0][0]
    eos = free.nodes[0].token
    assert any(node.parent == 0 for node in free.nodes)
    bound = started(model, 12, 3, eos=frozenset({eos})).draft()[0][0]
    assert bound.nodes[0].token == eos
    assert all(node.parent != 0 for node in bound.nodes)
    assert len(bound.nodes) == 12


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2"])
def test_states_stand_in_the_order_of_root_and_nodes(family: str) -> None:
    """Rows of which one drafts less than the others, so that states of several passes are put together."""
    model = kit.build(kit.CONFIGS[family]())
    call = started(model, 7, 3)
    rows = call.active
    with torch.inference_mode():
        trees, states, placement = call.draft([3, 1, 2])
        hidden = call.passes.run(rows, states, kit.EXIT_LAYER, kit.NUM_LAYERS, placement)
        logits = call.model.logits(hidden)
    for row, tree in enumerate(trees):
        text = [*PROMPTS[rows[row].index], *rows[row].tokens]
        for node in range(ROOT, len(tree.nodes)):
            ids = [*text, *(tree.nodes[each].token for each in tree.ancestors(node))]
            with torch.no_grad():
                alone = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
            state = alone.hidden_states[kit.EXIT_LAYER][0, -1]
            torch.testing.assert_close(states[row, 1 + node], state, rtol=0, atol=1e-5)
            torch.testing.assert_close(logits[row, 1 + node], alone.logits[0, -1], rtol=0, atol=1e-5)


def test_nodes_are_the_exits_choices_with_their_joint_probabilities() -> None:
    model = kit.mixed()
    tree = started(model, 12, 3).draft()[0][0]
    text = [*kit.PROMPT, *references(model, [kit.PROMPT])[0][:1]]
    layered = LayeredModel(model)
    for index, node in enumerate(tree.nodes):
        above = [tree.nodes[each].token for each in tree.ancestors(index)[:-1]]
        with torch.no_grad():
            output = model(torch.tensor([[*text, *above]]), output_hidden_states=True)
            chances = layered.logits(output.hidden_states[kit.EXIT_LAYER][0, -1]).softmax(-1)
        assert node.token in chances.topk(NUM_CHILDREN).indices.tolist()
        before = 1.0 if node.parent == ROOT else tree.nodes[node.parent].probability
        assert node.probability == pytest.approx(before * chances[node.token].item(), rel=1e-3)


# The head


def test_best_choices_are_the_likeliest_tokens_of_a_softmax_over_all() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    tokens, probabilities = best_choices(logits, count=2)
    assert tokens.tolist() == [[1, 2]]
    torch.testing.assert_close(probabilities, logits.softmax(-1)[:, [1, 2]])


def test_best_choices_of_a_draft_head_are_named_by_its_token_ids_and_no_more_than_it_has() -> None:
    tokens, probabilities = best_choices(torch.tensor([[0.0, 2.0, 1.0]]).bfloat16(), torch.tensor([5, 60, 70]))
    assert tokens.tolist() == [[60, 70, 5]]
    assert probabilities.dtype == torch.float32
    assert probabilities.sum().item() == pytest.approx(1)


def test_trees_from_a_trimmed_head_do_not_change_the_output() -> None:
    model = kit.mixed()
    plain = references(model, PROMPTS)
    ids = torch.tensor(sorted({token for row in plain for token in row[::2]}))
    head = DraftHead.of(LayeredModel(model), ids)
    call = Call(model, PROMPTS, 8, 3, head=lambda states: best_choices(head.logits(states), head.token_ids))
    call.prefill()
    assert {node.token for tree in call.draft()[0] for node in tree.nodes} <= set(ids.tolist())
    whole = Call(model, PROMPTS, 8, 3, head=lambda states: best_choices(head.logits(states), head.token_ids))
    assert whole.run() == plain
