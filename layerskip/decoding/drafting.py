"""Drafting with the early layers, token by token, behind spans that are copied from the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from layerskip.decoding.exit_head import Candidates, ExitHead
from layerskip.decoding.ngrams import NOTHING, Copy, NgramIndex
from layerskip.decoding.passes import Passes
from layerskip.decoding.rows import Row
from layerskip.decoding.stop_rule import COPIED, StopRule
from layerskip.decoding.transcript import Transcript


@dataclass
class RowDraft:
    """What one row drafts in a round.

    Attributes:
        tokens: the drafts.
        left_out: what would have been the next draft, had the stop rule not ended it.
        sources: what each was drawn from, `(vocabulary,)`, the one left out included; none in greedy decoding.
        confidences: the exit's largest probability at each, likewise, where a stop rule asks for it.
        chance: how likely all drafts are to be accepted, by the stop rule.
        copy: what the text offers to copy behind the row's last token.
        is_copied: the drafts are copied, and the exit has not been asked.
        passed: how many tokens of the round have passed the early layers, the row's last token first.
    """

    tokens: list[int] = field(default_factory=list)
    left_out: int | None = None
    sources: list[torch.Tensor] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    chance: float = 1.0
    copy: Copy = NOTHING
    is_copied: bool = False
    passed: int = 0


@dataclass
class Draft:
    """What a round drafts.

    Attributes:
        exit_layer: E.
        rows: of each active row.
        limits: at most how many drafts each may have.
        states: by exit layer, its states `(rows, width, hidden)`: after the row's last token and after each draft.
        passes: how often the early layers ran.
    """

    exit_layer: int
    rows: list[RowDraft]
    limits: list[int]
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    passes: int = 0

    @property
    def tokens(self) -> list[list[int]]:
        """The drafts of each row."""
        return [row.tokens for row in self.rows]

    @property
    def steps(self) -> int:
        """How often the early layers ran for drafting: all but the once that verification needs."""
        return max(0, self.passes - 1)

    @property
    def waiting(self) -> list[int]:
        """The places of the rows of which something has yet to pass the early layers."""
        return [place for place, row in enumerate(self.rows) if row.passed <= len(row.tokens)]


class Drafting:
    """Drafts the rounds of one call."""

    def __init__(
        self,
        passes: Passes,
        head: ExitHead,
        eos_token_ids: frozenset[int],
        *,
        transcript: Transcript | None = None,
        copies: Sequence[NgramIndex] | None = None,
        trusts_copies: bool = False,
        stop_rule: StopRule | None = None,
    ) -> None:
        """Makes ready to draft; nothing runs yet.

        Args:
            head: what drafts are chosen with.
            eos_token_ids: behind which nothing is drafted.
            transcript: what processors see.
            copies: the text of each row of the batch, to copy from; `None` copies nothing.
            trusts_copies: what is copied is drafted as it stands, for the full model alone to judge; else the exit
                cuts it where it disagrees.
            stop_rule: ends a draft that no longer pays; without one only its limit does.
        """
        self.passes = passes
        self.head = head
        self.eos_token_ids = eos_token_ids
        self.transcript = transcript
        self.copies = copies
        self.trusts_copies = trusts_copies
        self.stop_rule = stop_rule

    def draft(
        self,
        rows: Sequence[Row],
        limits: Sequence[int],
        exit_layer: int,
        kept: Sequence[int] = (),
        copy_limits: Sequence[int] | None = None,
    ) -> Draft:
        """Drafts for all rows together; the last drafts have yet to pass the early layers, see `finish`.

        A span that is copied from a row's text goes through the layers in one pass behind the row's last token. Unless
        copies are trusted, the exit's own choices decide how much of it holds: drafts are those of drafting token by
        token, and what the exit disagrees with has passed in vain.

        Args:
            rows: the active rows, in the cache's order.
            limits: at most how many drafts of the exit each may have.
            exit_layer: E.
            kept: lower exits whose states are to be kept beside E's, rising.
            copy_limits: at most how many tokens each may copy; `limits` by default.
        """
        draft = Draft(exit_layer, [RowDraft() for _ in rows], list(limits))
        spans: dict[int, list[int]] = {}
        for place, (row, limit) in enumerate(zip(rows, copy_limits or limits, strict=True)):
            if self.copies is not None and limit:
                draft.rows[place].copy = self.copies[row.index].continuation(limit)
                if self.trusts_copies:
                    self._trust(row, draft, place)
                else:
                    spans[place] = draft.rows[place].copy.tokens
                    self._write(row, 0, spans[place])
        while any(self._may_grow(draft, place) for place in draft.waiting):
            waiting = draft.waiting
            self._pass(rows, draft, spans, kept)
            self._grow(rows, draft, spans, waiting)
            spans = {}
        return draft

    def finish(self, rows: Sequence[Row], draft: Draft, kept: Sequence[int] = ()) -> None:
        """Passes the last drafts through layers 1..E: if all are accepted, their keys and exit states must be there.

        Arguments are those of `draft`, and what it has returned.
        """
        waiting = draft.waiting
        if waiting:
            self._pass(rows, draft, {}, kept)
            for place in waiting:
                draft.rows[place].passed = len(draft.rows[place].tokens) + 1

    def _trust(self, row: Row, draft: Draft, place: int) -> None:
        """Drafts what the text offers, up to an EOS token and as far as it pays; the exit drafts nothing then."""
        drafted = draft.rows[place]
        for token in drafted.copy.tokens:
            if self.stop_rule is not None:
                following = self.stop_rule.chance(COPIED, drafted.copy.confidence)
                chance = drafted.chance * following
                if not self.stop_rule.goes_on(COPIED, len(drafted.tokens), chance, following):
                    break
                drafted.chance = chance
            drafted.tokens.append(token)
            if token in self.eos_token_ids:
                break
        if drafted.tokens:
            drafted.is_copied = True
            drafted.sources = self.head.certain(drafted.tokens)
            draft.limits[place] = len(drafted.tokens)
            self._write(row, 0, drafted.tokens)

    def _may_grow(self, draft: Draft, place: int) -> bool:
        tokens = draft.rows[place].tokens
        return len(tokens) < draft.limits[place] and not (tokens and tokens[-1] in self.eos_token_ids)

    def _pass(self, rows: Sequence[Row], draft: Draft, spans: Mapping[int, list[int]], kept: Sequence[int]) -> None:
        """Runs layers 1..E over each waiting row's last token or draft and what is copied behind it."""
        waiting = set(draft.waiting)
        tokens, live, starts = [], [], []
        for place, (row, drafted) in enumerate(zip(rows, draft.rows, strict=True)):
            # Of several drafts only copies that are trusted wait together.
            tokens.append([row.tokens[-1], *drafted.tokens, *spans.get(place, [])][drafted.passed :])
            live.append(len(tokens[-1]) if place in waiting else 0)
            starts.append(row.committed - 1 + drafted.passed)
            if place in waiting:
                row.tally.draft_tokens_processed += live[-1] - (drafted.passed == 0)
        width = max(live)
        placement = self.passes.place(starts, live, width)
        hidden = self.passes.embed([(each + [0] * width)[:width] for each in tokens], placement)
        draft.passes += 1
        for layer, states in self.passes.run_through(rows, hidden, 0, [*kept, draft.exit_layer], placement).items():
            if layer not in draft.states:
                # Zeros, since dead tokens pass the late layers with what stands here.
                draft.states[layer] = states.new_zeros((len(rows), max(draft.limits) + 1, states.shape[2]))
            for place, count in enumerate(live):
                first = draft.rows[place].passed
                draft.states[layer][place, first : first + count] = states[place, :count]

    def _grow(self, rows: Sequence[Row], draft: Draft, spans: Mapping[int, list[int]], waiting: Sequence[int]) -> None:
        """Chooses the drafts that follow the last pass, in the rows that were waiting for it."""
        going = [place for place in waiting if self._may_grow(draft, place)]
        places = [(place, offset) for place in going for offset in range(len(spans.get(place, [])) + 1)]
        states = draft.states[draft.exit_layer]
        candidates = self.head.candidates(
            torch.stack([states[place, len(draft.rows[place].tokens) + offset] for place, offset in places]),
            [rows[place].index for place, _ in places],
            [len(rows[place].tokens) + len(draft.rows[place].tokens) + offset for place, offset in places],
            with_confidence=self.stop_rule is not None,
        )
        for place in waiting:
            draft.rows[place].passed = len(draft.rows[place].tokens) + 1
        for entry, (place, offset) in enumerate(places):
            if offset == 0:
                self._extend(rows[place], draft, place, spans.get(place, []), candidates, entry)

    def _extend(
        self, row: Row, draft: Draft, place: int, span: Sequence[int], candidates: Candidates, first: int
    ) -> None:
        """Adds to a row's draft what the exit chose, from its `first`-th candidate on, as far as the copy holds."""
        drafted = draft.rows[place]
        for offset in range(len(span) + 1):
            entry = first + offset
            if not candidates.alive[entry]:
                return
            if candidates.sources is not None:
                drafted.sources.append(candidates.sources[entry])
            if not self._pays(draft.exit_layer, drafted, candidates, entry):
                return
            token = candidates.tokens[entry]
            self._write(row, len(drafted.tokens), [token])
            drafted.tokens.append(token)
            if offset == len(span) or token != span[offset]:
                return
            # It is the copied one, and has passed already.
            drafted.passed += 1
            if not self._may_grow(draft, place):
                return

    def _pays(self, exit_layer: int, drafted: RowDraft, candidates: Candidates, entry: int) -> bool:
        """Whether one more draft pays. The answer depends on what it would be drawn from, never on the token itself:
        a draft that is left out because of its own chance would change what is emitted."""
        if self.stop_rule is None:
            return True
        confidence = candidates.confidences[entry]
        # Of the drafts behind the next one nothing is known yet; they are taken to be as likely.
        following = self.stop_rule.chance(exit_layer, confidence)
        chance = drafted.chance * following
        drafted.confidences.append(confidence)
        if not self.stop_rule.goes_on(exit_layer, len(drafted.tokens), chance, following):
            drafted.left_out = candidates.tokens[entry]
            return False
        drafted.chance = chance
        return True

    def _write(self, row: Row, offset: int, tokens: Sequence[int]) -> None:
        """Shows processors the tokens of a row's draft from its `offset`-th on."""
        if self.transcript is not None and tokens:
            self.transcript.write(row.index, len(row.tokens) + offset, tokens)
