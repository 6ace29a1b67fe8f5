"""Rows of a batch: whatever their lengths, paddings and ends, each is decoded as if it were alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from layerskip import Engine
from layerskip.decoding.drafting import Draft, Drafting
from layerskip.decoding.result import GenerationResult
from layerskip.decoding.rows import Row
from layerskip.decoding.statistics import Statistics
from layerskip.model.cache import SharedCacheLayer
from tests import kit

# Of very different lengths; the longest is past every window of the kit's families.
PROMPTS = [kit.PROMPT, [60], [8, 20, 31], [50, 3, 11, 90, 41, 6, 7, 8, 2, 1, 77, 12, 4, 66, 95, 13, 21, 34, 55, 89]]
LENGTHS = [len(prompt) for prompt in PROMPTS]
WIDTH = max(LENGTHS)
BUDGET = 20
GRADED = [(family, grade) for family in kit.CONFIGS for grade in ("some", "all")]
GRADED += [("llama", "none"), ("gemma2", "none")]
# What must be the same for a row in a batch and alone; padding and time are not.
COUNTS = (
    "rounds",
    "drafted",
    "accepted",
    "emitted",
    "cut",
    "draft_tokens_processed",
    "acceptance_histogram",
    "early_layer_tokens",
    "late_layer_tokens",
)


def padded(side: str = "left", filler: int = 0) -> dict[str, torch.Tensor]:
    """Returns `PROMPTS` as ids and mask, padded on one side with one id."""
    rows, masks = [], []
    for prompt in PROMPTS:
        padding = [filler] * (WIDTH - len(prompt))
        seen, unseen = [1] * len(prompt), [0] * len(padding)
        rows.append(padding + prompt if side == "left" else prompt + padding)
        masks.append(unseen + seen if side == "left" else seen + unseen)
    return {"prompts": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def referenced(model: PreTrainedModel, batch: dict[str, torch.Tensor], **arguments: Any) -> torch.Tensor:
    """Returns what plain greedy `generate` gives for a batch."""
    return kit.reference(model, batch["prompts"], BUDGET, attention_mask=batch["attention_mask"], **arguments)


def cut(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Returns tokens up to and with the first of `ends`."""
    place = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return list(tokens[: place + 1])


def scattering_ends(rows: Sequence[Sequence[int]]) -> list[int]:
    """Returns two tokens that, as EOS tokens, end the rows at as many different steps as two tokens can."""
    pairs = combinations(sorted({token for row in rows for token in row}), 2)
    return list(max(pairs, key=lambda pair: len({len(cut(row, pair)) for row in rows})))


def counts_of(statistics: Statistics) -> dict[str, Any]:
    """Returns the figures of a row that do not depend on its neighbours."""
    return {name: getattr(statistics, name) for name in COUNTS}


# Greedy decoding


