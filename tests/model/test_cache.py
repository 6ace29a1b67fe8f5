"""The shared cache: a length per row, rollback that moves nothing, and logits that equal those without a cache."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from layerskip.model.cache import CachedTokens, SharedCache, SharedCacheLayer
from layerskip.model.layered import LayeredModel, RotaryTables
from layerskip.model.placement import Placement
from tests import kit

CPU = torch.device("cpu")
HEADS, HEAD_SIZE = 2, 3


def states(rows: int, width: int, first: float = 0.0) -> torch.Tensor:
    """Returns keys or values `(rows, heads, width, head size)` of which no two numbers are alike."""
    count = rows * HEADS * width * HEAD_SIZE
    return (first + 1 + torch.arange(count, dtype=torch.float32)).view(rows, HEADS, width, HEAD_SIZE)


def store(
    cache: SharedCache, layer: int, placement: Placement, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stores `keys` and the values `−keys` in layer `layer` (from 0), and returns what its attention would read."""
    cache.placement = placement
    return cache.update(keys, -keys, layer)


# Writing


def test_a_new_cache_is_empty_and_allocates_nothing() -> None:
    cache = SharedCache(num_layers=3, rows=2, capacity=8)
    assert [layer.lengths for layer in cache.shared_layers] == [(0, 0)] * 3
    assert not any(layer.is_initialized for layer in cache.shared_layers)
    assert cache.get_seq_length() == 0


def test_buffers_have_room_for_all_rows_and_take_the_type_of_the_keys() -> None:
    cache = SharedCache(num_layers=1, rows=3, capacity=8)
    store(cache, 0, Placement.prompt([4] * 3, CPU), states(3, 4).to(torch.bfloat16))
    layer = cache.shared_layers[0]
    assert layer.keys.shape == layer.values.shape == (3, HEADS, 8, HEAD_SIZE)
    assert layer.keys.dtype == layer.values.dtype == torch.bfloat16
    assert layer.get_max_length() == 8


def test_slot_i_of_a_row_holds_its_position_i() -> None:
    cache = SharedCache(num_layers=1, rows=2, capacity=8)
    prompt, following = states(2, 3), states(2, 2, 100)
    store(cache, 0, Placement.prompt([3, 3], CPU), prompt)
    store(cache, 0, Placement.of([3, 3], [2, 2], 2, 7, CPU), following)
    layer = cache.shared_layers[0]
    assert torch.equal(layer.keys[:, :, :5], torch.cat([prompt, following], dim=2))
    assert torch.equal(layer.values, -layer.keys)
    assert layer.lengths == (5, 5)


def test_rows_of_different_lengths_are_written_where_each_one_stands() -> None:
    cache = SharedCache(num_layers=1, rows=2, capacity=8)
    prompt, following = states(2, 4), states(2, 2, 100)
    store(cache, 0, Placement.prompt([4, 2], CPU), prompt)
    assert cache.shared_layers[0].lengths == (4, 2)
    store(cache, 0, Placement.of([4, 2], [2, 1], 2, 7, CPU), following)
    keys, lengths = cache.shared_layers[0].keys, cache.shared_layers[0].lengths
    assert lengths == (6, 3)
    assert torch.equal(keys[0, :, :6], torch.cat([prompt[0], following[0]], dim=1))
    assert torch.equal(keys[1, :, :3], torch.cat([prompt[1, :, :2], following[1, :, :1]], dim=1))


def test_dead_tokens_go_to_the_scratch_slot_and_nowhere_else() -> None:
    cache = SharedCache(num_layers=1, rows=2, capacity=8)
    store(cache, 0, Placement.prompt([4, 2], CPU), states(2, 4))
    before = cache.shared_layers[0].keys.clone()
    following = states(2, 3, 100)
    store(cache, 0, Placement.of([4, 2], [3, 0], 3, 7, CPU), following)
    keys = cache.shared_layers[0].keys
    assert torch.equal(keys[1, :, :7], before[1, :, :7])
    assert any(torch.equal(keys[1, :, 7], following[1, :, token]) for token in range(3))
    assert cache.shared_layers[0].lengths == (7, 2)


def test_attention_reads_views_of_the_buffers_up_to_the_longest_row() -> None:
    cache = SharedCache(num_layers=1, rows=2, capacity=8)
    store(cache, 0, Placement.prompt([4, 2], CPU), states(2, 4))
    keys, values = store(cache, 0, Placement.of([4, 2], [1, 2], 2, 7, CPU), states(2, 2, 100))
    layer = cache.shared_layers[0]
    assert keys.shape == values.shape == (2, HEADS, 5, HEAD_SIZE)
    assert keys.data_ptr() == layer.keys.data_ptr() and values.data_ptr() == layer.values.data_ptr()
    assert torch.equal(keys, layer.keys[:, :, :5])


