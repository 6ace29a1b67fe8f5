"""What speeds rounds up, in the families whose structure is odd, and rotary tables that change with the length."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.decoding import call
from layerskip.decoding.compiled import CompiledRounds, CompiledSettings
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from tests import kit
from tests.decoding.hook_kit import first_turn, ours, plain
from tests.decoding.levers_kit import TABLES, padded, recorded_drafts
from tests.families_kit import cut, longrope_config, own_logits, some

NEW = 12
ODD = ("falcon", "opt", "gptj", "gpt_neox", "granite", "mixtral")
# Three repetitions, so that there is something to copy.
REPEATS = [5, 9, 33, 7, 52, 5, 9, 33, 7, 18, 5, 9, 33]
LEVERS: dict[str, dict[str, Any]] = {
    "adaptive stop": {"exit_layer": 2, "draft_stop": "adaptive"},
    "auto exit": {"exit_layer": "auto"},
    "checked copies": {"exit_layer": 2, "copy_ngrams": "checked"},
    "trusted copies": {"exit_layer": 2, "copy_ngrams": "trusted"},
    "a tree": {"exit_layer": 2, "tree_nodes": 6, "num_draft_tokens": 3},
}


@cache
def expected(family: str, prompt: tuple[int, ...]) -> list[int]:
    """Returns the new tokens of plain `generate` for one prompt."""
    ids = kit.prompt_tensor(list(prompt))
    said = kit.reference(some(family), ids, NEW, attention_mask=torch.ones_like(ids))
    return said[0, len(prompt) :].tolist()


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("family", ODD)
def test_every_lever_leaves_the_output_as_it_is(family: str, lever: str) -> None:
    engine = Engine(some(family), cost_table=TABLES["gpu"], **LEVERS[lever])
    result = engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW)
    assert result.new_token_ids[0] == expected(family, tuple(REPEATS))
    assert result.statistics.drafted > 0


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_graphs_serve_the_calls_that_follow_where_rotary_tables_are_of_another_type(family: str) -> None:
    """OLMo2 makes them in float32 whatever the weights are."""
    model = copy.deepcopy(some(family)).bfloat16()
    rounds = CompiledRounds(LayeredModel(model), CompiledSettings(2, 4, 2, 64))
    assert rounds.fits(LayeredModel(model), rounds.settings)
    assert not rounds.fits(LayeredModel(model.float()), rounds.settings)


@pytest.mark.parametrize("family", ODD)
def test_compiled_rounds_leave_the_output_as_it_is(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler; tracing, which takes seconds, is left to Mixtral, whose experts are the hardest to trace."""
    if family == "mixtral":
        monkeypatch.setattr(call, "CompiledSettings", partial(CompiledSettings, backend="eager"))
    else:
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    engine = Engine(some(family), exit_layer=2, num_draft_tokens=2, compile=True)
    result = engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW)
    assert result.new_token_ids[0] == expected(family, tuple(REPEATS))
    assert result.statistics.drafted > 0


@pytest.mark.parametrize("family", ["mistral", "smollm3", "olmo2", *ODD])
def test_trees_of_a_batch_leave_its_rows_as_they_are(family: str) -> None:
    prompts = [REPEATS, [50, 3]]
    ids, mask = padded(prompts)
    engine = Engine(some(family), exit_layer=2, tree_nodes=6, num_draft_tokens=3)
    result = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW)
    assert result.new_token_ids == [expected(family, tuple(prompt)) for prompt in prompts]


# Draft heads


@pytest.mark.parametrize("family", ["opt", "gptj", "cohere", "granite", "gemma2"])
def test_a_trimmed_draft_head_has_all_that_belongs_to_the_head(family: str) -> None:
    """OPT's head is narrower than its layers, GPT-J's has a bias, and the others' logits are scaled or capped."""
    layered = LayeredModel(some(family))
    ids = torch.arange(1, kit.VOCAB, 3)
    states = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trimmed, whole = DraftHead.of(layered, ids).logits(states), layered.logits(states)
    torch.testing.assert_close(trimmed, whole[..., ids], rtol=0, atol=1e-5)
    engine = Engine(some(family), exit_layer=2, draft_token_ids=ids)
    with recorded_drafts() as rounds:
        result = engine.generate(kit.prompt_tensor(REPEATS), max_new_tokens=NEW)
    assert result.new_token_ids[0] == expected(family, tuple(REPEATS))
    drafted = {token for each in rounds for tokens in each.tokens for token in tokens}
    assert drafted and drafted <= set(ids.tolist())


