"""Greedy rounds as the engine would run them, replayed from which of an exit's choices are right: no layer runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from layerskip.decoding.plan import check_num_draft_tokens
from layerskip.decoding.statistics import Statistics, Tally


def replay(rows: Sequence[Sequence[bool]], num_draft_tokens: int, max_new_tokens: int) -> Statistics:
    """Returns what greedy self-speculation would have counted over some rows; no layer runs, and no time passes.

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
    return Statistics.of(tallies, Counter(), "self_speculative", None, num_draft_tokens)


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
        tally.draft_tokens_verified += drafted
        tally.cut += ended
        tally.emitted += accepted + (not ended)
    return tally
