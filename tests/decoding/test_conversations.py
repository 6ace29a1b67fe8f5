"""Conversations: what a call has cached is gone on from, turn by turn, as if all were said at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from layerskip import Engine, self_speculative
from layerskip.decoding.result import GenerationResult
from layerskip.model.cache import CachedTokens
from tests import kit

# What is said in each turn, before an answer.
TURNS = [kit.PROMPT, [8, 20, 31], [60, 2, 9, 77, 12]]
ANSWER = 10
STRATEGIES = ("self_speculative", "autoregressive", "early_exit")


def cached(result: GenerationResult) -> CachedTokens:
    """Returns the cache of a result that must carry one."""
    assert result.cache is not None
    return result.cache


def states_of(held: CachedTokens) -> list[torch.Tensor]:
    """Returns copies of all that a cache holds."""
    return [states.clone() for layer in held.layers for states in layer]


def batch_of(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Returns rows as ids and mask, padded on the left."""
    width = max(len(row) for row in rows)
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"prompts": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def reference(model: PreTrainedModel, tokens: Sequence[int], max_new_tokens: int = ANSWER, **more: Any) -> list[int]:
    """Returns the new tokens of one plain call that is told everything."""
    ids = kit.prompt_tensor(list(tokens))
    # Without a mask `generate` would take tokens for padding that equal the padding token.
    mask = torch.ones_like(ids)
    return kit.reference(model, ids, max_new_tokens, attention_mask=mask, **more)[0, len(tokens) :].tolist()


# Turns as token ids


@pytest.mark.parametrize("grade", ["some", "all"])
@pytest.mark.parametrize("family", kit.CONFIGS)
def test_each_turn_equals_one_call_that_is_told_everything(family: str, grade: str) -> None:
    """Also past the window of the families that have one, which the second turn begins behind."""
    model = kit.graded(family, grade)
    engine = Engine(model, exit_layer=2)
    held, said = None, []
    for turn in TURNS:
        new = len(turn) if held is None else len(turn) + 1
        said = said + turn
        options = {"max_new_tokens": ANSWER, "output_logits": True}
        with kit.counted_layers(model) as layers:
            result = engine.generate(kit.prompt_tensor(said), cache=held, return_cache=True, **options)
        whole = engine.generate(kit.prompt_tensor(said), **options)
        assert result.new_token_ids[0] == reference(model, said)
        assert torch.equal(result.sequences, whole.sequences)
        assert result.logits is not None and whole.logits is not None
        torch.testing.assert_close(torch.stack(result.logits), torch.stack(whole.logits), atol=1e-5, rtol=0)
        # The last token of the turn before was emitted and not yet processed.
        work = new + result.statistics.draft_tokens_processed + result.statistics.rounds
        assert layers == [work] * kit.NUM_LAYERS
        assert result.statistics.early_layer_tokens == result.statistics.late_layer_tokens == work
        said, held = result.sequences[0].tolist(), cached(result)
        assert held.token_ids == (tuple(said[:-1]),)
        assert all(states.shape[2] == len(said) - 1 for layer in held.layers for states in layer)
    assert len(set(said)) >= 10


def test_a_cache_holds_all_committed_tokens_but_the_last() -> None:
    """Ten of the prompt and twelve new ones: 21 are held."""
    result = Engine(kit.mixed(), exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=12, return_cache=True)
    assert cached(result).lengths == (21,)


def test_a_call_that_is_not_asked_for_a_cache_returns_none() -> None:
    assert Engine(kit.mixed(), exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=4).cache is None


@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("second", STRATEGIES)
def test_strategies_of_one_depth_go_on_from_each_other(first: str, second: str) -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    held = engine.generate(kit.prompt_tensor(), max_new_tokens=ANSWER, strategy=first, return_cache=True)
    said = [*held.sequences[0].tolist(), *TURNS[1]]
    options = {"max_new_tokens": ANSWER, "strategy": second}
    if "early_exit" in (first, second) and first != second:
        with pytest.raises(ValueError, match=r"cache holds \d layers, and this call runs \d; go on with the strategy"):
            engine.generate(kit.prompt_tensor(said), cache=held.cache, **options)
        return
    result = engine.generate(kit.prompt_tensor(said), cache=held.cache, **options)
    answering = kit.truncated(model, 2) if second == "early_exit" else model
    assert result.new_token_ids[0] == reference(answering, said)
    new = 1 + len(TURNS[1]) + result.statistics.draft_tokens_processed + result.statistics.rounds
    assert result.statistics.early_layer_tokens == new