@pytest.mark.parametrize(
    ("family", "grade", "num_draft_tokens"),
    [*((*graded, 4) for graded in GRADED), ("llama", "some", 1), ("gemma2", "none", 1), ("gpt2", "all", 1)],
)
def test_each_row_is_decoded_as_if_it_were_alone(family: str, grade: str, num_draft_tokens: int) -> None:
    """Tokens, ends and counted work; padded on either side; the rows end at different steps."""
    model = kit.graded(family, grade)
    plain = [kit.reference(model, kit.prompt_tensor(prompt), BUDGET)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    ends = scattering_ends(plain)
    expected = [cut(tokens, ends) for tokens in plain]
    assert len({len(tokens) for tokens in expected}) >= 3
    engine = Engine(model, exit_layer=2, num_draft_tokens=num_draft_tokens)
    options = {"max_new_tokens": BUDGET, "eos_token_id": ends, "pad_token_id": 0}
    alone = [engine.generate(kit.prompt_tensor(prompt), **options) for prompt in PROMPTS]
    for side in ("left", "right"):
        with kit.counted_layers(model) as layers:
            result = engine.generate(**padded(side), **options)
        assert result.new_token_ids == expected
        assert result.finish_reasons == ["stop" if tokens[-1] in ends else "length" for tokens in expected]
        steps = max(len(tokens) for tokens in expected)
        for row, tokens in zip(result.sequences.tolist(), expected, strict=True):
            assert row[WIDTH:] == tokens + [0] * (steps - len(tokens))
        for row, solo in zip(result.statistics.per_row, alone, strict=True):
            assert counts_of(row) == counts_of(solo.statistics)
        work = sum(solo.statistics.early_layer_tokens for solo in alone) + result.statistics.padding_tokens
        assert layers == [work] * kit.NUM_LAYERS
    if grade == "some" and num_draft_tokens > 1:
        assert len({tuple(row.acceptance_histogram.items()) for row in result.statistics.per_row}) > 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_dead_tokens_are_those_that_fill_each_pass_up_to_its_longest_active_row(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[dict[int, int]] = []
    intact = Drafting.draft

    def recorded(drafting: Drafting, rows: Sequence[Row], *arguments: Any) -> Draft:
        draft = intact(drafting, rows, *arguments)
        rounds.append({row.index: len(tokens) + 1 for row, tokens in zip(rows, draft.tokens, strict=True)})
        return draft

    monkeypatch.setattr(Drafting, "draft", recorded)
    model = kit.mixed()
    ends = scattering_ends(referenced(model, padded())[:, WIDTH:].tolist())
    result = Engine(model, exit_layer=2).generate(
        **padded(side), max_new_tokens=BUDGET, eos_token_id=ends, pad_token_id=0
    )
    dead = Counter({row: WIDTH - length for row, length in enumerate(LENGTHS)})
    for widths in rounds:
        dead.update({row: max(widths.values()) - width for row, width in widths.items()})
    assert [row.padding_tokens for row in result.statistics.per_row] == [dead[row] for row in range(len(PROMPTS))]
    assert any(len(set(widths.values())) > 1 for widths in rounds)
    # A finished row takes part in no later round.
    assert [sum(row in widths for widths in rounds) for row in range(len(PROMPTS))] == [
        row.rounds for row in result.statistics.per_row
    ]
    assert len(rounds[-1]) < len(PROMPTS)


def test_rows_that_accept_different_counts_move_nothing_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: dict[int, set[tuple[int, int]]] = {}
    swaps = 0
    store, swap = SharedCacheLayer.update, SharedCacheLayer.swap

    def stored(layer: SharedCacheLayer, *states: Any, **keywords: Any) -> Any:
        views = store(layer, *states, **keywords)
        addresses.setdefault(id(layer), set()).add((layer.keys.data_ptr(), layer.values.data_ptr()))
        # What attention reads is the buffer itself.
        assert [view.data_ptr() for view in views] == [layer.keys.data_ptr(), layer.values.data_ptr()]
        return views

    def swapped(layer: SharedCacheLayer, first: int, second: int) -> None:
        nonlocal swaps
        swaps += 1
        swap(layer, first, second)

    monkeypatch.setattr(SharedCacheLayer, "update", stored)
    monkeypatch.setattr(SharedCacheLayer, "swap", swapped)
    engine = Engine(kit.mixed(), exit_layer=2)
    result = engine.generate(**padded(), max_new_tokens=BUDGET)
    assert len({tuple(row.acceptance_histogram.items()) for row in result.statistics.per_row}) > 1
    assert len(addresses) == kit.NUM_LAYERS
    assert all(len(seen) == 1 for seen in addresses.values())
    # Rows change places when one ends, and never more often.
    assert swaps <= kit.NUM_LAYERS * (len(PROMPTS) - 1)


def test_a_row_that_prefill_ends_costs_its_prompt_and_nothing_else() -> None:
    model = kit.mixed()
    plain = referenced(model, padded())
    first = [int(token) for token in plain[:, WIDTH]]
    row = next(row for row, token in enumerate(first) if token not in plain[:, WIDTH:].tolist()[row - 1])
    result = Engine(model, exit_layer=2).generate(
        **padded(), max_new_tokens=BUDGET, eos_token_id=first[row], pad_token_id=0
    )
    assert result.new_token_ids[row] == [first[row]]
    ended = result.statistics.per_row[row]
    assert (ended.rounds, ended.early_layer_tokens, ended.emitted) == (0, LENGTHS[row], 1)
    assert ended.padding_tokens == WIDTH - LENGTHS[row]
    assert torch.equal(result.sequences, referenced(model, padded(), eos_token_id=first[row]))
    assert result.statistics.rounds > 0


def test_all_rows_ended_by_prefill_leave_no_round() -> None:
    model = kit.mixed()
    first = sorted(set(referenced(model, padded())[:, WIDTH].tolist()))
    result = Engine(model, exit_layer=2).generate(**padded(), max_new_tokens=BUDGET, eos_token_id=first, pad_token_id=0)
    assert result.sequences.shape == (len(PROMPTS), WIDTH + 1)
    assert result.statistics.rounds == 0
    assert result.finish_reasons == ["stop"] * len(PROMPTS)


class EndsAt(StoppingCriteria):
    """Ends each row at a token of its own."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **keywords: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.tokens


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_criterion_ends_each_row_at_its_own_token(side: str) -> None:
    model = kit.mixed()
    plain = referenced(model, padded())[:, WIDTH:].tolist()
    ends = [row[place] for row, place in zip(plain, (2, 7, 0, 12), strict=True)]
    engine = Engine(model, exit_layer=2)
    result = engine.generate(**padded(side), max_new_tokens=BUDGET, stopping_criteria=[EndsAt(ends)], pad_token_id=0)
    expected = [cut(tokens, [end]) for tokens, end in zip(plain, ends, strict=True)]
    assert result.new_token_ids == expected
    assert len({len(tokens) for tokens in expected}) >= 3
    assert result.finish_reasons == ["criteria"] * len(PROMPTS)


def test_a_batch_of_one_equals_no_batch() -> None:
    engine = Engine(kit.mixed(), kit.word_tokenizer(kit.VOCAB), exit_layer=2)
    text = " ".join(f"w{token}" for token in kit.PROMPT)
    for options in ({}, {"do_sample": True}):
        results = []
        for prompts in (text, [text], kit.prompt_tensor()):
            generator = torch.Generator().manual_seed(3) if options else None
            results.append(engine.generate(prompts, max_new_tokens=BUDGET, generator=generator, **options))
        for other in results[1:]:
            assert torch.equal(results[0].sequences, other.sequences)
            assert results[0].texts == other.texts
            assert counts_of(results[0].statistics) == counts_of(other.statistics)


def test_padding_around_a_single_row_costs_nothing() -> None:
    engine = Engine(kit.mixed(), exit_layer=2)
    bare = engine.generate(kit.prompt_tensor(), max_new_tokens=BUDGET)
    ids, mask = [[0, 0, *kit.PROMPT, 0]], [[0, 0, *[1] * 10, 0]]
    result = engine.generate(torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=BUDGET)
    assert result.new_token_ids == bare.new_token_ids
    assert result.statistics.padding_tokens == 0


def test_the_order_of_rows_changes_no_row() -> None:
    engine = Engine(kit.mixed(), exit_layer=2)
    batch = padded()
    ends = scattering_ends(referenced(kit.mixed(), batch)[:, WIDTH:].tolist())
    options = {"max_new_tokens": BUDGET, "eos_token_id": ends, "pad_token_id": 0}
    straight = engine.generate(**batch, **options).new_token_ids
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        turned = {name: tensor[order] for name, tensor in batch.items()}
        assert engine.generate(**turned, **options).new_token_ids == [straight[row] for row in order]


# Processors that see padding or lengths


class ByIds(LogitsProcessor):
    """Favours a token that follows from everything in a row, padding included."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, input_ids.shape[1] + 1)
        favoured = (input_ids * places).sum(-1) % scores.shape[1]
        return scores.scatter_add(1, favoured.unsqueeze(1), torch.full_like(scores[:, :1], 3.0))


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "min_length": {"min_length": WIDTH + 6},
    "min_new_tokens": {"min_new_tokens": 12},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.4)},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 1},
    "all of a row's ids": {"logits_processor": [ByIds()]},
}


