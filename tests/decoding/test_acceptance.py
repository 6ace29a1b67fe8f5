"""Greedy acceptance: the longest matching prefix, and nothing behind it. Sampling: exactly the target's distribution.

The proof is enumeration on tiny vocabularies, and the rules that are wrong on purpose show that it would notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerskip.decoding.acceptance import (
    BLOCK_RULE,
    TOKEN_RULE,
    Rule,
    accept_greedy,
    draw,
    probabilities,
    residual,
    speculate,
)
from tests.decoding.sampling_kit import (
    Tables,
    acceptance,
    enumerate_rounds,
    exact_distance,
    expected_acceptance,
    greedy,
    map_tables,
    normalized,
    only,
    random_tables,
    sampled_distance,
    tempered,
    top_k,
)

# Few different tokens, so that drafts and targets often agree.
tokens = st.integers(0, 2)

RULES = [pytest.param(TOKEN_RULE, id="token"), pytest.param(BLOCK_RULE, id="block")]
EXACT = 1e-6
"""What an exact rule may differ from the target by; a wrong one differs by a thousand times as much and more."""
SAMPLES = 20_000
SAMPLED = 0.015
"""The same for 20,000 samples on 8 tokens, whose noise is 0.004."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def naive(drafts: list[int], targets: list[int]) -> int:
    """The longest prefix, found by trying every length."""
    return max(length for length in range(len(drafts) + 1) if drafts[:length] == targets[:length])


@pytest.mark.parametrize(
    ("matches", "accepted"),
    [
        ([1, 0, 1, 1], 1),
        ([0, 1, 1, 1], 0),
        ([1, 1, 0, 1], 2),
        ([1, 1, 1, 0], 3),
        ([1, 1, 1, 1], 4),
        ([0, 0, 0, 0], 0),
        ([1], 1),
        ([0], 0),
    ],
)
def test_a_match_after_a_rejection_does_not_count(matches: list[int], accepted: int) -> None:
    targets = [10, 11, 12, 13][: len(matches)]
    drafts = [target if match else target + 50 for target, match in zip(targets, matches, strict=True)]
    assert accept_greedy(drafts, [*targets, 14]) == accepted


def test_no_draft_is_no_acceptance() -> None:
    assert accept_greedy([], [7]) == 0


@given(st.lists(tokens, max_size=8), st.lists(tokens, min_size=9, max_size=9))
def test_equals_the_longest_common_prefix(drafts: list[int], targets: list[int]) -> None:
    assert accept_greedy(drafts, targets[: len(drafts) + 1]) == naive(drafts, targets)


@given(st.lists(tokens, max_size=8), st.lists(tokens, min_size=9, max_size=9))
def test_targets_behind_those_of_the_drafts_change_nothing(drafts: list[int], targets: list[int]) -> None:
    """In a batch, rows that drafted less than others have targets for dead tokens behind their own."""
    assert accept_greedy(drafts, targets) == accept_greedy(drafts, targets[: len(drafts) + 1])


@given(st.lists(tokens, max_size=8), st.lists(tokens, min_size=9, max_size=9))
def test_there_is_always_a_target_to_emit_and_it_disagrees_with_the_next_draft(
    drafts: list[int], targets: list[int]
) -> None:
    accepted = accept_greedy(drafts, targets)
    assert 0 <= accepted <= len(drafts)
    if accepted < len(drafts):
        assert targets[accepted] != drafts[accepted]


# Probabilities.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_probabilities_are_a_softmax_in_float64(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, 50, generator=seeded(0)).to(dtype)
    exponents = scores.double().exp()
    found = probabilities(scores)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, exponents / exponents.sum(-1, keepdim=True))


def test_a_score_of_minus_infinity_has_probability_0() -> None:
    assert probabilities(torch.tensor([[-math.inf, 0.0, 0.0]])).tolist() == [[0.0, 0.5, 0.5]]


def test_scores_that_make_no_distribution_become_nan_in_their_row_only() -> None:
    found = probabilities(torch.tensor([[-math.inf] * 2, [math.nan, 0.0], [0.0, 0.0]]))
    assert found.isnan().tolist() == [[True, True], [True, True], [False, False]]