def test_a_cache_serves_every_exit() -> None:
    """All layers are held, so that another exit may draft in the next turn."""
    model = kit.mixed()
    engine = Engine(model)
    held = engine.generate(kit.prompt_tensor(), max_new_tokens=ANSWER, exit_layer=1, return_cache=True)
    said = [*held.sequences[0].tolist(), *TURNS[1]]
    for exit_layer in (1, 2, 3):
        result = engine.generate(
            kit.prompt_tensor(said), max_new_tokens=ANSWER, exit_layer=exit_layer, cache=held.cache
        )
        assert result.new_token_ids[0] == reference(model, said)


def test_another_engine_on_the_model_goes_on_from_a_cache() -> None:
    model = kit.mixed()
    held = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=ANSWER, return_cache=True)
    said = [*held.sequences[0].tolist(), *TURNS[1]]
    result = Engine(model, exit_layer=3).generate(kit.prompt_tensor(said), max_new_tokens=ANSWER, cache=held.cache)
    assert result.new_token_ids[0] == reference(model, said)


def test_a_stream_goes_on_and_returns_a_cache() -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    *_, last = engine.stream(kit.prompt_tensor(), max_new_tokens=ANSWER, return_cache=True)
    assert last.result is not None
    said = [*last.result.sequences[0].tolist(), *TURNS[1]]
    events = list(
        engine.stream(kit.prompt_tensor(said), max_new_tokens=ANSWER, cache=last.result.cache, return_cache=True)
    )
    assert [token for event in events for token in event.token_ids] == reference(model, said)
    assert events[-1].result is not None and cached(events[-1].result).lengths == (len(said) + ANSWER - 1,)


# What the next prompt shares with the cache


@pytest.mark.parametrize("family", kit.CONFIGS)
@pytest.mark.parametrize("shared", [1, 4, 9, 10, 15])
def test_an_edited_history_is_followed_from_where_it_parts(family: str, shared: int) -> None:
    model = kit.graded(family, "some")
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=ANSWER, return_cache=True)
    before = first.sequences[0].tolist()[:shared]
    said = [*before, (first.sequences[0].tolist()[shared] + 1) % kit.VOCAB, 70, 71]
    result = engine.generate(kit.prompt_tensor(said), max_new_tokens=ANSWER, cache=first.cache, return_cache=True)
    assert result.new_token_ids[0] == reference(model, said)
    work = result.statistics.draft_tokens_processed + result.statistics.rounds
    assert result.statistics.early_layer_tokens == 3 + work
    again = [*result.sequences[0].tolist(), 5]
    assert engine.generate(kit.prompt_tensor(again), max_new_tokens=ANSWER, cache=result.cache).new_token_ids[
        0
    ] == reference(model, again)


@pytest.mark.parametrize("length", [1, 2, 7, 10, 14, 19])
def test_a_prompt_that_a_cache_holds_whole_is_answered_from_its_last_token(length: int) -> None:
    """A question asked again: the last token passes the layers, since its output is needed."""
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=ANSWER, return_cache=True)
    said = first.sequences[0].tolist()[:length]
    result = engine.generate(kit.prompt_tensor(said), max_new_tokens=ANSWER, cache=first.cache)
    assert result.new_token_ids[0] == reference(model, said)
    work = result.statistics.draft_tokens_processed + result.statistics.rounds
    assert result.statistics.early_layer_tokens == 1 + work


def test_a_cache_is_not_changed_and_can_be_branched_from() -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=ANSWER, return_cache=True)
    held = cached(first)
    before = states_of(held)
    said = first.sequences[0].tolist()
    branches = [[*said, *TURNS[1]], [*said, *TURNS[2]], [*said[:8], 50], [*said, *TURNS[1]]]
    answers = []
    for branch in branches:
        result = engine.generate(kit.prompt_tensor(branch), max_new_tokens=ANSWER, cache=held, return_cache=True)
        assert result.new_token_ids[0] == reference(model, branch)
        answers.append(result.new_token_ids[0])
        later = {states.untyped_storage().data_ptr() for layer in cached(result).layers for states in layer}
        assert not later & {states.untyped_storage().data_ptr() for layer in held.layers for states in layer}
    assert answers[0] == answers[3]
    assert held.token_ids == (tuple(said[:-1]),)
    assert all(torch.equal(now, then) for now, then in zip(states_of(held), before, strict=True))