@cache
def ended(family: str) -> tuple[PreTrainedModel, list[int], torch.Tensor]:
    """Returns a model, tokens at which its rows end, and what it says without processors."""
    model = kit.graded(family, "some")
    ends = scattering_ends(referenced(model, padded())[:, WIDTH:].tolist())
    return model, ends, referenced(model, padded(), eos_token_id=ends)


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in PROCESSORS), ("gemma2", "all of a row's ids"), ("gpt2", "all of a row's ids")],
)
def test_processors_see_what_generate_shows_them_in_a_padded_batch(family: str, name: str) -> None:
    model, ends, unprocessed = ended(family)
    batch, options = padded(), {**PROCESSORS[name], "eos_token_id": ends}
    expected = referenced(model, batch, **options)
    engine = Engine(model, exit_layer=2)
    result = engine.generate(**batch, max_new_tokens=BUDGET, pad_token_id=0, **options)
    assert torch.equal(result.sequences, expected)
    assert not torch.equal(expected, unprocessed)
    # As documented, rows that are padded on the right are shown as if they were padded on the left.
    turned = engine.generate(**padded("right"), max_new_tokens=BUDGET, pad_token_id=0, **options)
    assert turned.new_token_ids == result.new_token_ids


@pytest.mark.parametrize("processor", ["repetition_penalty", "all of a row's ids"])
def test_ids_that_a_caller_pads_with_on_the_left_are_shown_as_they_are(processor: str) -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    shown = []
    for filler in (0, 83):
        batch = padded(filler=filler)
        result = engine.generate(**batch, max_new_tokens=BUDGET, pad_token_id=0, **PROCESSORS[processor])
        assert torch.equal(result.sequences, referenced(model, batch, **PROCESSORS[processor]))
        shown.append(result.new_token_ids)
    if processor != "repetition_penalty":
        assert shown[0] != shown[1]