def test_a_pass_over_the_first_rows_leaves_the_others_alone() -> None:
    """Finished rows stand last; the rest are a view."""
    cache = SharedCache(num_layers=1, rows=3, capacity=8)
    store(cache, 0, Placement.prompt([4, 4, 4], CPU), states(3, 4))
    before = cache.shared_layers[0].keys.clone()
    keys, _ = store(cache, 0, Placement.of([4, 4], [1, 1], 1, 7, CPU), states(2, 1, 100))
    assert keys.shape[0] == 2
    assert torch.equal(cache.shared_layers[0].keys[2], before[2])
    assert cache.shared_layers[0].lengths == (5, 5, 4)


def test_storing_without_a_placement_raises() -> None:
    with pytest.raises(RuntimeError, match="place"):
        SharedCache(num_layers=1, rows=1, capacity=8).update(states(1, 2), states(1, 2), 0)


@settings(max_examples=100)
@given(st.data())
def test_any_sequence_of_passes_and_rollbacks_holds_what_a_list_per_row_holds(data: st.DataObject) -> None:
    """Every number that is stored is its own; a plain list per row says which of them a row must hold."""
    rows = data.draw(st.integers(1, 3))
    capacity = 24
    cache = SharedCache(num_layers=1, rows=rows, capacity=capacity)
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows))
    prompt = states(rows, max(lengths))
    store(cache, 0, Placement.prompt(lengths, CPU), prompt)
    expected = [[prompt[row, 0, token, 0].item() for token in range(length)] for row, length in enumerate(lengths)]
    for step in range(4):
        width = data.draw(st.integers(1, 4))
        live = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows).filter(any))
        placement = Placement.of([len(row) for row in expected], live, width, capacity - 1, CPU)
        new = states(rows, width, 1000.0 * (step + 1))
        store(cache, 0, placement, new)
        for row, count in enumerate(live):
            expected[row] += [new[row, 0, token, 0].item() for token in range(count)]
        expected = [row[: data.draw(st.integers(1, len(row)))] for row in expected]
        cache.rollback([len(row) for row in expected])
        layer = cache.shared_layers[0]
        assert layer.lengths == tuple(len(row) for row in expected)
        assert [layer.keys[row, 0, :length, 0].tolist() for row, length in enumerate(layer.lengths)] == expected


# Rolling back


def filled(num_layers: int = 2, rows: int = 2, length: int = 6) -> SharedCache:
    cache = SharedCache(num_layers, rows, capacity=8)
    for layer in range(num_layers):
        store(cache, layer, Placement.prompt([length] * rows, CPU), states(rows, length, 1000.0 * layer))
    return cache


def test_rollback_sets_lengths_and_moves_nothing() -> None:
    cache = filled()
    before = [layer.keys.clone() for layer in cache.shared_layers]
    cache.rollback([5, 2])
    assert [layer.lengths for layer in cache.shared_layers] == [(5, 2), (5, 2)]
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.shared_layers, before, strict=True))


@pytest.mark.parametrize("length", range(7))
def test_rollback_goes_to_any_length_including_the_present_one_and_zero(length: int) -> None:
    cache = filled()
    cache.rollback([length, length])
    assert [layer.lengths for layer in cache.shared_layers] == [(length, length)] * 2


def test_rollback_of_the_first_rows_leaves_the_lengths_of_the_others() -> None:
    cache = filled(rows=3)
    cache.rollback([1, 2])
    assert cache.shared_layers[0].lengths == (1, 2, 6)


@pytest.mark.parametrize("lengths", [[7, 6], [6, 7], [6, 100]])
def test_rollback_that_would_grow_a_row_raises(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"do not fit what layer 1 holds: \(6, 6\)"):
        filled().rollback(lengths)


def test_rollback_that_would_grow_only_the_late_layers_raises() -> None:
    """Inside a round they stand behind the early ones; a rollback to the drafts' length comes too soon there."""
    cache = filled(num_layers=3)
    cache.placement = Placement.of([6, 6], [1, 1], 1, 7, CPU)
    cache.update(states(2, 1), states(2, 1), 0)
    with pytest.raises(ValueError, match="do not fit what layer 2 holds"):
        cache.rollback([7, 7])