def test_several_answers_need_a_row_of_the_cache_each() -> None:
    """Only a call with as many rows leaves them."""
    engine = Engine(kit.mixed(), exit_layer=2)
    drawing = {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 3}
    first = engine.generate(kit.prompt_tensor(), return_cache=True, **drawing)
    result = engine.generate(kit.prompt_tensor([*kit.PROMPT, 5]), cache=first.cache, top_k=1, **drawing)
    assert result.new_token_ids == [reference(kit.mixed(), [*kit.PROMPT, 5], 4)] * 3
    alone = engine.generate(kit.prompt_tensor(), max_new_tokens=4, return_cache=True)
    with pytest.raises(ValueError, match="cache holds 1 rows, and there are 3 prompts"):
        engine.generate(kit.prompt_tensor(), cache=alone.cache, **drawing)


# Batches


@pytest.mark.parametrize("family", kit.CONFIGS)
def test_conversations_of_different_lengths_and_ends_go_on_together(family: str) -> None:
    model = kit.graded(family, "some")
    engine = Engine(model, exit_layer=2)
    rows = [kit.PROMPT, [60, 4], [50, 3, 11, 90, 41], [8]]
    plain = [reference(model, row) for row in rows]
    ends = [plain[0][2], plain[2][6]]
    held = None
    lengths = set()
    for turn in TURNS:
        rows = [[*row, *turn[:index]] for index, row in enumerate(rows)] if held is not None else rows
        batch = batch_of(rows)
        options = {"max_new_tokens": ANSWER, "eos_token_id": ends, "pad_token_id": 0}
        result = engine.generate(**batch, **options, cache=held, return_cache=True)
        expected = kit.reference(
            model, batch["prompts"], ANSWER, attention_mask=batch["attention_mask"], eos_token_id=ends
        )
        assert torch.equal(result.sequences, expected)
        for index, row in enumerate(result.statistics.per_row):
            shared = 0 if held is None else len(held.token_ids[index])
            new = max(1, len(rows[index]) - shared)
            assert row.early_layer_tokens == new + row.draft_tokens_processed + row.rounds
        rows = [[*row, *new] for row, new in zip(rows, result.new_token_ids, strict=True)]
        held = cached(result)
        assert held.token_ids == tuple(tuple(row[:-1]) for row in rows)
        assert all(states.shape[2] == max(held.lengths) for layer in held.layers for states in layer)
        lengths |= {len(new) for new in result.new_token_ids}
    assert len(lengths) >= 2


def test_rows_of_a_batch_may_keep_different_shares_of_their_past() -> None:
    """One is edited at its beginning, one asked again, one goes on; the rest of the cache does not show through."""
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    first = engine.generate(**batch_of([kit.PROMPT, [60, 4], [50, 3, 11]]), max_new_tokens=ANSWER, return_cache=True)
    held = cached(first).token_ids
    rows = [[kit.PROMPT[0], 70, 71], list(held[1]), [*held[2], *TURNS[2]]]
    result = engine.generate(**batch_of(rows), max_new_tokens=ANSWER, cache=first.cache)
    assert result.new_token_ids == [reference(model, row) for row in rows]
    for row, new in zip(result.statistics.per_row, (2, 1, 5), strict=True):
        assert row.early_layer_tokens == new + row.draft_tokens_processed + row.rounds


def test_right_padded_turns_go_on_as_well() -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    first = engine.generate(**batch_of([kit.PROMPT, [60, 4]]), max_new_tokens=ANSWER, return_cache=True)
    rows = [[*row, 5, 6, 7] for row in cached(first).token_ids]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[83] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    result = engine.generate(ids, attention_mask=mask, max_new_tokens=ANSWER, cache=first.cache)
    assert result.new_token_ids == [reference(model, row) for row in rows]


# Ends inside a block