def test_ids_that_a_caller_pads_with_change_nothing_where_nothing_looks_at_them() -> None:
    engine = Engine(kit.mixed(), exit_layer=2)
    expected = engine.generate(**padded(), max_new_tokens=8).new_token_ids
    for side in ("left", "right"):
        for filler in (83, -100, 10_000):
            result = engine.generate(**padded(side, filler), max_new_tokens=8)
            assert result.new_token_ids == expected
            assert torch.equal(result.sequences[:, :WIDTH], padded(side, filler)["prompts"])


def test_rows_padded_on_the_left_keep_their_ids_beside_one_that_is_padded_on_the_right() -> None:
    model = kit.mixed()
    options = {"logits_processor": [ByIds()], "max_new_tokens": BUDGET, "pad_token_id": 0}
    padding = [83] * (WIDTH - 3)
    seen, unseen = [1] * 3, [0] * (WIDTH - 3)
    ids = torch.tensor([padding + PROMPTS[2], PROMPTS[2] + padding, [0] * (WIDTH - 3) + PROMPTS[2]])
    mask = torch.tensor([unseen + seen, seen + unseen, unseen + seen])
    result = Engine(model, exit_layer=2).generate(ids, attention_mask=mask, **options)
    expected = model.generate(ids[[0, 2, 2]], attention_mask=mask[[0, 2, 2]], do_sample=False, **options)
    assert torch.equal(result.sequences[:, WIDTH:], expected[:, WIDTH:])
    assert result.new_token_ids[0] != result.new_token_ids[1]