def test_a_refused_rollback_changes_no_layer() -> None:
    cache = filled(num_layers=3)
    cache.placement = Placement.of([6, 6], [1, 1], 1, 7, CPU)
    cache.update(states(2, 1), states(2, 1), 0)
    before = [layer.lengths for layer in cache.shared_layers]
    with pytest.raises(ValueError):
        cache.rollback([5, 7])
    assert [layer.lengths for layer in cache.shared_layers] == before


def test_rollback_to_a_negative_length_raises() -> None:
    """transformers' `crop` takes negative numbers for a number of tokens to drop; this is not that."""
    with pytest.raises(ValueError):
        filled().rollback([6, -1])


def test_rollback_with_more_lengths_than_rows_raises() -> None:
    with pytest.raises(ValueError):
        filled().rollback([3, 3, 3])


def test_what_lies_behind_a_length_is_overwritten_by_the_next_pass() -> None:
    cache = filled(num_layers=1)
    cache.rollback([4, 2])
    following = states(2, 1, 500)
    store(cache, 0, Placement.of([4, 2], [1, 1], 1, 7, CPU), following)
    keys = cache.shared_layers[0].keys
    assert torch.equal(keys[0, :, 4], following[0, :, 0]) and torch.equal(keys[1, :, 2], following[1, :, 0])
    assert cache.shared_layers[0].lengths == (5, 3)


# Swapping


def test_swap_exchanges_two_rows_in_every_layer() -> None:
    cache = filled(rows=3)
    cache.rollback([1, 2, 3])
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.shared_layers]
    cache.swap(0, 2)
    for layer, (keys, values) in zip(cache.shared_layers, before, strict=True):
        assert layer.lengths == (3, 2, 1)
        assert torch.equal(layer.keys, keys[[2, 1, 0]]) and torch.equal(layer.values, values[[2, 1, 0]])


def test_swap_twice_changes_nothing() -> None:
    cache = filled(rows=3)
    before = cache.shared_layers[1].keys.clone()
    cache.swap(0, 1)
    cache.swap(0, 1)
    assert torch.equal(cache.shared_layers[1].keys, before)


def test_swap_keeps_the_addresses() -> None:
    cache = filled(rows=3)
    addresses = [layer.keys.data_ptr() for layer in cache.shared_layers]
    cache.swap(0, 2)
    assert [layer.keys.data_ptr() for layer in cache.shared_layers] == addresses


def test_swap_before_anything_is_stored_exchanges_the_lengths() -> None:
    cache = SharedCache(num_layers=1, rows=2, capacity=8)
    cache.swap(0, 1)
    assert cache.shared_layers[0].lengths == (0, 0)


# Compaction


def compacted(starts: Sequence[int], slots: Sequence[Sequence[int]]) -> tuple[SharedCache, list[list[float]]]:
    """Returns a filled cache of two layers and rows after `compact`, and the first number of each slot before."""
    cache = filled()
    before = [layer.keys[:, 0, :, 0].tolist() for layer in cache.shared_layers]
    cache.compact(starts, slots)
    return cache, before


def test_compaction_moves_the_slots_of_every_row_and_layer_forward() -> None:
    cache, before = compacted([2, 1], [[3, 5], [1, 4]])
    for layer, rows in zip(cache.shared_layers, before, strict=True):
        assert layer.keys[0, 0, :, 0].tolist() == [*rows[0][:2], rows[0][3], rows[0][5], *rows[0][4:]]
        assert layer.keys[1, 0, :, 0].tolist() == [*rows[1][:2], rows[1][4], *rows[1][3:]]
        assert torch.equal(layer.values, -layer.keys)
        assert layer.lengths == (6, 6)


def test_compaction_reads_all_slots_before_it_writes_one() -> None:
    """Sources and targets overlap: 2, 3, 4 become 1, 2, 3."""
    cache, before = compacted([1], [[2, 3, 4]])
    for layer, rows in zip(cache.shared_layers, before, strict=True):
        assert layer.keys[0, 0, :6, 0].tolist() == [rows[0][0], *rows[0][2:5], rows[0][4], rows[0][5]]
        assert layer.keys[1, 0, :, 0].tolist() == rows[1]


@pytest.mark.parametrize("slots", [[], [2], [2, 3, 4, 5]])
def test_slots_that_stand_right_already_stay(slots: list[int]) -> None:
    cache, before = compacted([2], [slots])
    assert [layer.keys[:, 0, :, 0].tolist() for layer in cache.shared_layers] == before


def test_compaction_keeps_the_addresses() -> None:
    cache = filled()
    addresses = [layer.keys.data_ptr() for layer in cache.shared_layers]
    cache.compact([1, 1], [[3], [2]])
    assert [layer.keys.data_ptr() for layer in cache.shared_layers] == addresses


