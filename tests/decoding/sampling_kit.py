"""What proves speculative sampling right: tiny worlds, and checkers that every rule is put through.

A world is a list of tables, one for each length of prefix: `tables[d]` holds a distribution for each of the V^d
prefixes of d tokens, `(V^d, V)`, so that prefix `x_1..x_d` is row `Σ x_i·V^(d−i)`. Each prefix has a distribution of
its own, unlike in a test of single tokens, which cannot see what a wrong rule does behind an accepted draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.decoding.acceptance import Rule, draw, residual, speculate

Tables = list[Tensor]


def random_tables(generator: torch.Generator, vocabulary: int, length: int, sharpness: float = 1.5) -> Tables:
    """Returns random distributions in float64 for all prefixes of less than `length` tokens."""
    return [
        (sharpness * torch.randn(vocabulary**depth, vocabulary, generator=generator, dtype=torch.float64)).softmax(-1)
        for depth in range(length)
    ]


def map_tables(change: Callable[[Tensor], Tensor], tables: Tables) -> Tables:
    """Returns tables with `change` applied to the distributions of each length."""
    return [change(table) for table in tables]


def normalized(weights: Tensor) -> Tensor:
    """Returns weights `(..., vocabulary)` scaled to sum to 1."""
    return weights / weights.sum(-1, keepdim=True)


def greedy(table: Tensor) -> Tensor:
    """Returns the one-hot distribution of the likeliest token."""
    return torch.nn.functional.one_hot(table.argmax(-1), table.shape[-1]).to(table.dtype)


def top_k(table: Tensor, k: int) -> Tensor:
    """Returns the distribution over the k likeliest tokens."""
    return normalized(table * (table >= table.topk(k).values[..., -1:]))


def only(table: Tensor, tokens: list[int]) -> Tensor:
    """Returns the entries of some tokens, the others' set to 0, not normalized."""
    kept = torch.zeros_like(table)
    kept[..., tokens] = table[..., tokens]
    return kept


def tempered(table: Tensor, temperature: float) -> Tensor:
    """Returns the distribution at another temperature."""
    return normalized(table ** (1 / temperature))


@dataclass(frozen=True)
class Round:
    """All rounds that can happen: one row for each sequence that can be drafted.

    Attributes:
        p, q, drafts, counts: the arguments of a rule.
        prefixes: the row of `tables[d]` for the first d drafts, `(rows, drafts + 1)`.
        weights: the probability of each row. Drafts behind the row's count are filler; as their probabilities given
            the real drafts sum to 1, they change no total.
    """

    p: Tensor
    q: Tensor
    drafts: Tensor
    counts: Tensor
    prefixes: Tensor
    weights: Tensor


