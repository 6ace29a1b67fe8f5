"""What a generation call did, counted where it happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

PHASES = ("prefill", "draft", "verify", "other")
# Apart from these: what the first call of a kind needs once.
COMPILE = "compile"


@dataclass
class Tally:
    """The running counts of one row.

    Attributes:
        outcomes: how many rounds ended as (drafted, accepted), both counted up to where the output is cut.
        work: how many rounds drafted with which exit, in how many steps, and sent how many drafts to verification:
            {(E, steps, V): rounds}. Those of the last layer are steps of plain decoding.
        emitted: new tokens, the one from prefill included.
        cut: rounds whose own target token was cut away.
        draft_tokens_processed: drafts that passed the early layers.
        draft_tokens_verified: drafts that passed the late layers.
        early_layer_tokens: tokens that passed layers 1..E (all layers where there is no exit).
        late_layer_tokens: tokens that passed layers E+1..L.
        padding_tokens: dead tokens that passed the layers beside this row's own.
        seconds: time that passed while the row was being decoded, by phase.
    """

    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    work: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    emitted: int = 0
    cut: int = 0
    draft_tokens_processed: int = 0
    draft_tokens_verified: int = 0
    early_layer_tokens: int = 0
    late_layer_tokens: int = 0
    padding_tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Statistics:
    """The figures of a call, under the same names in Python and JSON; `per_row` holds them for each row.

    Attributes:
        strategy: what was done: "self_speculative", "autoregressive" or "early_exit".
        exit_layer: E, counted from 1; "auto" where it was chosen between rounds; `None` without one.
        num_draft_tokens: γ, at most how many tokens a round drafts; `None` where nothing is drafted.
        rounds: R, a draft and its verification each, summed over rows.
        rounds_by_exit: {E: rounds}; those of the last layer are steps of plain decoding.
        drafted: drafts, up to where the output is cut; of a tree its depth.
        accepted: accepted drafts, likewise.
        emitted: N, new tokens; each row's first comes from prefill: N = rows + accepted + R − cut.
        cut: rounds whose own target token was cut away.
        draft_tokens_processed: D, everything that was processed as a draft, copied tokens and nodes of trees included.
        draft_tokens_verified: V, what of this was sent to verification: all but what an exit cut of a copied span.
        draft_acceptance_rate: accepted / drafted; `None` when nothing was drafted.
        mean_acceptance_length: (N − rows) / R, tokens per round; `None` when R = 0.
        acceptance_by_position: for the i-th draft (from 1): rounds that accepted the first i drafts over rounds that
            drafted at least i.
        acceptance_histogram: {accepted drafts: rounds}.
        early_layer_tokens: tokens through layers 1..E: prompt + D + R.
        late_layer_tokens: tokens through layers E+1..L: prompt + V + R; 0 for "early_exit".
        padding_tokens: dead tokens of the batch, which pass all layers beside these.
        seconds: {"prefill", "draft", "verify", "other"}; of a row: while it was being decoded. Compiled rounds do not
            tell drafting and verification apart: all of them is "verify".
        compile_seconds: what compiling took; 0 where nothing had to be compiled.
        decode_tokens_per_second: (N − rows) / seconds without prefill; `None` when nothing followed prefill.
        per_row: the same for each row.
        tallies: the counts of each row that all this comes from; not in JSON.
    """

    strategy: str
    exit_layer: int | str | None
    num_draft_tokens: int | None
    rounds: int
    rounds_by_exit: dict[int, int]
    drafted: int
    accepted: int
    emitted: int
    cut: int
    draft_tokens_processed: int
    draft_tokens_verified: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    acceptance_histogram: dict[int, int]
    early_layer_tokens: int
    late_layer_tokens: int
    padding_tokens: int
    seconds: dict[str, float]
    compile_seconds: float
    decode_tokens_per_second: float | None
    per_row: tuple[Statistics, ...] = ()
    tallies: tuple[Tally, ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls,
        tallies: Sequence[Tally],
        seconds: Counter[str],
        strategy: str,
        exit_layer: int | str | None,
        num_draft_tokens: int | None,
        per_row: tuple[Statistics, ...] = (),
    ) -> Statistics:
        """Returns the figures of some rows together.

        Args:
            tallies: one for each row.
            seconds: of the whole call, by phase; rows that are decoded together share them.
        """
        outcomes: Counter[tuple[int, int]] = sum((tally.outcomes for tally in tallies), Counter())
        rounds = outcomes.total()
        drafted = sum(drafts * count for (drafts, _), count in outcomes.items())
        accepted = sum(accepts * count for (_, accepts), count in outcomes.items())
        emitted = sum(tally.emitted for tally in tallies)
        decoded = emitted - len(tallies)
        decode_seconds = sum(seconds[phase] for phase in PHASES if phase != "prefill")
        histogram: Counter[int] = Counter()
        for (_, accepts), count in outcomes.items():
            histogram[accepts] += count
        return cls(
            strategy=strategy,
            exit_layer=exit_layer,
            num_draft_tokens=num_draft_tokens,
            rounds=rounds,
            rounds_by_exit=rounds_by_exit(tallies),
            drafted=drafted,
            accepted=accepted,
            emitted=emitted,
            cut=sum(tally.cut for tally in tallies),
            draft_tokens_processed=sum(tally.draft_tokens_processed for tally in tallies),
            draft_tokens_verified=sum(tally.draft_tokens_verified for tally in tallies),
            draft_acceptance_rate=accepted / drafted if drafted else None,
            mean_acceptance_length=decoded / rounds if rounds else None,
            acceptance_by_position=acceptance_by_position(outcomes),
            acceptance_histogram=dict(sorted(histogram.items())),
            early_layer_tokens=sum(tally.early_layer_tokens for tally in tallies),
            late_layer_tokens=sum(tally.late_layer_tokens for tally in tallies),
            padding_tokens=sum(tally.padding_tokens for tally in tallies),
            seconds={phase: seconds[phase] for phase in PHASES},
            compile_seconds=float(seconds[COMPILE]),
            decode_tokens_per_second=decoded / decode_seconds if rounds and decode_seconds else None,
            per_row=per_row,
            tallies=tuple(tallies),
        )

    @classmethod
    def total(cls, calls: Sequence[Statistics]) -> Statistics:
        """Returns the figures of several calls together, as of one with all their rows; times add up.

        Raises:
            ValueError: no calls, or calls of different strategies, exits or draft lengths.
        """
        settings = {(call.strategy, call.exit_layer, call.num_draft_tokens) for call in calls}
        if len(settings) != 1:
            raise ValueError(
                f"calls have {len(settings)} settings {sorted(settings, key=str)}; pass one or more calls of the same "
                "strategy, exit_layer and num_draft_tokens."
            )
        tallies = [tally for call in calls for tally in call.tallies]
        seconds: Counter[str] = Counter()
        for call in calls:
            seconds.update({**call.seconds, COMPILE: call.compile_seconds})
        return cls.of(tallies, seconds, *settings.pop(), tuple(row for call in calls for row in call.per_row))

    def to_dict(self) -> dict[str, object]:
        """Returns the figures as a dictionary that `json.dumps` takes."""
        return asdict(self, dict_factory=lambda items: {name: value for name, value in items if name != "tallies"})


def rounds_by_exit(tallies: Sequence[Tally]) -> dict[int, int]:
    """Returns how many rounds drafted with which exit, {E: rounds}, rising."""
    rounds: Counter[int] = Counter()
    for tally in tallies:
        for (exit_layer, _, _), count in tally.work.items():
            rounds[exit_layer] += count
    return dict(sorted(rounds.items()))


def acceptance_by_position(outcomes: Counter[tuple[int, int]]) -> tuple[float, ...]:
    """Returns, for the i-th draft from 1, rounds that accepted the first i drafts / rounds that drafted at least i.

    Args:
        outcomes: {(drafted, accepted): rounds}.
    """
    longest = max((drafted for drafted, _ in outcomes), default=0)
    rates = []
    for position in range(1, longest + 1):
        tried = sum(count for (drafted, _), count in outcomes.items() if drafted >= position)
        kept = sum(count for (_, accepted), count in outcomes.items() if accepted >= position)
        rates.append(kept / tried)
    return tuple(rates)