@pytest.mark.parametrize("index", range(8))
def test_an_answer_cut_by_an_eos_inside_a_block_goes_on(index: int) -> None:
    model = kit.identical()
    engine = Engine(model, exit_layer=2)
    end = reference(model, kit.PROMPT)[index]
    first = engine.generate(
        kit.prompt_tensor(), max_new_tokens=ANSWER, eos_token_id=end, pad_token_id=0, return_cache=True
    )
    said = first.sequences[0].tolist()
    assert said[-1] == end
    assert cached(first).token_ids == (tuple(said[:-1]),)
    said += TURNS[1]
    result = engine.generate(kit.prompt_tensor(said), max_new_tokens=ANSWER, cache=first.cache)
    assert result.new_token_ids[0] == reference(model, said)
    work = result.statistics.draft_tokens_processed + result.statistics.rounds
    assert result.statistics.early_layer_tokens == 1 + len(TURNS[1]) + work


@pytest.mark.parametrize("index", range(8))
def test_an_answer_cut_by_a_stop_string_inside_a_block_goes_on(index: int) -> None:
    model = kit.identical()
    engine = Engine(model, chat_tokenizer(False, False), exit_layer=2)
    end = engine.tokenizer.convert_ids_to_tokens(reference(model, kit.PROMPT)[index])
    first = engine.generate(
        kit.prompt_tensor(), max_new_tokens=ANSWER, stop_strings=end, pad_token_id=0, return_cache=True
    )
    assert first.finish_reasons == ["stop"]
    said = first.sequences[0].tolist()
    assert cached(first).token_ids == (tuple(said[:-1]),)
    assert all(states.shape[2] == len(said) - 1 for layer in cached(first).layers for states in layer)
    said += TURNS[1]
    result = engine.generate(kit.prompt_tensor(said), max_new_tokens=ANSWER, cache=first.cache)
    assert result.new_token_ids[0] == reference(model, said)


def test_an_answer_that_prefill_ended_goes_on() -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=1, return_cache=True)
    assert cached(first).token_ids == (tuple(kit.PROMPT),)
    said = [*first.sequences[0].tolist(), 5]
    result = engine.generate(kit.prompt_tensor(said), max_new_tokens=ANSWER, cache=first.cache)
    assert result.new_token_ids[0] == reference(model, said)


# Drawing tokens


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_cache_of_drawn_tokens_is_that_of_the_same_tokens_read(family: str) -> None:
    model = kit.graded(family, "some")
    engine = Engine(model, exit_layer=2)
    generator = torch.Generator().manual_seed(4)
    first = engine.generate(
        kit.prompt_tensor(), max_new_tokens=ANSWER, do_sample=True, generator=generator, return_cache=True
    )
    said = first.sequences[0].tolist()
    read = engine.generate(kit.prompt_tensor(said[:-1]), max_new_tokens=1, return_cache=True)
    assert cached(read).token_ids == cached(first).token_ids
    for mine, other in zip(states_of(cached(first)), states_of(cached(read)), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    said += TURNS[1]
    result = engine.generate(kit.prompt_tensor(said), max_new_tokens=ANSWER, cache=first.cache)
    assert result.new_token_ids[0] == reference(model, said)


def test_drawn_turns_follow_from_their_generators() -> None:
    engine = Engine(kit.mixed(), exit_layer=2)

    def talk() -> list[int]:
        held, said = None, []
        generator = torch.Generator().manual_seed(9)
        for turn in TURNS:
            result = engine.generate(
                kit.prompt_tensor([*said, *turn]),
                max_new_tokens=ANSWER,
                do_sample=True,
                generator=generator,
                cache=held,
                return_cache=True,
            )
            said, held = result.sequences[0].tolist(), result.cache
        return said

    assert talk() == talk()


def test_processors_see_the_whole_conversation() -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    penalty = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1}
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=ANSWER, return_cache=True, **penalty)
    said = [*first.sequences[0].tolist(), *TURNS[1]]
    result = engine.generate(kit.prompt_tensor(said), max_new_tokens=ANSWER, cache=first.cache, **penalty)
    assert result.new_token_ids[0] == reference(model, said, **penalty)
    assert not set(result.new_token_ids[0]) & set(said)
    assert result.new_token_ids[0] != reference(model, said)


# Limits and mistakes


