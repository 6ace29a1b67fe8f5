"""Drafts: what they are with copied spans and with a rule that ends them, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.decoding.statistics import Statistics
from tests import kit
from tests.decoding.levers_kit import TABLES, early_passes, looping, padded, recorded_drafts

# A text that has said what it says again, with another ending.
REPEATS = [5, 9, 33, 7, 52, 18, 5, 9, 33, 7, 52, 44, 3, 5, 9, 33]
PROMPTS = [REPEATS, kit.PROMPT[:3], [8, 20, 8, 20, 8]]
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "mixed": kit.mixed,
    "rejected": lambda: kit.rejected("llama"),
    "identical": kit.identical,
    "looping and mixed": lambda: looping(kit.mixed()),
    "looping and identical": lambda: looping(kit.identical()),
}
Rounds = list[tuple[Any, ...]]


def drafted(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]] = (REPEATS,), max_new_tokens: int = 100, **options: Any
) -> tuple[Rounds, Statistics]:
    """Returns the rounds of a call, by row, what stood before, and drafts; and its statistics."""
    ids, mask = padded(prompts)
    with recorded_drafts() as seen:
        result = Engine(model, exit_layer=kit.EXIT_LAYER, cost_table=TABLES["gpu"]).generate(
            ids, attention_mask=mask, **{"max_new_tokens": max_new_tokens, "pad_token_id": 0, **options}
        )
    return [(each.rows, each.before, each.tokens) for each in seen], result.statistics


# Copied spans


@pytest.mark.parametrize("name", MODELS)
def test_copying_changes_no_draft(name: str) -> None:
    model = MODELS[name]()
    # An exit that is never right takes a round for each token.
    new_tokens = 24 if name == "rejected" else 100
    copied, with_copies = drafted(model, max_new_tokens=new_tokens, copy_ngrams="checked")
    plain, without = drafted(model, max_new_tokens=new_tokens)
    assert copied == plain
    assert sum(len(tokens[0]) for _, _, tokens in plain) > 70
    # A text that repeats is there to copy from.
    assert with_copies.draft_tokens_processed >= without.draft_tokens_processed
    assert with_copies.draft_tokens_verified == without.draft_tokens_verified == without.draft_tokens_processed


@pytest.mark.parametrize(
    ("num_draft_tokens", "more"),
    [(1, {}), (9, {}), (2, {"repetition_penalty": 1.3}), (9, {"no_repeat_ngram_size": 4})],
    ids=str,
)
def test_copying_changes_no_draft_at_any_length_nor_behind_processors(
    num_draft_tokens: int, more: dict[str, Any]
) -> None:
    for model in (kit.mixed(), looping(kit.mixed())):
        options = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": 40, **more}
        copied, statistics = drafted(model, copy_ngrams="checked", **options)
        assert copied == drafted(model, **options)[0]
        assert statistics.rounds > 0


def test_copying_changes_no_draft_of_rows_of_different_lengths() -> None:
    cut = []
    for model in (kit.mixed(), looping(kit.mixed()), looping(kit.identical())):
        copied, statistics = drafted(model, PROMPTS, 50, copy_ngrams="checked")
        assert copied == drafted(model, PROMPTS, 50)[0]
        cut.append(statistics.draft_tokens_processed - statistics.draft_tokens_verified)
    assert max(cut) > 0


def test_nothing_is_drafted_behind_an_end_that_was_copied() -> None:
    model = looping(kit.identical())
    plain = kit.reference(model, kit.prompt_tensor(REPEATS), 40)[0, len(REPEATS) :].tolist()
    # The prompt has said the whole loop: what comes next is there to copy, the end and what stands behind it.
    prompt = [*REPEATS, *plain[:20]]
    eos = max(plain[20:], key=plain[20:].index)
    assert plain[20:].index(eos) > 0
    copied, _ = drafted(model, [prompt], eos_token_id=eos, copy_ngrams="checked", num_draft_tokens=8)
    assert copied == drafted(model, [prompt], eos_token_id=eos, num_draft_tokens=8)[0]
    ended = [tokens[0] for _, _, tokens in copied if eos in tokens[0]]
    assert ended and all(tokens.index(eos) == len(tokens) - 1 for tokens in ended)


def test_a_text_that_repeats_takes_a_pass_a_round() -> None:
    """Of a right exit's four drafts the last passes behind the copies only where it was not copied itself."""
    model = looping(kit.identical())
    counts = {}
    for copies in ("off", "checked"):
        with early_passes() as passes:
            _, statistics = drafted(model, num_draft_tokens=4, copy_ngrams=copies)
        counts[copies] = len(passes)
    assert statistics.draft_acceptance_rate == 1.0
    assert counts["off"] == 1 + 4 * 20 - 1 + 20
    # Prefill, one pass for each of 20 rounds, and what the rounds take in which the text repeats nothing yet.
    assert counts["checked"] <= 1 + 20 + 24