def enumerate_rounds(
    target: Tables, drawn: Tables, told: Tables, stop: Callable[[int, Tensor], Tensor] | None = None
) -> Round:
    """Returns all rounds of `len(drawn)` drafts.

    Args:
        target: the target's tables, at least one more than `drawn`.
        drawn: what drafts are drawn from.
        told: what the rule is told they were drawn from; the same where all is right.
        stop: `stop(d, prefixes)` says at which prefixes of d drafts, given as rows of `tables[d]`, drafting stops.
            `None` never stops.
    """
    vocabulary, length = target[0].shape[-1], len(drawn)
    rows = torch.arange(vocabulary**length)
    prefixes = torch.stack([rows // vocabulary ** (length - depth) for depth in range(length + 1)], dim=1)
    drafts = prefixes[:, 1:] % vocabulary
    weights = torch.ones(len(rows), dtype=torch.float64)
    for depth, table in enumerate(drawn):
        weights = weights * table[prefixes[:, depth], drafts[:, depth]]
    counts = torch.full((len(rows),), length)
    if stop is not None:
        for depth in reversed(range(length)):
            counts[stop(depth, prefixes[:, depth])] = depth
    return Round(
        p=torch.stack([target[depth][prefixes[:, depth]] for depth in range(length + 1)], dim=1),
        q=torch.stack([told[depth][prefixes[:, depth]] for depth in range(length)], dim=1),
        drafts=drafts,
        counts=counts,
        prefixes=prefixes,
        weights=weights,
    )


def acceptance(rule: Rule, rounds: Round) -> Tensor:
    """Returns how likely each row is to accept i drafts, `(rows, drafts + 1)`, by going through all outcomes of the
    tests."""
    chances, _ = rule.chances(rounds.p, rounds.q, rounds.drafts, rounds.counts)
    rows, length = chances.shape
    likely = torch.zeros(rows, length + 1, dtype=torch.float64)
    for number in range(2**length):
        passed = torch.tensor([bool(number >> place & 1) for place in range(length)]).expand(rows, length)
        likely.scatter_add_(
            1,
            rule.accepted(passed).unsqueeze(1),
            torch.where(passed, chances, 1 - chances).double().prod(1, keepdim=True),
        )
    return likely


def expected_acceptance(rule: Rule, rounds: Round) -> float:
    """Returns how many drafts are accepted on average."""
    likely = acceptance(rule, rounds) @ torch.arange(rounds.p.shape[1], dtype=torch.float64)
    return float(rounds.weights @ likely)


def exact_distance(rule: Rule, target: Tables, rounds: Round) -> float:
    """Returns the total variation between the target's sequences and those of a round that the target continues.

    It is exact: the sequences have one token more than drafts, and the probability of each is added up over everything
    that can be drafted, accepted and drawn.
    """
    vocabulary, length = target[0].shape[-1], rounds.drafts.shape[1]
    _, scale = rule.chances(rounds.p, rounds.q, rounds.drafts, rounds.counts)
    likely = acceptance(rule, rounds) * rounds.weights.unsqueeze(1)
    expected, observed = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    for depth in range(length + 1):
        follow = residual(rounds.p, rounds.q, rounds.counts, torch.full_like(rounds.counts, depth), scale)
        # What the round emits when it accepts `depth` drafts, by the prefix that these make.
        emitted = torch.zeros(vocabulary**depth, vocabulary, dtype=torch.float64)
        emitted.index_add_(0, rounds.prefixes[:, depth], likely[:, depth, None] * normalized(follow).double())
        expected = (expected.view(-1, 1) * target[depth]).double()
        observed = (observed.view(-1, 1) * target[depth]).double() + emitted
    return float((expected - observed).abs().sum() / 2)


def sampled_distance(
    rule: Rule, target: Tables, drawn: Tables, told: Tables, generator: torch.Generator, samples: int
) -> float:
    """Returns the largest total variation, over the places of a sequence, between the target's tokens and those of
    many rounds that draw their drafts, run `speculate` and let the target go on."""
    vocabulary, length = target[0].shape[-1], len(drawn)
    uniforms = torch.rand(3, samples, length + 1, generator=generator, dtype=torch.float64)
    prefixes = [torch.zeros(samples, dtype=torch.long)]
    drafts = torch.zeros(samples, length, dtype=torch.long)
    for depth, table in enumerate(drawn):
        drafts[:, depth] = draw(table[prefixes[-1]], uniforms[0, :, depth])
        prefixes.append(prefixes[-1] * vocabulary + drafts[:, depth])
    accepted, following = speculate(
        rule,
        torch.stack([table[prefix] for table, prefix in zip(target, prefixes, strict=True)], dim=1),
        torch.stack([table[prefix] for table, prefix in zip(told, prefixes[:-1], strict=True)], dim=1),
        drafts,
        torch.full((samples,), length),
        uniforms[1],
    )
    worst = 0.0
    marginal = torch.ones(1, dtype=torch.float64)
    prefix = torch.zeros(samples, dtype=torch.long)
    for depth in range(length + 1):
        token = draw(target[depth][prefix], uniforms[2, :, depth])
        token = torch.where(accepted == depth, following, token)
        if depth < length:
            token = torch.where(accepted > depth, drafts[:, depth], token)
        prefix = prefix * vocabulary + token
        marginal = (marginal.unsqueeze(1) * target[depth]).flatten()
        expected = marginal.view(-1, vocabulary).sum(0)
        observed = token.bincount(minlength=vocabulary).double() / samples
        worst = max(worst, float((expected - observed).abs().sum() / 2))
    return worst