def test_learned_positions_are_counted_over_the_whole_conversation() -> None:
    model = kit.graded("gpt2", "some")
    engine = Engine(model, exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=20, return_cache=True)
    said = [*first.sequences[0].tolist(), *TURNS[1]]
    left = 64 - len(said)
    result = engine.generate(kit.prompt_tensor(said), max_new_tokens=left, cache=first.cache)
    assert result.new_token_ids[0] == reference(model, said, left)
    with pytest.raises(ValueError, match=r"prompt \+ max_new_tokens = 65 tokens, but the model has only 64"):
        engine.generate(kit.prompt_tensor(said), max_new_tokens=left + 1, cache=first.cache)


def test_a_cache_of_another_depth_is_refused_before_any_layer_runs() -> None:
    engine = Engine(kit.mixed(), exit_layer=2)
    held = engine.generate(kit.prompt_tensor(), max_new_tokens=2, return_cache=True).cache
    with kit.counted_layers(engine.model) as counts:
        with pytest.raises(ValueError, match="cache holds 4 layers, and this call runs 3"):
            engine.generate(kit.prompt_tensor(), max_new_tokens=2, cache=held, strategy="early_exit", exit_layer=3)
        assert counts == [0] * kit.NUM_LAYERS


def test_a_cache_of_another_model_is_refused_before_any_layer_runs() -> None:
    """One with the same shapes too, whose states would be taken for its own."""
    model = kit.mixed()
    held = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=2, return_cache=True).cache
    for other in (kit.mixed(seed=5), kit.mixed(num_key_value_heads=4), kit.mixed().to(torch.bfloat16)):
        with kit.counted_layers(other) as counts:
            with pytest.raises(ValueError, match="cache is of another model"):
                Engine(other, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=2, cache=held)
            assert counts == [0] * kit.NUM_LAYERS
    # Another engine of the same model goes on.
    result = Engine(model, exit_layer=3).generate(kit.prompt_tensor(), max_new_tokens=8, cache=held)
    assert result.new_token_ids[0] == reference(model, kit.PROMPT, 8)


@pytest.mark.parametrize("other", [{"num_key_value_heads": 4}, {"hidden_size": 64}], ids=str)
def test_a_cache_of_another_shape_is_named_where_generate_takes_it(other: dict[str, int]) -> None:
    ids = kit.prompt_tensor()
    hook = self_speculative(exit_layer=2)
    kept = kit.mixed().generate(
        ids, max_new_tokens=2, custom_generate=hook, return_dict_in_generate=True, do_sample=False
    )
    longer = torch.cat([kept.sequences, torch.tensor([[5]])], dim=1)
    with pytest.raises(ValueError, match="cache holds keys of 2 heads of size 8"):
        kit.mixed(**other).generate(longer, cache=kept.cache, max_new_tokens=2, custom_generate=hook, do_sample=False)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_cache_of_other_rows_is_refused(rows: int) -> None:
    engine = Engine(kit.mixed(), exit_layer=2)
    held = engine.generate(kit.prompt_tensor(), max_new_tokens=2, return_cache=True).cache
    with pytest.raises(ValueError, match=f"cache holds 1 rows, and there are {rows} prompts"):
        engine.generate(torch.tensor([kit.PROMPT] * rows), max_new_tokens=2, cache=held)


def test_a_cache_of_another_conversation_is_refused_by_its_row() -> None:
    engine = Engine(kit.mixed(), exit_layer=2)
    held = engine.generate(torch.tensor([kit.PROMPT, kit.PROMPT]), max_new_tokens=2, return_cache=True).cache
    with pytest.raises(ValueError, match=r"prompts\[1\] begins with token 8, and the cache with 1"):
        engine.generate(torch.tensor([kit.PROMPT, [8, *kit.PROMPT[1:]]]), max_new_tokens=2, cache=held)


@pytest.mark.parametrize(("other", "named"), [((), "tuple"), ("cache", "str"), ([], "list")])
def test_another_kind_of_cache_is_refused(other: Any, named: str) -> None:
    engine = Engine(kit.mixed(), exit_layer=2)
    with pytest.raises(TypeError, match=f"cache is a {named}; pass the `cache` of an earlier result"):
        engine.generate(kit.prompt_tensor(), max_new_tokens=2, cache=other)


# Messages

