"""Sampling where drafts are copied, end by cost, or come from an exit that is chosen: still the full model's own law.

As in `test_sampling`: by enumeration, and by draws of the engine, with wrong variants that both must refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from layerskip import CostTable, Engine
from layerskip.decoding.acceptance import Rule
from layerskip.decoding.drafting import Draft, Drafting, RowDraft
from layerskip.decoding.exit_head import Candidates, ExitHead
from layerskip.decoding.rows import Row
from tests.decoding.levers_kit import gpu_like, recorded_drafts
from tests.decoding.sampling_kit import (
    Tables,
    enumerate_rounds,
    exact_distance,
    generation_law,
    law_distance,
    map_tables,
    model_tables,
    p_value,
    random_tables,
    target_law,
)
from tests.decoding.test_sampling import (
    DRAWS,
    EOS,
    EXACT,
    LEVEL,
    MANY,
    PROCESSORS,
    RULES,
    START,
    cells,
    engine_tables,
    exact_model,
    seeded,
    small,
)

# Enumeration


def undrafted(tables: Tables, threshold: float) -> Tables:
    """Returns tables of which nothing is drafted where the largest probability is below a threshold."""
    return map_tables(lambda table: table.masked_fill(table.amax(-1, keepdim=True) < threshold, torch.nan), tables)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("processors", ["none", "everything"])
@pytest.mark.parametrize("grade", ["low", "partial"])
def test_a_stop_that_looks_at_the_distribution_alone_changes_nothing(grade: str, processors: str, rule: Rule) -> None:
    """Whole calls of up to four tokens, three drafts a round."""
    q, p = engine_tables(grade, False, processors, length=4)
    expected = target_law(model_tables(exact_model(grade), START, 4, PROCESSORS[processors]()), EOS)
    for threshold in (0.4, 0.6):
        drawn = undrafted(q, threshold)
        stopped = torch.cat(drawn).isnan().any(-1)
        assert 0 < stopped.sum() < len(stopped)
        found = generation_law(rule, lambda start, drawn=drawn: (p, drawn, q), 3, 4, EOS)
        assert law_distance(found, expected) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("looks_at", ["distribution", "token"])
def test_a_stop_that_looks_at_the_token_is_refused(looks_at: str, rule: Rule) -> None:
    """A draft that is left out because it is itself unlikely makes likely ones more likely still."""
    generator, threshold = seeded(2), 0.6
    target, drawn = random_tables(generator, 4, 4), random_tables(generator, 4, 3, sharpness=2.5)
    rounds = enumerate_rounds(target, drawn, drawn)
    chances = rounds.q.gather(2, rounds.drafts.unsqueeze(-1)).squeeze(-1)
    low = (rounds.q.amax(-1) if looks_at == "distribution" else chances) < threshold
    counts = (~low).long().cumprod(1).sum(1)
    assert len(counts.unique()) > 2
    distance = exact_distance(rule, target, replace(rounds, counts=counts))
    assert (distance < EXACT) if looks_at == "distribution" else (distance > 1000 * EXACT)


# Draws of the engine

SAID = [1, 4, 3, 2, 1, 4, 3, 2, 1, 4]
"""A prompt that repeats: what follows is often in it, with what came after."""
LENGTH = 5
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("none", {}),
    "top-k": ("top-k", {"top_k": 3}),
    "temperature": ("temperature", {"temperature": 1.5}),
    "trimmed head and repetition": (
        "repetition",
        {"draft_token_ids": torch.tensor([5, 0, 1, 3, 2]), "repetition_penalty": 1.7},
    ),
}
DEAR = CostTable((1, 2, 3), (0.2, 0.4, 0.6), (tuple(1 + 0.2 * width for width in range(7)),) * 3, 1.0, 0.05, 0.01)
EVERYTHING = {"exit_layer": "auto", "draft_stop": "adaptive", "copy_ngrams": "checked"}
OPTIONS: dict[str, dict[str, Any]] = {
    "checked copies": {"copy_ngrams": "checked"},
    "trusted copies": {"copy_ngrams": "trusted"},
    "adaptive": {"draft_stop": "adaptive", "cost_table": DEAR},
    "auto": {"exit_layer": "auto", "cost_table": gpu_like()},
    "everything": {**EVERYTHING, "cost_table": gpu_like()},
    "everything, trusted": {**EVERYTHING, "copy_ngrams": "trusted", "cost_table": gpu_like()},
}
GRADE = "partial"


def draws(options: dict[str, Any], **arguments: Any) -> tuple[Tensor, list[Draft]]:
    """Returns new tokens of many draws, `(rows, LENGTH)`, and the drafts of all rounds."""
    settings = {"exit_layer": 2, "num_draft_tokens": 4, **options}
    if "draft_token_ids" in arguments:
        settings["draft_token_ids"] = arguments.pop("draft_token_ids")
    engine, generator = Engine(small(GRADE, MANY), **settings), seeded(0)
    calls = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, "generator": generator, **arguments}
    with recorded_drafts() as seen:
        results = [engine.generate(torch.tensor([SAID]).expand(500, -1), **calls) for _ in range(DRAWS // 500)]
    tokens = torch.tensor([row for result in results for row in result.new_token_ids])
    return tokens, [each.draft for each in seen]


@cache
def joint(processors: str = "none") -> Tensor:
    """The probabilities of the model's first three tokens behind the prompt, `(512,)`."""
    return target_law(model_tables(small(GRADE, MANY), SAID, 3, PROCESSORS[processors]()))[3]


