"""Greedy rounds as the engine would run them, replayed from which of an exit's choices are right: no layer runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from layerskip.decoding.plan import check_num_draft_tokens
from layerskip.decoding.statistics import Statistics, Tally


@dataclass(frozen=True)
class Replay:
    """The figures of replayed rounds, each as in `Statistics`.

    Attributes:
        num_draft_tokens: γ.
        rounds: R, summed over rows.
        drafted: drafts, up to where the output is cut; D is the same here, since drafting ends with an EOS token.
        accepted: accepted drafts.
        emitted: N, new tokens.
        cut: rounds whose own target token was cut away.
        draft_acceptance_rate: accepted / drafted; `None` when nothing was drafted.
        mean_acceptance_length: (N − rows) / R; `None` when R = 0.
        acceptance_by_position: for the i-th draft (from 1): rounds that accepted the first i drafts over rounds that
            drafted at least i.
        acceptance_histogram: {accepted drafts: rounds}.
    """

    num_draft_tokens: int
    rounds: int
    drafted: int
    accepted: int
    emitted: int
    cut: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    acceptance_histogram: dict[int, int]


def replay(rows: Sequence[Sequence[bool]], num_draft_tokens: int, max_new_tokens: int) -> Replay:
    """Returns what greedy self-speculation would have counted over some rows.

    Rounds, accepted drafts and emitted tokens are exact. A round goes on drafting after its first wrong draft, and the
    engine stops where one of these is an EOS token. Matches cannot tell that: a replay counts all γ, so that `drafted`
    and the divisors of `acceptance_by_position` may be a little high.

    Args:
        rows: the matches of each row, one fewer than its N new tokens: entry t tells whether the exit's first choice
            after the prompt and new tokens 0..t is new token t + 1. A row of fewer than `max_new_tokens` tokens
            ended with an EOS token.
        num_draft_tokens: γ.
        max_new_tokens: the budget of every row.

    Raises:
        ValueError: a γ below 1, or a row beyond the budget.
    """
    check_num_draft_tokens(num_draft_tokens)
    tallies = [replay_row(matches, num_draft_tokens, max_new_tokens) for matches in rows]
    statistics = Statistics.of(tallies, Counter(), "self_speculative", None, num_draft_tokens)
    return Replay(**{field.name: vars(statistics)[field.name] for field in fields(Replay)})


def replay_row(matches: Sequence[bool], num_draft_tokens: int, max_new_tokens: int) -> Tally:
    """Returns the counts of one row: outcomes, emitted, cut and draft_tokens_processed; arguments as of `replay`.

    Raises:
        ValueError: a row beyond the budget.
    """
    length = len(matches) + 1
    if length > max_new_tokens:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}, but a row has {len(matches)} matches and so {length} new tokens; pass "
            "the budget that it was generated with."
        )
    tally = Tally(emitted=1)
    while tally.emitted < length:
        allowed = min(num_draft_tokens, max_new_tokens - tally.emitted - 1)
        ahead = matches[tally.emitted - 1 : tally.emitted - 1 + allowed]
        accepted = next((index for index, match in enumerate(ahead) if not match), len(ahead))
        # Only an EOS token can be the last one and drafted: the budget leaves the last token to the target.
        ended = accepted == length - tally.emitted
        drafted = accepted if ended else allowed
        tally.outcomes[drafted, accepted] += 1
        tally.draft_tokens_processed += drafted
        tally.cut += ended
        tally.emitted += accepted + (not ended)
    return tally