@pytest.mark.parametrize("seen", [2, -1, 0.5, float("nan"), float("-inf")])
def test_a_mask_of_other_values_than_zero_and_one_is_refused(seen: float) -> None:
    """A mask that is added to scores means the opposite."""
    mask = torch.tensor([[0.0, seen, 1.0]])
    with pytest.raises(ValueError, match=r"attention_mask holds other values than 1 \(a token\) and 0 \(padding\)"):
        Engine(kit.mixed(), exit_layer=2).generate(torch.tensor([[5, 6, 7]]), attention_mask=mask, max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_a_mask_may_be_of_any_type(dtype: torch.dtype) -> None:
    engine, batch = Engine(kit.mixed(), exit_layer=2), padded()
    expected = engine.generate(**batch, max_new_tokens=4).sequences
    mask = batch["attention_mask"].to(dtype)
    assert torch.equal(engine.generate(batch["prompts"], attention_mask=mask, max_new_tokens=4).sequences, expected)


def test_rows_that_end_early_are_padding_for_the_processors_of_the_others() -> None:
    """A prefix function is asked about its own row only, by the row's place, also after other rows have ended."""
    model = kit.mixed()
    batch = padded()
    ends = scattering_ends(referenced(model, batch)[:, WIDTH:].tolist())

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [token for token in range(kit.VOCAB) if token % 4 != row or token in ends]

    options = {"eos_token_id": ends, "prefix_allowed_tokens_fn": allowed}
    expected = referenced(model, batch, **options)
    result = Engine(model, exit_layer=2).generate(**batch, max_new_tokens=BUDGET, pad_token_id=0, **options)
    assert torch.equal(result.sequences, expected)
    assert len({len(tokens) for tokens in result.new_token_ids}) >= 2


# Several answers to each prompt


@torch.no_grad()
def check_is_possible(model: PreTrainedModel, prompt: list[int], new: list[int], top_k: int) -> None:
    """Checks that each token is among the `top_k` best of the full model behind what comes before it."""
    logits = model(torch.tensor([prompt + new]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    kth = logits.topk(top_k).values[:, -1]
    chosen = logits[torch.arange(len(new)), torch.tensor(new)]
    assert (chosen >= kth - 1e-4).all()


def several(engine: Engine, **options: Any) -> GenerationResult:
    """Returns three sampled answers to each prompt."""
    generator = torch.Generator().manual_seed(11)
    return engine.generate(
        **padded(), max_new_tokens=12, do_sample=True, num_return_sequences=3, generator=generator, **options
    )


def test_several_answers_to_each_prompt_stand_together_and_are_possible() -> None:
    model = kit.mixed()
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    engine = Engine(model, tokenizer, exit_layer=2)
    result = several(engine, top_k=5)
    rows = [prompt for prompt in PROMPTS for _ in range(3)]
    assert torch.equal(result.sequences[:, :WIDTH], padded()["prompts"].repeat_interleave(3, dim=0))
    assert result.texts == [tokenizer.decode(new, skip_special_tokens=True) for new in result.new_token_ids]
    for prompt, new, row in zip(rows, result.new_token_ids, result.statistics.per_row, strict=True):
        check_is_possible(model, prompt, new, 5)
        assert row.emitted == len(new) == 12
        assert row.early_layer_tokens == len(prompt) + row.draft_tokens_processed + row.rounds
    assert len({tuple(new) for new in result.new_token_ids}) == len(rows)
    assert torch.equal(several(engine, top_k=5).sequences, result.sequences)


def test_several_answers_of_the_best_token_are_the_greedy_one() -> None:
    model = kit.mixed()
    greedy = referenced(model, padded())[:, WIDTH : WIDTH + 12]
    result = several(Engine(model, exit_layer=2), top_k=1)
    assert torch.equal(result.sequences[:, WIDTH:], greedy.repeat_interleave(3, dim=0))


def test_several_answers_end_one_by_one() -> None:
    model = kit.mixed()
    ends = [token for token in range(kit.VOCAB) if token % 8 == 1]
    result = several(Engine(model, exit_layer=2), top_k=5, eos_token_id=ends, pad_token_id=0)
    assert len({len(new) for new in result.new_token_ids}) >= 3
    for new, reason in zip(result.new_token_ids, result.finish_reasons, strict=True):
        assert not set(new[:-1]) & set(ends)
        assert reason == ("stop" if new[-1] in ends else "length")
    total, per_row = result.statistics, result.statistics.per_row
    for name in ("rounds", "drafted", "accepted", "emitted", "cut", "draft_tokens_processed", "padding_tokens"):
        assert getattr(total, name) == sum(getattr(row, name) for row in per_row)
    assert total.early_layer_tokens == sum(row.early_layer_tokens for row in per_row) == total.late_layer_tokens


class Patience(StoppingCriteria):
    """Ends after so many calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0)


def test_a_criterion_that_keeps_count_serves_one_row_and_is_refused_in_a_batch() -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2)
    alone = engine.generate(kit.prompt_tensor(), max_new_tokens=16, stopping_criteria=[Patience(5)])
    assert alone.new_token_ids[0] == kit.without_cache(model, kit.PROMPT, 5)
    rows = kit.prompt_tensor().expand(3, -1)
    with pytest.raises(ValueError, match="stopping_criteria holds Patience, which changed when it was called: left"):
        engine.generate(rows, max_new_tokens=16, stopping_criteria=[Patience(5)], pad_token_id=0)