SPECIAL = {"<unk>": 0, "<s>": 1, "<user>": 2, "<assistant>": 3, "<end>": 4}
TEMPLATE = (
    "{{ start }}{% for message in messages %}<{{ message.role }}> {{ message.content }} "
    "{% if message.role == 'assistant' %}<end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def chat_tokenizer(writes_bos: bool, sets_bos: bool) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words whose template writes the BOS token or not, and that sets one itself or not."""
    # The last word is what transformers looks for in a vocabulary before it looks for stop strings.
    words = {f"w{token}": token for token in range(len(SPECIAL), kit.VOCAB)} | {"abcdef": kit.VOCAB}
    backend = Tokenizer(models.WordLevel({**SPECIAL, **words}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if sets_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="<end>")
    made.chat_template = TEMPLATE.replace("{{ start }}", "{{ bos_token }} " if writes_bos else "")
    return made


@pytest.mark.parametrize(("writes_bos", "sets_bos"), [(True, True), (True, False), (False, False)])
def test_a_talk_in_messages_equals_one_that_is_told_everything(writes_bos: bool, sets_bos: bool) -> None:
    """The template alone decides about the BOS token; each turn goes on behind what the two have in common."""
    model = kit.mixed()
    engine = Engine(model, chat_tokenizer(writes_bos, sets_bos), exit_layer=2)
    options = {"max_new_tokens": ANSWER, "suppress_tokens": list(SPECIAL.values())}
    talk: list[dict[str, str]] = []
    held = None
    for words in ("w10 w11 w12", "w20 w21", "w30"):
        talk.append({"role": "user", "content": words})
        result = engine.generate(talk, **options, cache=held, return_cache=True)
        whole = engine.generate(talk, **options)
        assert torch.equal(result.sequences, whole.sequences)
        assert result.texts == whole.texts
        prompt = result.sequences[0, :-ANSWER].tolist()
        assert prompt.count(1) == int(writes_bos) and prompt[-1] == 3
        assert result.new_token_ids[0] == reference(model, prompt, suppress_tokens=options["suppress_tokens"])
        statistics = result.statistics
        # Behind the answer before: its last token, what ends it, the user's mark and words, the assistant's mark.
        new = len(prompt) if held is None else 1 + 1 + 1 + len(words.split()) + 1
        assert statistics.early_layer_tokens == new + statistics.draft_tokens_processed + statistics.rounds
        assert result.texts is not None
        talk.append({"role": "assistant", "content": result.texts[0]})
        held = result.cache


def test_a_message_that_is_edited_is_followed_from_there() -> None:
    model = kit.mixed()
    engine = Engine(model, chat_tokenizer(True, True), exit_layer=2)
    talk = [{"role": "user", "content": "w10 w11 w12 w13"}]
    first = engine.generate(talk, max_new_tokens=ANSWER, return_cache=True)
    edited = [{"role": "user", "content": "w10 w11 w50"}]
    result = engine.generate(edited, max_new_tokens=ANSWER, cache=first.cache)
    assert torch.equal(result.sequences, engine.generate(edited, max_new_tokens=ANSWER).sequences)
    work = result.statistics.draft_tokens_processed + result.statistics.rounds
    assert result.statistics.early_layer_tokens == 2 + work


def test_talks_of_a_batch_go_on_together() -> None:
    model = kit.mixed()
    engine = Engine(model, chat_tokenizer(True, True), exit_layer=2)
    talks = [[{"role": "user", "content": words}] for words in ("w10 w11 w12", "w20", "w30 w31 w32 w33 w34 w35")]
    options = {"max_new_tokens": ANSWER, "pad_token_id": 0, "suppress_tokens": list(SPECIAL.values())}
    first = engine.generate(talks, **options, return_cache=True)
    assert first.texts is not None
    for talk, text in zip(talks, first.texts, strict=True):
        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "w40 w41"}]
    result = engine.generate(talks, **options, cache=first.cache)
    assert result.texts == [text for talk in talks for text in engine.generate(talk, **options).texts or []]
    for row in result.statistics.per_row:
        assert row.early_layer_tokens == 6 + row.draft_tokens_processed + row.rounds


def test_messages_without_a_template_are_refused_beside_a_cache_too() -> None:
    engine = Engine(kit.mixed(), kit.word_tokenizer(kit.VOCAB), exit_layer=2)
    first = engine.generate("w1 w5 w9", max_new_tokens=2, return_cache=True)
    with pytest.raises(ValueError, match=r"prompts\[0\] is a list of messages, but the tokenizer has no chat template"):
        engine.generate([{"role": "user", "content": "w1"}], max_new_tokens=2, cache=first.cache)