@settings(max_examples=100)
@given(st.data())
def test_any_compaction_holds_what_a_list_per_row_holds(data: st.DataObject) -> None:
    starts, slots = [], []
    for _ in range(2):
        start = data.draw(st.integers(0, 6))
        starts.append(start)
        slots.append(sorted(data.draw(st.sets(st.integers(start, 5)))) if start < 6 else [])
    cache, before = compacted(starts, slots)
    for layer, rows in zip(cache.shared_layers, before, strict=True):
        for row, (start, sources) in enumerate(zip(starts, slots, strict=True)):
            expected = rows[row][:start] + [rows[row][slot] for slot in sources]
            assert layer.keys[row, 0, : start + len(sources), 0].tolist() == expected


@pytest.mark.parametrize(
    ("starts", "slots", "message"),
    [
        ([2], [[3], [4]], "1 rows and slots for 2"),
        ([2] * 3, [[3]] * 3, "first rows of 2"),
        ([2], [[1]], r"starts\[0\]=2"),
        ([-1], [[1]], r"starts\[0\]=-1"),
        ([2, 2], [[3], [4, 3]], r"slots\[1\]=\[4, 3\]"),
        ([2], [[3, 3]], "must ascend"),
        ([2], [[6]], "the 6 slots"),
    ],
)
def test_compaction_that_does_not_fit_is_refused_and_changes_nothing(
    starts: list[int], slots: list[list[int]], message: str
) -> None:
    cache = filled()
    before = [layer.keys.clone() for layer in cache.shared_layers]
    with pytest.raises(ValueError, match=message):
        cache.compact(starts, slots)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.shared_layers, before, strict=True))


# A sequence driven by hand: two rows of different lengths, drafts, rollbacks by different counts, drafts again


class Driven:
    """Two or more rows of a model and its cache, moved by hand as the decode loop would."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], budget: int = 24) -> None:
        self.model = LayeredModel(model)
        self.rows = [list(prompt) for prompt in prompts]
        capacity = max(len(row) for row in self.rows) + budget
        self.scratch = capacity - 1
        self.cache = SharedCache(self.model.num_layers, len(self.rows), capacity)
        self.rotary: RotaryTables = self.model.rotary_tables(capacity)

    def forward(self, hidden: torch.Tensor, start: int, stop: int, placement: Placement) -> torch.Tensor:
        return self.model.run(hidden, start, stop, placement=placement, cache=self.cache, rotary=self.rotary)

    @torch.no_grad()
    def prefill(self) -> torch.Tensor:
        """Returns logits `(rows, width, vocabulary)` over the prompts."""
        lengths = [len(row) for row in self.rows]
        placement = Placement.prompt(lengths, CPU)
        ids = torch.tensor([row + [0] * (placement.width - len(row)) for row in self.rows])
        hidden = self.forward(self.model.embed(ids, placement.positions), 0, self.model.num_layers, placement)
        return self.model.logits(hidden)

    @torch.no_grad()
    def round(self, drafts: Sequence[Sequence[int]], keep: Sequence[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Passes `drafts[row]` behind each row's tokens one by one through layers 1..E, all at once through the rest,
        and keeps `keep[row]` of them.

        Returns:
            The exit logits of each step, `(rows, vocabulary)`, and the full logits `(rows, steps, vocabulary)`.
        """
        starts = [len(row) for row in self.rows]
        live = [len(draft) for draft in drafts]
        exits: list[torch.Tensor] = []
        kept_states: list[torch.Tensor] = []
        for step in range(max(live)):
            alive = [int(count > step) for count in live]
            ids = torch.tensor([[draft[step] if step < len(draft) else 0] for draft in drafts])
            placement = Placement.of([start + step for start in starts], alive, 1, self.scratch, CPU)
            hidden = self.forward(self.model.embed(ids, placement.positions), 0, kit.EXIT_LAYER, placement)
            exits.append(self.model.logits(hidden)[:, 0])
            kept_states.append(hidden)
        placement = Placement.of(starts, live, max(live), self.scratch, CPU)
        hidden = self.forward(torch.cat(kept_states, dim=1), kit.EXIT_LAYER, self.model.num_layers, placement)
        for row, (draft, count) in enumerate(zip(drafts, keep, strict=True)):
            self.rows[row] += draft[:count]
        self.cache.rollback([len(row) for row in self.rows])
        return exits, self.model.logits(hidden)

    @torch.no_grad()
    def extend(self, following: Sequence[Sequence[int]]) -> torch.Tensor:
        """Passes `following[row]` behind each row's tokens through all layers; returns `(rows, width, vocabulary)`."""
        starts, live = [len(row) for row in self.rows], [len(tokens) for tokens in following]
        placement = Placement.of(starts, live, max(live), self.scratch, CPU)
        ids = torch.tensor([[*tokens, *[0] * (placement.width - len(tokens))] for tokens in following])
        hidden = self.forward(self.model.embed(ids, placement.positions), 0, self.model.num_layers, placement)
        for row, tokens in zip(self.rows, following, strict=True):
            row += tokens
        return self.model.logits(hidden)

    def kept(self, order: Sequence[int]) -> CachedTokens:
        """Returns what the cache holds of the rows in `order`."""
        return CachedTokens(
            tuple(tuple(self.rows[row]) for row in order), self.cache.kept(order), weakref.ref(self.model.model)
        )

    @classmethod
    def restored(cls, model: PreTrainedModel, cached: CachedTokens, lengths: Sequence[int], budget: int) -> Driven:
        """Returns rows that hold the first `lengths[row]` tokens of `cached` in a cache of their own."""
        driven = cls(model, [row[:length] for row, length in zip(cached.token_ids, lengths, strict=True)], budget)
        driven.cache.restore(cached.layers, lengths)
        return driven


