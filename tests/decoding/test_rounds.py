"""What happens inside and between rounds: work, cache lengths, drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from layerskip import Engine
from layerskip.decoding import choice
from layerskip.decoding.drafting import Draft, Drafting
from layerskip.decoding.loop import DecodeLoop
from layerskip.decoding.rows import DecodeSettings, Row
from layerskip.decoding.stopping import Stops
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement
from tests import kit


def settings(num_draft_tokens: int = 4, max_new_tokens: int = 24) -> DecodeSettings:
    """Self-speculation at exit 2 without stops."""
    return DecodeSettings(kit.EXIT_LAYER, kit.NUM_LAYERS, num_draft_tokens, Stops(max_new_tokens))


def new_tokens(run: DecodeLoop, row: int = 0) -> list[int]:
    """Returns what a loop emitted for one row."""
    return run.rows[row].tokens


@pytest.mark.parametrize("grade", ["none", "some", "all"])
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 7])
def test_one_row_costs_prompt_plus_drafts_plus_rounds_in_both_spans(grade: str, num_draft_tokens: int) -> None:
    model = kit.graded("llama", grade)
    engine = Engine(model, exit_layer=kit.EXIT_LAYER, num_draft_tokens=num_draft_tokens)
    with kit.counted_layers(model) as counts:
        statistics = engine.generate(kit.prompt_tensor(), max_new_tokens=24).statistics
    expected = len(kit.PROMPT) + statistics.draft_tokens_processed + statistics.rounds
    assert counts == [expected] * kit.NUM_LAYERS
    assert (statistics.early_layer_tokens, statistics.late_layer_tokens) == (expected, expected)
    assert statistics.padding_tokens == 0
    assert statistics.emitted == 24 == 1 + statistics.accepted + statistics.rounds - statistics.cut


def test_fully_accepted_tokens_pass_every_layer_once() -> None:
    model = kit.identical()
    engine = Engine(model, exit_layer=kit.EXIT_LAYER)
    with kit.counted_layers(model) as counts:
        statistics = engine.generate(kit.prompt_tensor(), max_new_tokens=24).statistics
    assert statistics.rounds == 5
    # The last emitted token passes no layer.
    assert counts == [len(kit.PROMPT) + 24 - 1] * kit.NUM_LAYERS


def test_two_rows_cost_the_same_plus_padding() -> None:
    model = kit.mixed()
    ids = torch.tensor([kit.PROMPT, [0, 0, 0, 0, *kit.PROMPT[:6]]])
    mask = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
    with kit.counted_layers(model) as counts:
        result = Engine(model, exit_layer=kit.EXIT_LAYER).generate(ids, attention_mask=mask, max_new_tokens=24)
    total = result.statistics
    expected = 10 + 6 + total.draft_tokens_processed + total.rounds
    assert (total.early_layer_tokens, total.late_layer_tokens) == (expected, expected)
    assert total.padding_tokens > 0
    assert counts == [expected + total.padding_tokens] * kit.NUM_LAYERS
    for row, prompt in zip(total.per_row, (10, 6), strict=True):
        assert row.early_layer_tokens == prompt + row.draft_tokens_processed + row.rounds
        assert row.emitted == 24 == 1 + row.accepted + row.rounds - row.cut
    assert total.padding_tokens == sum(row.padding_tokens for row in total.per_row)


def test_finished_rows_cost_nothing_more() -> None:
    model = kit.mixed()
    ids = torch.tensor([kit.PROMPT, [8, 20, 31, 60, 2, 9, 77, 12, 4, 4]])
    plain = kit.reference(model, ids)[:, 10:]
    eos = next(int(token) for token in plain[0, :6] if token not in plain[1])
    with kit.counted_layers(model) as counts:
        total = Engine(model).generate(ids, max_new_tokens=24, eos_token_id=eos, strategy="autoregressive").statistics
    ended = plain[0].tolist().index(eos)
    assert total.padding_tokens == 0
    assert counts == [(10 + ended) + (10 + 23)] * kit.NUM_LAYERS


@pytest.mark.parametrize("accepted", range(5))
def test_all_layers_stand_at_the_committed_length_after_every_round(
    accepted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejection is forced at every offset; on a model whose drafts are right, the output must not notice."""

    def accept_at_most(drafts: Sequence[int], targets: Sequence[int]) -> int:
        return min(accepted, len(drafts))

    monkeypatch.setattr(choice, "accept_greedy", accept_at_most)
    model = kit.identical()
    run = DecodeLoop(LayeredModel(model), [kit.PROMPT, kit.PROMPT[:6]], settings())
    for _ in run.blocks():
        for position, row in enumerate(run.active):
            for layer in run.cache.shared_layers:
                assert layer.lengths[position] == row.committed - 1
    for row, prompt in enumerate((kit.PROMPT, kit.PROMPT[:6])):
        expected = kit.reference(model, kit.prompt_tensor(prompt))[0, len(prompt) :].tolist()
        assert new_tokens(run, row) == expected


