"""What proves speculative sampling right: tiny worlds, and checkers that every rule is put through.

A world is a list of tables, one for each length of prefix: `tables[d]` holds a distribution for each of the V^d
prefixes of d tokens, `(V^d, V)`, so that prefix `x_1..x_d` is row `Σ x_i·V^(d−i)`. Each prefix has a distribution of
its own, unlike in a test of single tokens, which cannot see what a wrong rule does behind an accepted draft.

The tables of the second half are those of real models: the logits of their exit and of all their layers behind every
prefix, processed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from layerskip.decoding.acceptance import Rule, draw, probabilities, residual, speculate
from layerskip.decoding.processors import Processors
from layerskip.decoding.transcript import Transcript
from layerskip.model.cache import SharedCache
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement

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
        passed = torch.tensor([number >> place & 1 for place in range(length)]).bool().expand(rows, length)
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


# Real models.


def sequences(prompt: Sequence[int], vocabulary: int, depth: int) -> Tensor:
    """Returns a prompt with all continuations of `depth` tokens, as a table has its rows: `(V^depth, tokens)`."""
    rows = torch.arange(vocabulary**depth)
    places = [rows // vocabulary ** (depth - 1 - place) % vocabulary for place in range(depth)]
    return torch.stack([*(torch.full_like(rows, token) for token in prompt), *places], dim=1)


@torch.no_grad()
def exit_and_full_logits(
    model: PreTrainedModel, prompt: Sequence[int], length: int, exit_layer: int, draft_token_ids: Tensor | None = None
) -> tuple[Tables, Tables]:
    """Returns the logits that drafts and targets come from, behind all prefixes of less than `length` tokens, by the
    calls of the decode loop.

    Args:
        draft_token_ids: of a trimmed draft head, ascending; `None` for the full head.
    """
    layered = LayeredModel(model)
    vocabulary = layered.vocab_size
    ids = sequences(prompt, vocabulary, length - 1)
    rows, width = ids.shape
    placement = Placement.prompt([width] * rows, layered.device)
    cache, rotary = SharedCache(layered.num_layers, rows, width), layered.rotary_tables(width)
    early = layered.run(
        layered.embed(ids, placement.positions), 0, exit_layer, placement=placement, cache=cache, rotary=rotary
    )
    full = layered.run(early, exit_layer, layered.num_layers, placement=placement, cache=cache, rotary=rotary)
    head = None if draft_token_ids is None else DraftHead.of(layered, draft_token_ids)
    drafts = layered.logits(early) if head is None else head.full_logits(early)
    # Every prefix is the beginning of many rows; the first of them serves.
    return tuple(
        [logits[:: vocabulary ** (length - 1 - depth), len(prompt) - 1 + depth] for depth in range(length)]
        for logits in (drafts, layered.logits(full))
    )


def processed(logits: Tables, processors: Sequence[Any], prompt: Sequence[int], seen: int | None = None) -> Tables:
    """Returns the distributions that the decode loop makes of logits, NaN where the processors leave no token.

    Args:
        processors: transformers' own.
        seen: how many tokens of a prefix the processors are shown at most; all of them where all is right.
    """
    if not processors:
        return map_tables(probabilities, logits)
    tables = []
    for depth, table in enumerate(logits):
        vocabulary = table.shape[-1]
        transcript = Transcript(torch.tensor([prompt]).expand(len(table), -1), len(logits), pad=0)
        for row, tokens in enumerate(sequences([], vocabulary, depth).tolist() if depth else []):
            transcript.write(row, 0, tokens)
        count = depth if seen is None else min(seen, depth)
        scores, _ = Processors(processors, transcript)(
            table.to(torch.float32, copy=True), list(range(len(table))), [count] * len(table)
        )
        tables.append(probabilities(scores))
    return tables


@torch.no_grad()
def model_tables(model: PreTrainedModel, prompt: Sequence[int], length: int, processors: Sequence[Any] = ()) -> Tables:
    """Returns the model's own distributions behind all prefixes of less than `length` tokens: its logits without a
    cache, processed as `generate` does it, and their softmax. Nothing of the engine takes part."""
    tables = []
    for depth in range(length):
        ids = sequences(prompt, model.config.vocab_size, depth)
        scores = model(ids, use_cache=False).logits[:, -1]
        if processors:
            scores = LogitsProcessorList(processors)(ids, scores.float())
        tables.append(scores.double().softmax(-1))
    return tables


def target_law(target: Tables, eos: int | None = None) -> Tables:
    """Returns the probabilities of all outputs that sampling token by token can give: `law[d]` those of the outputs of
    d tokens, `(V^d,)`. Outputs end with `eos`, or where the tables do."""
    vocabulary = target[0].shape[-1]
    going, law = torch.ones(1, dtype=torch.float64), [torch.zeros(1, dtype=torch.float64)]
    for depth, table in enumerate(target):
        going = (going.unsqueeze(1) * table.double()).flatten()
        ends = _ends(vocabulary, depth + 1, len(target), eos)
        law.append(going * ends)
        going = going * ~ends
    return law


def generation_law(
    rule: Rule,
    tables: Callable[[int], tuple[Tables, Tables, Tables]],
    num_draft_tokens: int,
    length: int,
    eos: int | None = None,
) -> Tables:
    """Returns the probabilities of all outputs of a whole call, as `target_law` does: prefill, then round after round,
    through everything that can be drafted, accepted and drawn.

    Args:
        tables: for a round behind that many new tokens: the target's tables, those that drafts are drawn from (NaN
            where nothing is drafted), and those that the rule is told.
        length: the most new tokens of an output.
        eos: ends drafts and outputs.
    """
    vocabulary = tables(0)[0][0].shape[-1]
    going, law = (
        [torch.zeros(vocabulary**depth, dtype=torch.float64) for depth in range(length + 1)] for _ in range(2)
    )
    going[0] += 1
    for start in range(length):
        target, drawn, told = tables(start)
        drafted = min(num_draft_tokens, length - start - 1) if start else 0
        rounds = _rounds_behind(start, drafted, going[start], target, drawn, told, eos)
        _, scale = rule.chances(rounds.p, rounds.q, rounds.drafts, rounds.counts)
        likely = acceptance(rule, rounds) * rounds.weights.unsqueeze(1)
        for count in range(drafted + 1):
            depth, prefixes, weights = start + count, rounds.prefixes[:, count], likely[:, count]
            if count and eos is not None:
                ended = rounds.drafts[:, count - 1] == eos
                law[depth].index_add_(0, prefixes, weights * ended)
                weights = weights * ~ended
            follow = residual(rounds.p, rounds.q, rounds.counts, torch.full_like(rounds.counts, count), scale)
            emitted = torch.zeros(vocabulary**depth, vocabulary, dtype=torch.float64)
            emitted.index_add_(0, prefixes, weights.unsqueeze(1) * normalized(follow).double())
            ends = _ends(vocabulary, depth + 1, length, eos)
            law[depth + 1] += emitted.flatten() * ends
            going[depth + 1] += emitted.flatten() * ~ends
    return law


def _rounds_behind(
    start: int, drafted: int, weights: Tensor, target: Tables, drawn: Tables, told: Tables, eos: int | None
) -> Round:
    """Returns all rounds of `drafted` drafts behind all prefixes of `start` tokens, which have these weights."""
    vocabulary = target[0].shape[-1]
    rows = torch.arange(vocabulary ** (start + drafted))
    prefixes = torch.stack([rows // vocabulary ** (drafted - place) for place in range(drafted + 1)], dim=1)
    drafts = prefixes[:, 1:] % vocabulary
    weights = weights[prefixes[:, 0]]
    counts = torch.full_like(rows, drafted)
    for place in reversed(range(drafted)):
        table = drawn[start + place][prefixes[:, place]]
        stops = table.isnan().any(-1)
        # Filler may be anything that sums to 1.
        weights = weights * torch.where(stops, 1 / vocabulary, table[torch.arange(len(rows)), drafts[:, place]])
        if place and eos is not None:
            stops = stops | (drafts[:, place - 1] == eos)
        counts[stops] = place
    p = torch.stack([target[start + place][prefixes[:, place]] for place in range(drafted + 1)], dim=1)
    q = torch.zeros_like(p[:, 1:])
    for place in range(drafted):
        q[:, place] = told[start + place][prefixes[:, place]]
    return Round(
        p=p,
        q=q,
        drafts=drafts,
        counts=counts,
        prefixes=prefixes,
        weights=weights,
    )


def _ends(vocabulary: int, depth: int, length: int, eos: int | None) -> Tensor:
    """Returns which outputs of `depth` tokens are complete, bool `(V^depth,)`."""
    last = torch.arange(vocabulary**depth) % vocabulary
    return torch.full_like(last, depth == length, dtype=torch.bool) | (last == (-1 if eos is None else eos))


def law_distance(first: Tables, second: Tables) -> float:
    """Returns the total variation between two laws of outputs."""
    return sum(float((a - b).abs().sum() / 2) for a, b in zip(first, second, strict=True))


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Returns how likely Pearson's χ² is to be as large as here or larger where `counts` were drawn from `expected`.

    Cells that are expected to hold fewer than 5 draws are taken together; 0 where a draw has probability 0.

    Args:
        counts: of the draws in each cell, int64 `(cells,)`.
        expected: the probabilities of the cells.
    """
    if (counts[expected == 0] > 0).any():
        return 0.0
    wanted = expected * counts.sum()
    rare = wanted < 5
    observed = torch.cat([counts[~rare], counts[rare].sum().unsqueeze(0)]).double()
    wanted = torch.cat([wanted[~rare], wanted[rare].sum().unsqueeze(0)])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2).double(), statistic / 2))