# Drawing.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [[3.0, 1.0, 4.0, 2.0], [0.0, 2.0, 0.0, 0.0, 5.0, 3.0, 0.0], [0.0, 0.0, 10.0]])
def test_a_grid_of_uniforms_draws_tokens_as_often_as_they_weigh(weights: list[float], dtype: torch.dtype) -> None:
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = draw(torch.tensor(weights, dtype=dtype).expand(1000, -1), grid)
    assert drawn.bincount(minlength=len(weights)).tolist() == [100 * weight for weight in weights]


def test_a_uniform_at_a_step_draws_the_token_behind_it() -> None:
    """Each token has a half-open share of [0, 1), as the uniforms do, so that eighths are counted without error."""
    drawn = draw(torch.tensor([1.0, 2.0, 0.0, 5.0]).expand(8, -1), torch.arange(8) / 8)
    assert drawn.tolist() == [0, 1, 1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("weights", "first", "last"),
    [([1.0, 2.0], 0, 1), ([0.0, 0.1, 0.0, 0.2, 0.0, 0.0], 1, 3), ([0.0, 1e-30, 0.0], 1, 1), ([1e-38, 1.0, 0.0], 0, 1)],
)
def test_the_extreme_uniforms_draw_the_outermost_tokens_that_weigh_anything(
    weights: list[float], first: int, last: int, dtype: torch.dtype
) -> None:
    below_one = 1 - torch.finfo(torch.float64).eps / 2
    extremes = torch.tensor([0.0, below_one], dtype=torch.float64)
    assert draw(torch.tensor(weights, dtype=dtype).expand(2, -1), extremes).tolist() == [first, last]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_never_draws_a_token_of_weight_0(dtype: torch.dtype) -> None:
    """Uniforms at and around every step of the cumulative weights, most of which are 0."""
    generator = seeded(1)
    weights = torch.rand(500, generator=generator, dtype=dtype) * (torch.rand(500, generator=generator) < 0.1)
    steps = (weights.cumsum(-1) / weights.sum()).clamp(max=1 - torch.finfo(dtype).eps)
    for uniforms in (steps, steps.nextafter(torch.zeros_like(steps)), steps.nextafter(torch.ones_like(steps))):
        drawn = draw(weights.expand(500, -1), uniforms)
        assert (weights[drawn] > 0).all()