def test_prefill_leaves_the_prompt_in_every_layer() -> None:
    for length in (1, 2, 10):
        run = DecodeLoop(LayeredModel(kit.l4()), [kit.PROMPT[:length]], settings())
        next(iter(run.blocks()))
        assert [layer.lengths for layer in run.cache.shared_layers] == [(length,)] * kit.NUM_LAYERS


def test_cached_keys_after_a_full_rejection_equal_a_fresh_prefill() -> None:
    model = LayeredModel(kit.rejected("llama"))
    run = DecodeLoop(model, [kit.PROMPT], settings())
    blocks = run.blocks()
    next(blocks)
    for _ in range(3):
        (block,) = next(blocks)
        assert block.accepted == (False,)
    held = kit.PROMPT + new_tokens(run)[:-1]
    fresh = DecodeLoop(model, [held], settings())
    next(fresh.blocks())
    for ours, theirs in zip(run.cache.shared_layers, fresh.cache.shared_layers, strict=True):
        for mine, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(mine[:, :, : len(held)], other[:, :, : len(held)], atol=1e-5, rtol=0)


def test_cache_addresses_never_change() -> None:
    run = DecodeLoop(LayeredModel(kit.mixed()), [kit.PROMPT, kit.PROMPT[:3]], settings())
    blocks = run.blocks()
    next(blocks)
    addresses = [layer.keys.data_ptr() for layer in run.cache.shared_layers]
    for _ in blocks:
        assert [layer.keys.data_ptr() for layer in run.cache.shared_layers] == addresses


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 6])
def test_a_right_exit_is_accepted_in_every_round(num_draft_tokens: int) -> None:
    model = kit.identical()
    engine = Engine(model, exit_layer=kit.EXIT_LAYER, num_draft_tokens=num_draft_tokens)
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=40)
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(), max_new_tokens=40))
    assert result.statistics.draft_acceptance_rate == 1.0
    assert set(result.statistics.acceptance_by_position) == {1.0}


def test_drafts_are_those_of_a_fresh_early_exit_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.mixed()
    short = kit.truncated(model, kit.EXIT_LAYER)
    intact = Drafting.draft
    seen: list[tuple[list[int], list[int]]] = []

    def recording(drafting: Drafting, rows: Sequence[Row], *arguments: Any) -> Draft:
        draft = intact(drafting, rows, *arguments)
        seen.append(([*kit.PROMPT, *rows[0].tokens], draft.tokens[0]))
        return draft

    monkeypatch.setattr(Drafting, "draft", recording)
    Engine(model, exit_layer=kit.EXIT_LAYER).generate(kit.prompt_tensor(), max_new_tokens=100)
    assert sum(len(drafts) for _, drafts in seen) > 100
    for prefix, drafts in seen:
        assert kit.is_greedy(short, prefix, drafts)


def test_a_draft_never_outgrows_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.identical()
    layered = LayeredModel(model)
    plain = kit.reference(model, kit.prompt_tensor(), max_new_tokens=11)[0, len(kit.PROMPT) :].tolist()
    intact = Drafting.draft
    left: list[int] = []

    def recording(drafting: Drafting, rows: Sequence[Row], *arguments: Any) -> Draft:
        draft = intact(drafting, rows, *arguments)
        left.append(max_new_tokens - len(rows[0].tokens) - len(draft.tokens[0]))
        return draft

    monkeypatch.setattr(Drafting, "draft", recording)
    for max_new_tokens in range(1, 12):
        for num_draft_tokens in (1, 3, 8):
            run = DecodeLoop(layered, [kit.PROMPT], settings(num_draft_tokens, max_new_tokens))
            for _ in run.blocks():
                pass
            assert new_tokens(run) == plain[:max_new_tokens]
    assert min(left) == 1


def test_positions_never_pass_the_learned_ones() -> None:
    model = kit.scale_late_layers(kit.build(kit.gpt2_config(n_positions=32)), 0.3)
    prompt = (kit.PROMPT * 3)[:24]
    seen: list[int] = []
    model.transformer.wpe.register_forward_pre_hook(lambda module, inputs: seen.append(int(inputs[0].max())))
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(prompt), max_new_tokens=8)
    assert max(seen) <= 31
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(prompt), max_new_tokens=8))


def test_exit_states_of_drafts_are_kept_so_that_early_layers_never_see_them_twice() -> None:
    model = kit.mixed()
    layered = LayeredModel(model)
    seen: list[tuple[int, int]] = []
    original = layered.run

    def recording(hidden: torch.Tensor, start: int, stop: int, *, placement: Placement, **rest: Any) -> torch.Tensor:
        if start == 0:
            first = int(placement.positions[0, 0])
            seen.extend((run.rows[0].committed, first + offset) for offset in range(placement.width))
        return original(hidden, start, stop, placement=placement, **rest)

    layered.run = recording  # type: ignore[method-assign]
    run = DecodeLoop(layered, [kit.PROMPT], settings())
    for _ in run.blocks():
        pass
    assert len(seen) == len(set(seen))