@torch.no_grad()
def fresh_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Returns the logits of one row without a cache, `(tokens, vocabulary)`."""
    return model(torch.tensor([list(tokens)]), use_cache=False).logits[0]


# Each round: the drafts of both rows and how many of them are kept. All, none and some are kept, in every combination
# of the two rows, and rows draft different numbers of tokens.
ROUNDS: list[tuple[list[list[int]], list[int]]] = [
    ([[4, 8, 15], [16, 23, 42]], [1, 3]),
    ([[7, 7, 9, 2], [30, 31]], [0, 2]),
    ([[11], [12, 13, 14, 80]], [1, 0]),
    ([[90, 3, 4], [5]], [3, 1]),
    ([[6, 6], [6, 6]], [0, 0]),
    ([[21, 22, 23, 24], [25, 26, 27, 28]], [4, 4]),
    ([[61, 62], [63, 64, 65]], [2, 1]),
]
SECOND_PROMPT = [60, 2, 71, 13]


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("gemma2", "eager"),
        ("gemma3_text", "sdpa"),
        ("qwen3", "sdpa"),
        ("gpt2", "sdpa"),
    ],
)
def test_rows_that_part_ways_get_the_logits_of_each_row_alone(family: str, implementation: str) -> None:
    """The windows of 6 are passed within the first prompt, and by the second row in the course of the rounds."""
    model = kit.build(kit.CONFIGS[family](), attn_implementation=implementation)
    cut = kit.truncated(model, kit.EXIT_LAYER)
    driven = Driven(model, [kit.PROMPT, SECOND_PROMPT])
    logits = driven.prefill()
    for row, prompt in enumerate([kit.PROMPT, SECOND_PROMPT]):
        torch.testing.assert_close(logits[row, : len(prompt)], fresh_logits(model, prompt), rtol=0, atol=1e-5)
    for drafts, keep in ROUNDS:
        before = [list(row) for row in driven.rows]
        exits, full = driven.round(drafts, keep)
        for row, draft in enumerate(drafts):
            tokens, first = before[row] + draft, len(before[row])
            early = torch.stack([step[row] for step in exits[: len(draft)]])
            torch.testing.assert_close(early, fresh_logits(cut, tokens)[first:], rtol=0, atol=1e-5)
            torch.testing.assert_close(full[row, : len(draft)], fresh_logits(model, tokens)[first:], rtol=0, atol=1e-5)


def test_one_wrong_slot_would_show_in_the_logits() -> None:
    """A control for the test above: a rollback one token too short leaves a rejected draft in sight."""
    model = kit.l4()
    driven = Driven(model, [kit.PROMPT])
    driven.prefill()
    driven.round([[4, 8, 15]], [1])
    driven.rows[0].append(8)
    _, full = driven.round([[33]], [1])
    expected = fresh_logits(model, [*kit.PROMPT, 4, 33])[-1]
    assert (full[0, 0] - expected).abs().max() > 1e-3


def test_early_and_late_layers_stand_at_different_lengths_inside_a_round_only() -> None:
    driven = Driven(kit.l4(), [kit.PROMPT, SECOND_PROMPT])
    driven.prefill()
    placement = Placement.of([10, 4], [1, 1], 1, driven.scratch, CPU)
    with torch.no_grad():
        driven.forward(driven.model.embed(torch.tensor([[1], [2]]), placement.positions), 0, kit.EXIT_LAYER, placement)
    assert [layer.lengths for layer in driven.cache.shared_layers] == [(11, 5), (11, 5), (10, 4), (10, 4)]
    driven.cache.rollback([10, 4])
    assert [layer.lengths for layer in driven.cache.shared_layers] == [(10, 4)] * 4


def test_all_layers_stand_alike_after_every_round() -> None:
    driven = Driven(kit.l4(), [kit.PROMPT, SECOND_PROMPT])
    driven.prefill()
    for drafts, keep in ROUNDS:
        driven.round(drafts, keep)
        expected = tuple(len(row) for row in driven.rows)
        assert [layer.lengths for layer in driven.cache.shared_layers] == [expected] * kit.NUM_LAYERS


def test_buffers_never_move_over_many_rounds() -> None:
    driven = Driven(kit.l4(), [kit.PROMPT, SECOND_PROMPT])
    driven.prefill()
    layers: list[SharedCacheLayer] = driven.cache.shared_layers
    addresses = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in layers]
    for drafts, keep in ROUNDS:
        driven.round(drafts, keep)
        driven.cache.swap(0, 1)
        driven.rows.reverse()
        assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in layers] == addresses


def test_swapped_rows_go_on_as_before() -> None:
    model = kit.l4()
    driven = Driven(model, [kit.PROMPT, SECOND_PROMPT])
    driven.prefill()
    driven.round([[4, 8, 15], [16, 23]], [1, 2])
    driven.cache.swap(0, 1)
    driven.rows.reverse()
    before = [list(row) for row in driven.rows]
    _, full = driven.round([[30, 31, 32], [40]], [3, 1])
    for row, draft in enumerate([[30, 31, 32], [40]]):
        expected = fresh_logits(model, before[row] + draft)[-len(draft) :]
        torch.testing.assert_close(full[row, : len(draft)], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_cached_keys_after_a_full_rejection_equal_those_of_a_fresh_prefill(family: str) -> None:
    model = kit.build(kit.CONFIGS[family]())
    driven = Driven(model, [kit.PROMPT, SECOND_PROMPT])
    driven.prefill()
    driven.round([[4, 8, 15, 16], [23, 42, 4, 8]], [0, 0])
    driven.round([[50, 51], [52, 53, 54]], [0, 0])
    fresh = Driven(model, [kit.PROMPT, SECOND_PROMPT])
    fresh.prefill()
    for layer, expected in zip(driven.cache.shared_layers, fresh.cache.shared_layers, strict=True):
        assert layer.lengths == expected.lengths == (len(kit.PROMPT), len(SECOND_PROMPT))
        for row, length in enumerate(layer.lengths):
            for name in ("keys", "values"):
                torch.testing.assert_close(
                    getattr(layer, name)[row, :, :length], getattr(expected, name)[row, :, :length], rtol=0, atol=1e-5
                )


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_cached_keys_after_partial_acceptance_equal_those_of_a_fresh_prefill(family: str) -> None:
    model = kit.build(kit.CONFIGS[family]())
    driven = Driven(model, [kit.PROMPT, SECOND_PROMPT])
    driven.prefill()
    for drafts, keep in ROUNDS:
        driven.round(drafts, keep)
    for row, tokens in enumerate(driven.rows):
        fresh = Driven(model, [tokens])
        fresh.prefill()
        for layer, expected in zip(driven.cache.shared_layers, fresh.cache.shared_layers, strict=True):
            keys = layer.keys[row, :, : len(tokens)]
            torch.testing.assert_close(keys, expected.keys[0, :, : len(tokens)], rtol=0, atol=1e-5)


# Keeping the states of a call and going on from them in the next one


def uninterrupted(family: str) -> tuple[PreTrainedModel, Driven]:
    """Returns a model and two rows of different lengths in it, after all rounds."""
    model = kit.build(kit.CONFIGS[family]())
    driven = Driven(model, [kit.PROMPT, SECOND_PROMPT])
    driven.prefill()
    for drafts, keep in ROUNDS:
        driven.round(drafts, keep)
    return model, driven


@functools.cache
def interrupted(family: str) -> tuple[PreTrainedModel, CachedTokens]:
    """Returns a model and what is kept of both rows after all rounds."""
    model, driven = uninterrupted(family)
    return model, driven.kept([0, 1])


FOLLOWING = [[40, 41, 42], [9]]


@pytest.mark.parametrize("family", list(kit.CONFIGS))
def test_restored_rows_go_on_as_if_never_interrupted(family: str) -> None:
    model, driven = uninterrupted(family)
    cached = driven.kept([0, 1])
    restored = Driven.restored(model, cached, cached.lengths, budget=30)
    assert restored.cache.get_max_length() > driven.cache.get_max_length()
    before = [list(row) for row in driven.rows]
    actual, expected = restored.extend(FOLLOWING), driven.extend(FOLLOWING)
    for row, tokens in enumerate(FOLLOWING):
        width = len(tokens)
        torch.testing.assert_close(actual[row, :width], expected[row, :width], rtol=0, atol=1e-5)
        fresh = fresh_logits(model, before[row] + tokens)[-width:]
        torch.testing.assert_close(actual[row, :width], fresh, rtol=0, atol=1e-5)


def test_restored_rows_can_draft() -> None:
    model, cached = interrupted("llama")
    restored = Driven.restored(model, cached, cached.lengths, budget=30)
    drafts = [[4, 8, 15], [16, 23]]
    before = [list(row) for row in restored.rows]
    exits, full = restored.round(drafts, [1, 2])
    cut = kit.truncated(model, kit.EXIT_LAYER)
    for row, draft in enumerate(drafts):
        tokens, first = before[row] + draft, len(before[row])
        early = torch.stack([step[row] for step in exits[: len(draft)]])
        torch.testing.assert_close(early, fresh_logits(cut, tokens)[first:], rtol=0, atol=1e-5)
        torch.testing.assert_close(full[row, : len(draft)], fresh_logits(model, tokens)[first:], rtol=0, atol=1e-5)
    following = restored.extend([[7], [8]])
    for row, tokens in enumerate(restored.rows):
        torch.testing.assert_close(following[row, 0], fresh_logits(model, tokens)[-1], rtol=0, atol=1e-5)


def test_rows_are_kept_in_the_order_that_is_asked_for() -> None:
    """Finished rows stand behind the others, so the caller's order is another one than that of the buffers."""
    model, driven = uninterrupted("llama")
    driven.cache.swap(0, 1)
    driven.rows.reverse()
    cached = driven.kept([1, 0])
    assert cached.token_ids[0][: len(kit.PROMPT)] == tuple(kit.PROMPT)
    restored = Driven.restored(model, cached, cached.lengths, budget=10)
    logits = restored.extend([[40], [41]])
    for row, tokens in enumerate(restored.rows):
        torch.testing.assert_close(logits[row, 0], fresh_logits(model, tokens)[-1], rtol=0, atol=1e-5)