def test_the_heads_are_what_they_are_meant_to_be() -> None:
    """A control of the test above."""
    assert LayeredModel(some("opt")).head.weight.shape == (kit.VOCAB, 16)
    assert LayeredModel(some("gptj")).head.bias.abs().max() > 0


# Drawing


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "granite", "cohere"])
def test_drafts_are_drawn_from_the_capped_or_scaled_exit(family: str, trimmed: bool) -> None:
    """At a temperature of 1 each comes from the softmax of the logits of the model cut there; a greedy choice would
    not show it."""
    ids = torch.arange(0, kit.VOCAB, 2) if trimmed else torch.arange(kit.VOCAB)
    engine = Engine(some(family), exit_layer=2, draft_token_ids=ids)
    arguments = {"do_sample": True, "top_k": 0, "generator": torch.Generator().manual_seed(0)}
    with recorded_drafts() as rounds:
        engine.generate(kit.prompt_tensor(), max_new_tokens=8, **arguments)
    layered = LayeredModel(some(family))
    gaps = []
    for each in rounds:
        text = kit.PROMPT + list(each.before[0])
        for place, source in enumerate(each.draft.rows[0].sources):
            prefix = torch.tensor([text + list(each.tokens[0][:place])])
            drawn_from = own_logits(cut(family), prefix)[0, -1, ids].double().softmax(-1)
            torch.testing.assert_close(source[ids].double(), drawn_from, rtol=0, atol=1e-5)
            with torch.no_grad():
                state = cut(family)(prefix, output_hidden_states=True).hidden_states[-1]
                bare = layered.head(state)[0, -1, ids].double().softmax(-1)
            gaps.append((bare - drawn_from).abs().max())
    assert len(gaps) > 4 and max(gaps) > 0.02


# Positions that end


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj"])
def test_positions_end_where_they_were_learned_or_stand_in_a_table(family: str) -> None:
    """At 64, of which the last is never needed for the last token."""
    prompt = (kit.PROMPT * 6)[:58]
    ids = kit.prompt_tensor(prompt)
    made = Engine(some(family), exit_layer=2).generate(ids, max_new_tokens=6)
    assert torch.equal(made.sequences, kit.reference(some(family), ids, 6))
    with kit.counted_layers(some(family)) as counts, pytest.raises(ValueError, match=r"= 65 tokens.*only 64 positions"):
        Engine(some(family), exit_layer=2).generate(ids, max_new_tokens=7)
    assert counts == [0] * kit.NUM_LAYERS


# Rotary tables of another kind past a length

ORIGINAL = 16
LONG = [*kit.PROMPT, *range(60, 68)]
TURN = [61, 17, 30]


@cache
def longrope() -> PreTrainedModel:
    """A Phi-3 with another rotary table for sequences of more than 16 tokens."""
    return kit.scale_late_layers(kit.build(longrope_config(ORIGINAL), seed=1, spread=1.0), 0.3)


def alone(prompt: list[int], max_new_tokens: int) -> list[int]:
    """Returns what plain `generate` adds to a prompt."""
    ids = kit.prompt_tensor(prompt)
    said = kit.reference(longrope(), ids, max_new_tokens, attention_mask=torch.ones_like(ids))
    return said[0, len(prompt) :].tolist()


def engine() -> Engine:
    return Engine(longrope(), exit_layer=2)


def refused(run: Callable[[], Any], tokens: int) -> None:
    """Checks that a call is refused for its length before any layer runs."""
    message = rf"rope_type='longrope' .* past 16 tokens.*max_new_tokens = {tokens};"
    with kit.counted_layers(longrope()) as counts, pytest.raises(ValueError, match=message):
        run()
    assert counts == [0] * kit.NUM_LAYERS