def test_a_cumulative_sum_that_falls_by_rounding_draws_no_token_of_weight_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel sum can do so on a GPU; here it is made to."""
    rounded = torch.tensor([0.5, 0.51, 0.49, 1.0, 1.01])
    monkeypatch.setattr(Tensor, "cumsum", lambda weights, dim: rounded.expand_as(weights))
    uniforms = torch.linspace(0, 0.9999, 2000)
    drawn = draw(torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0]).expand(2000, -1), uniforms)
    assert set(drawn.tolist()) == {0, 3}


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
def test_a_draw_has_the_shape_of_its_uniforms(shape: tuple[int, ...]) -> None:
    generator = seeded(2)
    weights, uniforms = torch.rand(*shape, 5, generator=generator), torch.rand(shape, generator=generator)
    drawn = draw(weights, uniforms)
    assert drawn.shape == shape and drawn.dtype == torch.int64
    one_by_one = [int(draw(*pair)) for pair in zip(weights.view(-1, 5), uniforms.view(-1), strict=True)]
    assert drawn.flatten().tolist() == one_by_one


@pytest.mark.parametrize("weights", [[0.0, 0.0, 0.0], [math.nan] * 3, [0.5, math.nan, 0.5]])
def test_weights_that_mean_nothing_still_draw_a_token_of_the_vocabulary(weights: list[float]) -> None:
    assert 0 <= int(draw(torch.tensor(weights), torch.tensor(0.9))) < 3


# The proof: all sequences of tokens, with their probabilities.

Distribution = Callable[[Tensor], Tensor]

SETTINGS: dict[str, tuple[Distribution, Distribution]] = {
    "plain": (lambda p: p, lambda q: q),
    "trimmed draft head": (lambda p: p, lambda q: normalized(only(q, [0, 2]))),
    "greedy drafts": (lambda p: p, greedy),
    "greedy target": (greedy, lambda q: q),
    "greedy both": (greedy, greedy),
    "top-k target": (lambda p: top_k(p, 2), lambda q: q),
    "top-k both": (lambda p: top_k(p, 2), lambda q: top_k(q, 2)),
    "no token in common": (lambda p: normalized(only(p, [1])), lambda q: normalized(only(q, [0, 2]))),
}


def after_token_0(depth: int, prefixes: Tensor) -> Tensor:
    """Drafting stops behind the end of a sequence."""
    return (prefixes % 3 == 0) & (depth > 0)


def at_some_prefixes(depth: int, prefixes: Tensor) -> Tensor:
    """Drafting stops at some prefixes of one draft and more, as it may by a limit on q."""
    return (prefixes * 7 + depth) % 5 == 1


def before_any(depth: int, prefixes: Tensor) -> Tensor:
    """Nothing is drafted."""
    return prefixes >= 0


STOPS = [None, after_token_0, at_some_prefixes, before_any]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_sequences_are_distributed_as_the_targets(rule: Rule, length: int, setting: str) -> None:
    of_p, of_q = SETTINGS[setting]
    generator = seeded(length)
    target = map_tables(of_p, random_tables(generator, 3, length + 1))
    drawn = map_tables(of_q, random_tables(generator, 3, length))
    for stop in STOPS:
        rounds = enumerate_rounds(target, drawn, drawn, stop)
        assert exact_distance(rule, target, rounds) < EXACT, stop


@pytest.mark.parametrize("rule", RULES)
def test_sequences_over_four_tokens_are_distributed_as_the_targets(rule: Rule) -> None:
    generator = seeded(10)
    for _ in range(20):
        target, drawn = random_tables(generator, 4, 4), random_tables(generator, 4, 3)
        assert exact_distance(rule, target, enumerate_rounds(target, drawn, drawn)) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_float32_is_as_exact_as_its_digits(rule: Rule) -> None:
    generator = seeded(11)
    target = map_tables(Tensor.float, random_tables(generator, 3, 4))
    drawn = map_tables(Tensor.float, random_tables(generator, 3, 3))
    rounds = enumerate_rounds(target, drawn, drawn, after_token_0)
    assert rule.chances(rounds.p, rounds.q, rounds.drafts, rounds.counts)[0].dtype == torch.float32
    assert exact_distance(rule, target, rounds) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("of_p", [lambda p: p, greedy, lambda p: top_k(p, 2)])
def test_drafts_from_the_targets_own_distribution_are_all_accepted(rule: Rule, of_p: Distribution) -> None:
    """p = q everywhere: nothing is left for the residual, and block verification divides 0 by 0."""
    target = map_tables(of_p, random_tables(seeded(12), 3, 4))
    for stop in STOPS:
        rounds = enumerate_rounds(target, target[:-1], target[:-1], stop)
        assert exact_distance(rule, target, rounds) < EXACT
        assert expected_acceptance(rule, rounds) == pytest.approx(float(rounds.weights @ rounds.counts.double()))


@pytest.mark.parametrize("rule", RULES)
def test_no_draft_is_accepted_behind_the_last_real_one(rule: Rule) -> None:
    generator = seeded(13)
    target, drawn = random_tables(generator, 3, 4), random_tables(generator, 3, 3)
    rounds = enumerate_rounds(target, drawn, drawn, at_some_prefixes)
    likely = acceptance(rule, rounds)
    filler = torch.arange(4) > rounds.counts.unsqueeze(1)
    assert filler.any() and (likely[filler] == 0).all()
    torch.testing.assert_close(likely.sum(1), torch.ones(len(likely), dtype=torch.float64))


def test_one_draft_is_accepted_as_often_as_the_distributions_overlap() -> None:
    generator = seeded(14)
    target, drawn = random_tables(generator, 4, 2), random_tables(generator, 4, 1)
    overlap = float(target[0].minimum(drawn[0]).sum())
    for rule in (TOKEN_RULE, BLOCK_RULE):
        assert expected_acceptance(rule, enumerate_rounds(target, drawn, drawn)) == pytest.approx(overlap)


def test_the_papers_example_of_block_verification() -> None:
    """Two tokens, two drafts, p = (1/3, 2/3) and q = (2/3, 1/3) at every prefix: 10/9 and 11/9 drafts are accepted."""
    likely = torch.tensor([1.0, 2.0], dtype=torch.float64) / 3
    target = [likely.expand(2**depth, 2) for depth in range(3)]
    drawn = [likely.flip(0).expand(2**depth, 2) for depth in range(2)]
    rounds = enumerate_rounds(target, drawn, drawn)
    assert expected_acceptance(TOKEN_RULE, rounds) == pytest.approx(10 / 9)
    assert expected_acceptance(BLOCK_RULE, rounds) == pytest.approx(11 / 9)


def test_block_verification_accepts_at_least_as_many_drafts() -> None:
    generator = seeded(15)
    gains = []
    for seed in range(50):
        target, drawn = random_tables(generator, 3, 4), random_tables(generator, 3, 3)
        rounds = enumerate_rounds(target, drawn, drawn, STOPS[seed % 3])
        gains.append(expected_acceptance(BLOCK_RULE, rounds) - expected_acceptance(TOKEN_RULE, rounds))
    assert min(gains) > -1e-12
    assert sum(gain > 0.01 for gain in gains) > 25


# The same checks refuse what is wrong.


def inverted(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """min(1, q/p)."""
    at = drafts.unsqueeze(-1)
    ratios = (q.gather(2, at) / p[:, :-1].gather(2, at)).squeeze(-1).clamp(max=1)
    return ratios, torch.ones_like(p[..., 0])


def without_subtraction(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """p counts so much that q no longer does: the next token is drawn from p."""
    chances, scale = TOKEN_RULE.chances(p, q, drafts, counts)
    return chances, scale * 1e12


def without_scale(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification with the residual of the token rule."""
    chances, scale = BLOCK_RULE.chances(p, q, drafts, counts)
    return chances, torch.ones_like(scale)