def test_copies_that_the_exit_disagrees_with_cost_tokens_and_no_passes() -> None:
    model = kit.mixed()
    with early_passes() as plain:
        _, without = drafted(model, [[8, 20] * 6], max_new_tokens=40)
    with early_passes() as copied:
        _, statistics = drafted(model, [[8, 20] * 6], max_new_tokens=40, copy_ngrams="checked")
    assert len(copied) <= len(plain)
    cut = statistics.draft_tokens_processed - statistics.draft_tokens_verified
    assert cut == sum(copied) - sum(plain) > 0
    assert statistics.draft_tokens_verified == without.draft_tokens_verified


# Drafts by themselves


@pytest.mark.parametrize("options", [{"copy_ngrams": "checked"}, {"draft_stop": "adaptive"}], ids=str)
@pytest.mark.parametrize("name", ["mixed", "looping and mixed"])
def test_drafts_are_those_of_a_fresh_early_exit_without_a_cache(name: str, options: dict[str, Any]) -> None:
    model = MODELS[name]()
    short = kit.truncated(model, kit.EXIT_LAYER)
    rounds, _ = drafted(model, **options)
    assert sum(len(tokens[0]) for _, _, tokens in rounds) > 50
    for _, before, tokens in rounds:
        assert kit.is_greedy(short, [*REPEATS, *before[0]], tokens[0])


def test_exits_that_are_chosen_draft_what_they_would_alone() -> None:
    """With copies and a stop by cost beside; several exits have to have drafted."""
    seen_exits = set()
    for model in (kit.identical(), kit.scale_late_layers(kit.identical(3), 0.0), looping(kit.mixed())):
        with recorded_drafts() as seen:
            Engine(
                model, exit_layer="auto", draft_stop="adaptive", copy_ngrams="checked", cost_table=TABLES["gpu"]
            ).generate(kit.prompt_tensor(REPEATS), max_new_tokens=80)
        shorter = {exit_layer: kit.truncated(model, exit_layer) for exit_layer in range(1, kit.NUM_LAYERS)}
        for each in seen:
            if each.tokens[0]:
                seen_exits.add(each.exit_layer)
                assert kit.is_greedy(shorter[each.exit_layer], [*REPEATS, *each.before[0]], each.tokens[0])
    assert len(seen_exits) > 1


# A rule that ends drafts


def test_an_early_end_leaves_out_what_would_have_been_drafted_next() -> None:
    model = kit.mixed()
    with recorded_drafts() as seen:
        Engine(model, exit_layer=2, draft_stop="adaptive", cost_table=TABLES["cpu"]).generate(
            kit.prompt_tensor(), max_new_tokens=60
        )
    short = kit.truncated(model, kit.EXIT_LAYER)
    ended = [each for each in seen if each.draft.rows[0].left_out is not None]
    assert len(ended) > 5
    for each in ended:
        (row,) = each.draft.rows
        assert len(row.confidences) == len(row.tokens) + 1
        assert kit.is_greedy(short, [*kit.PROMPT, *each.before[0]], [*row.tokens, row.left_out])
    for each in seen:
        if each.draft.rows[0].left_out is None:
            assert len(each.draft.rows[0].confidences) == len(each.tokens[0])


@torch.no_grad()
def test_confidences_are_the_exits_largest_probabilities() -> None:
    model = kit.mixed()
    with recorded_drafts() as seen:
        Engine(model, exit_layer=2, draft_stop="adaptive", cost_table=TABLES["gpu"]).generate(
            kit.prompt_tensor(), max_new_tokens=20
        )
    short = kit.truncated(model, kit.EXIT_LAYER)
    for each in seen:
        (row,) = each.draft.rows
        behind = [*kit.PROMPT, *each.before[0]]
        for offset, confidence in enumerate(row.confidences):
            logits = short(torch.tensor([[*behind, *row.tokens[:offset]]]), use_cache=False).logits[0, -1]
            assert confidence == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)


def test_every_token_passes_the_early_layers_once_however_a_draft_ends() -> None:
    """What is left out passes no layer, and what is drafted all that come before verification."""
    for options in ({"draft_stop": "adaptive"}, {"draft_stop": "adaptive", "copy_ngrams": "checked"}):
        for model in (kit.mixed(), looping(kit.mixed()), looping(kit.identical())):
            with recorded_drafts() as seen:
                Engine(model, exit_layer=2, cost_table=TABLES["cpu"], **options).generate(
                    kit.prompt_tensor(REPEATS), max_new_tokens=24
                )
            assert all(row.passed == len(row.tokens) + 1 for each in seen for row in each.draft.rows)