def test_the_tables_differ() -> None:
    """A control: past the length, the first positions are rotated otherwise, too."""
    layered = LayeredModel(longrope())
    short, long = (layered.rotary_tables(tokens).tables["sliding_attention"][0][0, :8] for tokens in (16, 17))
    assert (short - long).abs().max() > 0.1


@pytest.mark.parametrize(("prompt", "new"), [(kit.PROMPT, 6), (kit.PROMPT[:3], 13), (LONG[:17], 12), (LONG, 12)])
def test_prompts_on_either_side_of_the_length_equal_generate(prompt: list[int], new: int) -> None:
    assert engine().generate(kit.prompt_tensor(prompt), max_new_tokens=new).new_token_ids[0] == alone(prompt, new)
    given = ours(longrope(), kit.prompt_tensor(prompt), max_new_tokens=new)
    assert given[0, len(prompt) :].tolist() == alone(prompt, new)


@pytest.mark.parametrize("prompts", [[kit.PROMPT, kit.PROMPT[:4]], [LONG, LONG[1:]]], ids=["short", "long"])
def test_batches_on_one_side_of_the_length_equal_generate(prompts: list[list[int]]) -> None:
    ids, mask = padded(prompts)
    result = engine().generate(ids, attention_mask=mask, max_new_tokens=6)
    assert result.new_token_ids == [alone(prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("length", [10, 15, 16])
def test_a_call_that_would_pass_the_length_is_refused(length: int) -> None:
    refused(lambda: engine().generate(kit.prompt_tensor(LONG[:length]), max_new_tokens=7), length + 7)
    refused(lambda: ours(longrope(), kit.prompt_tensor(LONG[:length]), max_new_tokens=7), length + 7)


def test_a_batch_on_both_sides_of_the_length_is_refused() -> None:
    ids, mask = padded([LONG, kit.PROMPT])
    refused(lambda: engine().generate(ids, attention_mask=mask, max_new_tokens=4), len(LONG) + 4)
    refused(lambda: ours(longrope(), ids, attention_mask=mask, max_new_tokens=4, pad_token_id=0), len(LONG) + 4)


@pytest.mark.parametrize("prompt", [kit.PROMPT[:4], LONG], ids=["short", "long"])
def test_conversations_on_one_side_of_the_length_go_on(prompt: list[int]) -> None:
    first = engine().generate(kit.prompt_tensor(prompt), max_new_tokens=4, return_cache=True)
    said = first.sequences[0].tolist() + TURN
    second = engine().generate(kit.prompt_tensor(said), cache=first.cache, max_new_tokens=4)
    assert second.new_token_ids[0] == alone(said, 4)
    turn = first_turn(longrope(), ours, kit.prompt_tensor(prompt), max_new_tokens=4)
    assert ours(longrope(), kit.prompt_tensor(said), cache=turn.cache, max_new_tokens=4)[0].tolist() == [
        *said,
        *alone(said, 4),
    ]


def test_a_conversation_that_passes_the_length_is_refused() -> None:
    """Its keys were made with the other table. A call without the cache makes them anew."""
    first = engine().generate(kit.prompt_tensor(), max_new_tokens=6, return_cache=True)
    said = first.sequences[0].tolist() + TURN
    refused(lambda: engine().generate(kit.prompt_tensor(said), cache=first.cache, max_new_tokens=4), len(said) + 4)
    assert engine().generate(kit.prompt_tensor(said), max_new_tokens=4).new_token_ids[0] == alone(said, 4)
    for who in (ours, plain):
        turn = first_turn(longrope(), who, kit.prompt_tensor(), max_new_tokens=6)
        refused(partial(ours, longrope(), kit.prompt_tensor(said), cache=turn.cache, max_new_tokens=4), len(said) + 4)


def test_the_beginning_of_a_long_conversation_is_no_past_of_a_short_one() -> None:
    """It has the keys of the long table."""
    held = engine().generate(kit.prompt_tensor(LONG), max_new_tokens=4, return_cache=True).cache
    edited = [*LONG[:6], 90, 91]
    refused(lambda: engine().generate(kit.prompt_tensor(edited), cache=held, max_new_tokens=4), 12)
    assert engine().generate(kit.prompt_tensor(edited), max_new_tokens=4).new_token_ids[0] == alone(edited, 4)