def test_some_rows_can_be_kept_without_the_others() -> None:
    cache = filled(rows=3)
    cache.rollback([6, 5, 2])
    for layer, (keys, values) in zip(cache.shared_layers, cache.kept([2, 1]), strict=True):
        assert torch.equal(keys, layer.keys[[2, 1], :, :5]) and torch.equal(values, layer.values[[2, 1], :, :5])


def test_kept_states_have_no_more_slots_than_tokens_and_memory_of_their_own() -> None:
    cache = filled()
    layers = cache.kept([0, 1])
    before = [keys.clone() for keys, _ in layers]
    assert [keys.untyped_storage().nbytes() for keys, _ in layers] == [2 * HEADS * 6 * HEAD_SIZE * 4] * 2
    for layer in cache.shared_layers:
        layer.keys.zero_()
    assert all(torch.equal(keys, expected) for (keys, _), expected in zip(layers, before, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("lengths", [(7, 2), (12, 4), (1, 5), (0, 3)])
def test_a_common_prefix_is_enough_to_go_on_from(family: str, lengths: tuple[int, int]) -> None:
    model, cached = interrupted(family)
    restored = Driven.restored(model, cached, lengths, budget=20)
    assert [layer.lengths for layer in restored.cache.shared_layers] == [lengths] * kit.NUM_LAYERS
    logits = restored.extend([[88, 87], [86, 85, 84]])
    for row, width in enumerate((2, 3)):
        expected = fresh_logits(model, restored.rows[row])[-width:]
        torch.testing.assert_close(logits[row, :width], expected, rtol=0, atol=1e-5)


def test_a_wrong_length_would_show_in_the_logits() -> None:
    """A control for the tests above."""
    model, driven = uninterrupted("llama")
    cached = driven.kept([0, 1])
    restored = Driven.restored(model, cached, cached.lengths, budget=20)
    restored.cache.rollback([length - 1 for length in cached.lengths])
    restored.rows = [row[:-2] + row[-1:] for row in restored.rows]
    logits = restored.extend([[40], [41]])
    assert (logits[0, 0] - fresh_logits(model, [*cached.token_ids[0], 40])[-1]).abs().max() > 1e-3


def test_restore_allocates_once_for_the_capacity_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[tuple[int, ...]] = []
    make = SharedCacheLayer._buffer

    def counted(layer: SharedCacheLayer, like: torch.Tensor) -> torch.Tensor:
        buffer = make(layer, like)
        allocated.append(tuple(buffer.shape))
        return buffer

    monkeypatch.setattr(SharedCacheLayer, "_buffer", counted)
    keys, values = states(2, 6).to(torch.bfloat16), states(2, 6, 100).to(torch.bfloat16)
    cache = SharedCache(num_layers=1, rows=2, capacity=20)
    cache.restore([(keys, values)], [6, 4])
    layer = cache.shared_layers[0]
    address = layer.keys.data_ptr()
    store(cache, 0, Placement.of([6, 4], [1, 2], 2, 19, CPU), states(2, 2).to(torch.bfloat16))
    assert allocated == [(2, HEADS, 20, HEAD_SIZE)] * 2
    assert layer.keys.data_ptr() == address and layer.keys.dtype == torch.bfloat16
    assert torch.equal(keys, states(2, 6).to(torch.bfloat16))
    assert torch.equal(layer.keys[0, :, :6], keys[0]) and torch.equal(layer.values[1, :, :4], values[1, :, :4])
    assert layer.lengths == (7, 6)


def test_states_with_gradients_are_restored_without() -> None:
    cache = SharedCache(num_layers=1, rows=1, capacity=8)
    cache.restore([(states(1, 3).requires_grad_(), states(1, 3))], [3])
    assert not cache.shared_layers[0].keys.requires_grad


PAIR = (states(2, 6), states(2, 6))


@pytest.mark.parametrize(
    ("layers", "lengths", "message"),
    [
        ([PAIR], [6, 6], "states of 1 layers; the cache has 2"),
        ([PAIR, PAIR, PAIR], [6, 6], "states of 3 layers; the cache has 2"),
        ([PAIR, (states(3, 6), states(3, 6))], [6, 6], "layer 2 holds the states of 3 rows"),
        ([PAIR, PAIR], [6], r"lengths=\(6,\) is for 1; the cache has 2 rows"),
        ([PAIR, (states(2, 6), states(2, 5))], [5, 5], "keys .* and values .* of layer 2 do not fit"),
        ([PAIR, (states(2, 6)[:, :1], states(2, 6))], [5, 5], "keys .* and values .* of layer 2 do not fit"),
        ([PAIR, PAIR], [6, 7], r"lengths=\(6, 7\) must lie between 0 and 6"),
        ([PAIR, PAIR], [6, -1], "must lie between 0 and 6"),
        ([PAIR, (states(2, 4), states(2, 4))], [5, 4], "between 0 and 4: layer 2 brings 4 slots"),
        ([(states(2, 9), states(2, 9))] * 2, [9, 2], "between 0 and 8: .* the cache has room for 8"),
    ],
)
def test_states_that_do_not_fit_are_refused_before_anything_changes(
    layers: list[tuple[torch.Tensor, torch.Tensor]], lengths: list[int], message: str
) -> None:
    cache = SharedCache(num_layers=2, rows=2, capacity=8)
    with pytest.raises(ValueError, match=message):
        cache.restore(layers, lengths)
    assert [layer.lengths for layer in cache.shared_layers] == [(0, 0)] * 2
    assert not any(layer.is_initialized for layer in cache.shared_layers)


def test_restore_fills_new_caches_only() -> None:
    cache = filled()
    with pytest.raises(RuntimeError, match="holds states already"):
        cache.restore(cache.kept([0, 1]), [6, 6])
    assert cache.shared_layers[0].lengths == (6, 6)


def test_a_cache_that_nothing_was_stored_in_has_nothing_to_keep() -> None:
    with pytest.raises(RuntimeError, match="nothing to return"):
        SharedCache(num_layers=2, rows=1, capacity=8).kept([0])


def test_cached_tokens_say_how_many_they_are_and_do_not_print_their_states() -> None:
    cached = CachedTokens(((1, 2, 3), (4,)), (PAIR, PAIR, PAIR), weakref.ref(torch.nn.Identity()))
    assert (cached.lengths, cached.num_layers) == ((3, 1), 3)
    assert repr(cached) == "CachedTokens(token_ids=((1, 2, 3), (4,)))"


# As transformers sees it


def test_reports_the_longest_row_and_the_capacity_to_transformers() -> None:
    cache = SharedCache(num_layers=2, rows=2, capacity=8)
    for layer in range(2):
        store(cache, layer, Placement.prompt([4, 2], CPU), states(2, 4))
    assert cache.get_seq_length() == 4
    assert cache.get_mask_sizes(3, 0) == (7, 0)