def follows(tokens: Tensor, processors: str = "none") -> bool:
    """Whether draws may be of the model's law."""
    return p_value(cells(tokens[:, :3]), joint(processors)) > LEVEL


@pytest.mark.parametrize(
    ("name", "choice"),
    [*((name, "plain") for name in OPTIONS), ("everything", "top-k"), ("everything, trusted", "top-k")],
)
def test_the_first_three_tokens_follow_the_models_law(name: str, choice: str) -> None:
    processors, arguments = CHOICES[choice]
    tokens, drafts = draws(OPTIONS[name], **arguments)
    assert follows(tokens, processors)
    rows = [row for draft in drafts for row in draft.rows]
    assert sum(len(row.tokens) for row in rows) > DRAWS // 4
    if OPTIONS[name].get("copy_ngrams"):
        assert sum(bool(row.copy.tokens) for row in rows) > DRAWS // 4
        assert any(row.copy.tokens[:2] == row.tokens[:2] for row in rows if len(row.tokens) > 1)
    if OPTIONS[name].get("draft_stop"):
        assert any(row.left_out is not None for row in rows)
    if OPTIONS[name].get("exit_layer"):
        assert {draft.exit_layer for draft in drafts if any(draft.tokens)} not in (set(), {2})


@pytest.mark.parametrize("choice", ["temperature", "trimmed head and repetition"])
def test_everything_together_follows_the_law_of_processed_scores(choice: str) -> None:
    processors, arguments = CHOICES[choice]
    tokens, drafts = draws(OPTIONS["everything"], **arguments)
    assert follows(tokens, processors)
    assert any(row.copy.tokens and row.tokens for draft in drafts for row in draft.rows)


# The draws refuse what is wrong


def keeps_the_copy(
    drafting: Drafting, row: Row, draft: Draft, place: int, span: Sequence[int], candidates: Candidates, first: int
) -> None:
    """Drafts what was copied, whatever the exit drew."""
    tokens = list(candidates.tokens)
    tokens[first : first + len(span)] = span
    extend(drafting, row, draft, place, span, replace(candidates, tokens=tokens), first)


def stops_at_unlikely_tokens(
    drafting: Drafting, exit_layer: int, drafted: RowDraft, candidates: Candidates, entry: int
) -> bool:
    """Leaves a draft out where it is itself unlikely."""
    assert candidates.sources is not None
    if float(candidates.sources[entry][candidates.tokens[entry]]) < 0.4:
        drafted.left_out = candidates.tokens[entry]
        return False
    return pays(drafting, exit_layer, drafted, candidates, entry)


def as_if_drawn(head: ExitHead, tokens: Sequence[int]) -> list[Tensor]:
    """Says of copies that they were drawn from all tokens alike."""
    return [torch.full((MANY,), 1 / MANY, dtype=torch.float64) for _ in tokens]


extend, pays = Drafting._extend, Drafting._pays
WRONG: dict[str, tuple[str, type, str, Any]] = {
    "a copy is kept although the exit drew another token": ("checked copies", Drafting, "_extend", keeps_the_copy),
    "a draft is left out for its own chance": ("adaptive", Drafting, "_pays", stops_at_unlikely_tokens),
    "a copy counts as drawn": ("trusted copies", ExitHead, "certain", as_if_drawn),
}


@pytest.mark.parametrize("name", WRONG)
def test_draws_of_wrong_rounds_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test of the same draws, which are right without the change."""
    options, holder, method, wrong = WRONG[name]
    monkeypatch.setattr(holder, method, wrong)
    tokens, _ = draws(OPTIONS[options])
    assert not follows(tokens)