def joint_only(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification that tests each prefix with p_i instead of h_i."""
    _, scale = BLOCK_RULE.chances(p, q, drafts, counts)
    return scale[:, 1:], scale


@dataclass(frozen=True)
class Wrong:
    """A rule, what drafts are drawn from, and what the rule is told they were drawn from."""

    rule: Rule
    drawn: Distribution = lambda q: q
    told: Distribution = lambda q: q

    def tables(self, q: Tables) -> tuple[Tables, Tables]:
        return map_tables(self.drawn, q), map_tables(self.told, q)


WRONG = {
    "argmax draft, softmax q": Wrong(TOKEN_RULE, drawn=greedy),
    "argmax draft, softmax q, block": Wrong(BLOCK_RULE, drawn=greedy),
    "inverted ratio": Wrong(Rule(inverted, TOKEN_RULE.accepted)),
    "next token from p": Wrong(Rule(without_subtraction, TOKEN_RULE.accepted)),
    "drawn at T = 0.5, q at T = 1": Wrong(TOKEN_RULE, drawn=lambda q: tempered(q, 0.5)),
    "drawn at T = 0.5, q at T = 1, block": Wrong(BLOCK_RULE, drawn=lambda q: tempered(q, 0.5)),
    "top-k draft, raw q": Wrong(TOKEN_RULE, drawn=lambda q: top_k(q, 2)),
    "trimmed draft, q not normalized again": Wrong(
        TOKEN_RULE, drawn=lambda q: normalized(only(q, [0, 2])), told=lambda q: only(q, [0, 2])
    ),
    "block without scale": Wrong(Rule(without_scale, BLOCK_RULE.accepted)),
    "block with p_i for h_i": Wrong(Rule(joint_only, BLOCK_RULE.accepted)),
    "block chances, leading run": Wrong(Rule(BLOCK_RULE.chances, TOKEN_RULE.accepted)),
    "token chances, last pass": Wrong(Rule(TOKEN_RULE.chances, BLOCK_RULE.accepted)),
}


@pytest.mark.parametrize("name", WRONG)
def test_enumeration_refuses_a_wrong_rule(name: str) -> None:
    generator = seeded(16)
    distances = []
    for _ in range(8):
        target = random_tables(generator, 3, 4)
        drawn, told = WRONG[name].tables(random_tables(generator, 3, 3))
        distances.append(exact_distance(WRONG[name].rule, target, enumerate_rounds(target, drawn, told)))
    assert max(distances) > 1000 * EXACT


@pytest.mark.parametrize("rule", RULES)
def test_enumeration_refuses_to_drop_a_draft_because_of_its_own_chance(rule: Rule) -> None:
    """Drafting must stop behind an unlikely draft, not before it."""
    generator = seeded(17)
    target, drawn = random_tables(generator, 3, 4), random_tables(generator, 3, 3)
    rounds = enumerate_rounds(target, drawn, drawn)
    unlikely = rounds.q.gather(2, rounds.drafts.unsqueeze(-1)).squeeze(-1) < 0.3
    rounds.counts.copy_((~unlikely).long().cumprod(1).sum(1))
    assert exact_distance(rule, target, rounds) > 1000 * EXACT


# Samples: the whole of `speculate`, with real random numbers.


def worst_sampled_distance(rule: Rule, tables: Callable[[Tables], tuple[Tables, Tables]]) -> float:
    """The largest of six pairs of p and q over 8 tokens, two drafts each."""
    generator = seeded(18)
    worst = 0.0
    for _ in range(6):
        target, (drawn, told) = random_tables(generator, 8, 3), tables(random_tables(generator, 8, 2))
        worst = max(worst, sampled_distance(rule, target, drawn, told, generator, SAMPLES))
    return worst


@pytest.mark.parametrize("rule", RULES)
def test_samples_are_distributed_as_the_targets(rule: Rule) -> None:
    assert worst_sampled_distance(rule, lambda q: (q, q)) < SAMPLED


# What block verification without its scale gets wrong is less than the noise: that takes the enumeration.
@pytest.mark.parametrize("name", [name for name in WRONG if name != "block without scale"])
def test_samples_of_a_wrong_rule_are_refused(name: str) -> None:
    assert worst_sampled_distance(WRONG[name].rule, WRONG[name].tables) > SAMPLED


# Rows, filler and guards.


def random_batch(rows: int, length: int, vocabulary: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random arguments of `speculate` but the rule: p, q, drafts, counts, uniforms."""
    generator = seeded(19)
    p = torch.rand(rows, length + 1, vocabulary, generator=generator, dtype=torch.float64)
    q = torch.rand(rows, length, vocabulary, generator=generator, dtype=torch.float64)
    drafts = torch.randint(vocabulary, (rows, length), generator=generator)
    counts = torch.randint(length + 1, (rows,), generator=generator)
    uniforms = torch.rand(rows, length + 1, generator=generator, dtype=torch.float64)
    return normalized(p), normalized(q), drafts, counts, uniforms


@pytest.mark.parametrize("rule", RULES)
def test_a_row_of_a_batch_is_decided_as_if_it_were_alone(rule: Rule) -> None:
    p, q, drafts, counts, uniforms = random_batch(rows=200, length=4)
    accepted, following = speculate(rule, p, q, drafts, counts, uniforms)
    assert accepted.unique().tolist() == [0, 1, 2, 3, 4]
    for row, count in enumerate(counts.tolist()):
        alone = speculate(
            rule,
            p[row : row + 1, : count + 1],
            q[row : row + 1, :count],
            drafts[row : row + 1, :count],
            counts[row : row + 1],
            uniforms[row : row + 1, [*range(count), -1]],
        )
        assert (accepted[row], following[row]) == alone


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("filler", [0.25, 1e9, -1.0, math.inf, math.nan])
def test_filler_behind_a_rows_drafts_changes_nothing(rule: Rule, filler: float) -> None:
    p, q, drafts, counts, uniforms = random_batch(rows=200, length=4)
    before = speculate(rule, p, q, drafts, counts, uniforms)
    behind = torch.arange(5) > counts.unsqueeze(1)
    p[behind], q[behind[:, 1:]], drafts[behind[:, 1:]] = filler, filler, -100
    uniforms[:, :-1][behind[:, 1:]] = 0
    after = speculate(rule, p, q, drafts, counts, uniforms)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    chances, _ = rule.chances(p, q, drafts, counts)
    assert (chances[behind[:, 1:]] == 0).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_drafts_the_token_is_drawn_from_p(rule: Rule, dtype: torch.dtype) -> None:
    p, q, drafts, counts, uniforms = random_batch(rows=50, length=0)
    accepted, following = speculate(rule, p.to(dtype), q.to(dtype), drafts, counts, uniforms)
    assert accepted.tolist() == [0] * 50 and accepted.dtype == torch.int64
    assert torch.equal(following, draw(p[:, 0].to(dtype), uniforms[:, 0]))


def test_a_residual_of_nothing_is_p() -> None:
    p, _, _, _, _ = random_batch(rows=4, length=2)
    counts, accepted = torch.full((4,), 2), torch.tensor([0, 1, 2, 0])
    found = residual(p, p[:, :-1], counts, accepted, torch.ones(4, 3, dtype=torch.float64))
    assert torch.equal(found, p[torch.arange(4), accepted])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_hot_distributions_accept_what_agrees_and_draw_what_does_not(rule: Rule, dtype: torch.dtype) -> None:
    """Greedy decoding, as a special case: whatever the uniforms, the outcome is that of `accept_greedy`."""
    generator = seeded(20)
    targets, drafts = (torch.randint(2, (100, width), generator=generator) for width in (4, 3))
    p, q = (torch.nn.functional.one_hot(choices, 5).to(dtype) for choices in (targets, drafts))
    for uniform in (0.0, 0.5, 1 - 2**-24):
        accepted, following = speculate(rule, p, q, drafts, torch.full((100,), 3), torch.full((100, 4), uniform))
        expected = [accept_greedy(*pair) for pair in zip(drafts.tolist(), targets.tolist(), strict=True)]
        assert accepted.tolist() == expected
        assert torch.equal(following, targets[torch.arange(100), accepted])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draft_that_could_not_be_drawn_makes_no_nan(rule: Rule, dtype: torch.dtype) -> None:
    """q is 0 at all drafts; so is p at every second."""
    p = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]], dtype=dtype).unsqueeze(0)
    q = torch.tensor([0.0, 0.0, 1.0], dtype=dtype).expand(1, 3, 3)
    chances, scale = rule.chances(p, q, torch.tensor([[0, 0, 0]]), torch.tensor([3]))
    assert chances.isfinite().all() and scale.isfinite().all()
    assert chances[0, 0] > 0 and chances[0, 1] == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_target_of_nan_accepts_no_draft(rule: Rule) -> None:
    p, q, drafts, _, _ = random_batch(rows=3, length=2)
    accepted, following = speculate(
        rule, p * math.nan, q, drafts, torch.full((3,), 2), torch.zeros(3, 3, dtype=torch.float64)
    )
    assert accepted.tolist() == [0, 0, 0]
    assert ((following >= 0) & (following < 5)).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [0, 1, 3])
def test_nothing_is_read_back_to_the_host(rule: Rule, length: int) -> None:
    """On the meta device tensors have shapes but no values: whoever reads one gets an error."""
    arguments = [argument.to("meta") for argument in random_batch(rows=2, length=length)]
    with pytest.raises(RuntimeError):
        arguments[0].sum().item()
    accepted, following = speculate(rule, *arguments)
    assert accepted.shape == following.shape == (2,)
    assert accepted.dtype == following.dtype == torch.int64
