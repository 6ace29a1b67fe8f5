"""The decode loop: prefill, then rounds of drafting, verifying and accepting, for any number of rows at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from layerskip.decoding.choice import GreedyChoice, SampledChoice
from layerskip.decoding.processors import Processors
from layerskip.decoding.rows import Block, DecodeSettings, Past, Prompt, Row
from layerskip.decoding.transcript import Transcript
from layerskip.model.cache import Layers, SharedCache
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement


@dataclass(frozen=True)
class Scored:
    """The full model's output for one pass.

    Attributes:
        logits: `(rows, width, vocabulary)`, in the model's type.
        scores: what tokens are chosen from, in the same shape: processed, in fp32; without processors the logits.
    """

    logits: torch.Tensor
    scores: torch.Tensor


class DecodeLoop:
    """One generation call: its rows, its cache, and what is yet to do.

    Iterate over `blocks()` to run it; `rows` then holds the outcome, in the caller's order.
    """

    def __init__(
        self,
        model: LayeredModel,
        prompts: Sequence[Prompt],
        settings: DecodeSettings,
        *,
        choice: GreedyChoice | SampledChoice | None = None,
        transcript: Transcript | None = None,
        processors: Processors | None = None,
        draft_token_ids: torch.Tensor | None = None,
        past: Past | None = None,
    ) -> None:
        """Allocates the cache for all `prompts` (none of them empty); runs no layer yet.

        Args:
            choice: how tokens are chosen; greedily by default.
            transcript: what processors and criteria see; `None` where there are neither.
            processors: what turns logits into the scores that drafts and targets are chosen from.
            draft_token_ids: what drafts are chosen from, as `DraftHead.of` takes them; `None` for all tokens. They
                never touch what is emitted.
            past: what the cache holds already; the prompts are what follows.

        Raises:
            ValueError: a head of which no rows can be taken for drafts, or a past of other layers or rows.
        """
        self.model = model
        self.settings = settings
        self.prompts = prompts
        self.choice = GreedyChoice() if choice is None else choice
        self.transcript = transcript
        self.processors = processors
        held = [0] * len(prompts) if past is None else past.lengths
        self.rows = [Row(index, held[index] + len(prompt)) for index, prompt in enumerate(prompts)]
        self.active = list(self.rows)
        # Rows in the order of the cache's buffers: the active ones first.
        self.order = list(self.rows)
        budget = settings.stops.max_new_tokens
        self.seconds: Counter[str] = Counter()
        begin = time.perf_counter()
        # The last emitted token is never processed, so the last slot stays free: dead tokens go there.
        capacity = max(row.prompt_length for row in self.rows) + budget
        self.scratch = capacity - 1
        self.cache = SharedCache(settings.depth, len(prompts), capacity)
        if past is not None:
            self.cache.restore(past.layers, past.lengths)
        self.rotary = model.rotary_tables(capacity)
        self.draft_head = None if draft_token_ids is None else DraftHead.of(model, draft_token_ids)
        self._book(self.rows, other=time.perf_counter() - begin)

    def blocks(self) -> Iterator[list[Block]]:
        """Yields what prefill and then every round emitted, for the rows that were active in it."""
        yield self._prefill()
        while self.active:
            yield self._round()

    def kept(self) -> Layers:
        """Returns the keys and values of all tokens that have passed the layers, in the caller's order of rows."""
        return self.cache.kept(sorted(range(len(self.order)), key=lambda place: self.order[place].index))

    @torch.inference_mode()
    def _prefill(self) -> list[Block]:
        """Runs all layers over the prompts and emits each row's first token."""
        begin = time.perf_counter()
        rows = list(self.active)
        lengths = [len(prompt) for prompt in self.prompts]
        starts = [row.prompt_length - length for row, length in zip(rows, lengths, strict=True)]
        if any(starts):
            placement = Placement.of(starts, lengths, max(lengths), self.scratch, self.model.device)
        else:
            placement = Placement.prompt(lengths, self.model.device)
        hidden = self._run(self._embed_prompts(placement), 0, self.settings.depth, placement)
        last = torch.tensor(lengths, device=hidden.device) - 1
        states = hidden[torch.arange(len(lengths), device=hidden.device), last].unsqueeze(1)
        nothing: list[list[int]] = [[] for _ in rows]
        blocks = self._accept(nothing, self._score(states, nothing))
        self._roll_back()
        self._book(rows, prefill=time.perf_counter() - begin)
        return blocks

    def _embed_prompts(self, placement: Placement) -> torch.Tensor:
        """Returns the hidden state before layer 1 of all prompts, filled up to the longest, `(rows, width, hidden)`."""
        embedded = [prompt for prompt in self.prompts if isinstance(prompt, torch.Tensor)]
        if embedded:
            padded = torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True).to(self.model.device)
            return self.model.place(padded, placement.positions)
        return self._embed([[*prompt, *[0] * (placement.width - len(prompt))] for prompt in self.prompts], placement)

    @torch.inference_mode()
    def _round(self) -> list[Block]:
        """Drafts with the early layers, verifies with the rest, accepts, and rolls back to what is settled."""
        begin = time.perf_counter()
        rows = list(self.active)
        starts = [row.committed - 1 for row in rows]
        drafts, states = self._draft(starts)
        drafted = time.perf_counter()
        if max(map(len, drafts)) == len(states):
            # The last draft passes the early layers too: if all are accepted, its keys must be there.
            states.append(self._early_pass(starts, drafts, len(states)))
        live = [len(draft) + 1 for draft in drafts]
        placement = Placement.of(starts, live, len(states), self.scratch, self.model.device)
        hidden = states[0] if len(states) == 1 else torch.cat(states, dim=1)
        hidden = self._run(hidden, self.settings.exit_layer, self.settings.depth, placement)
        for row, draft in zip(rows, drafts, strict=True):
            row.tally.draft_tokens_processed += len(draft)
        scored = self._score(hidden, drafts)
        verified = time.perf_counter()
        blocks = self._accept(drafts, scored)
        self._roll_back()
        self._book(rows, draft=drafted - begin, verify=verified - drafted, other=time.perf_counter() - verified)
        return blocks

    def _draft(self, starts: list[int]) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Drafts with the early layers, token by token, from each row's last token on.

        Returns:
            The drafts of each row, and the exit states of every step, `(rows, 1, hidden)` each: those of the last
            token and of the drafts that others were drafted after, so that layers 1..E never see them again.
        """
        stops = self.settings.stops
        left = [stops.max_new_tokens - len(row.tokens) - 1 for row in self.active]
        drafts: list[list[int]] = [[] for _ in self.active]
        states: list[torch.Tensor] = []
        while True:
            step = len(states)
            drafting = [
                index
                for index, draft in enumerate(drafts)
                if len(draft) == step < min(self.settings.num_draft_tokens, left[index])
                and not (draft and draft[-1] in stops.eos_token_ids)
            ]
            if not drafting:
                return drafts, states
            states.append(self._early_pass(starts, drafts, step))
            for index, token in self._choose(states[-1], drafting, step).items():
                drafts[index].append(token)
                self._write(self.active[index], len(self.active[index].tokens) + step, [token])

    def _choose(self, hidden: torch.Tensor, drafting: list[int], step: int) -> dict[int, int]:
        """Returns the drafts that follow exit states `(rows, 1, hidden)`, by the row's place among the active ones.

        A row has none where the processors leave none of the tokens that can be drafted.
        """
        if self.processors is None and self.draft_head is not None and isinstance(self.choice, GreedyChoice):
            tokens = self.draft_head.choose(hidden)[:, 0].tolist()
            return {index: tokens[index] for index in drafting}
        logits = self.model.logits(hidden) if self.draft_head is None else self.draft_head.full_logits(hidden)
        if self.processors is None:
            tokens = self.choice.draft(logits[:, 0]).tolist()
            return {index: tokens[index] for index in drafting}
        scores = logits[:, 0].to(self.processors.device, torch.float32, copy=True)
        rows = [self.active[index] for index in drafting]
        counts = [len(row.tokens) + step for row in rows]
        processed, alive = self.processors(scores[drafting], [row.index for row in rows], counts)
        if self.draft_head is not None:
            # A processor may lift scores above −inf; what the head does not know stays out.
            processed = processed.masked_fill(scores[drafting] == -torch.inf, -torch.inf)
            alive = (processed > -torch.inf).any(-1)
        scores[drafting] = processed
        tokens, usable = torch.stack([self.choice.draft(scores)[drafting], alive.long()]).tolist()
        return {index: token for index, token, use in zip(drafting, tokens, usable, strict=True) if use}

    def _early_pass(self, starts: list[int], drafts: list[list[int]], step: int) -> torch.Tensor:
        """Runs layers 1..E over the `step`-th token of the round in each row that has one; the others' are dead.

        Returns:
            The exit states, `(rows, 1, hidden)`.
        """
        live = [int(len(draft) >= step) for draft in drafts]
        tokens = [
            [draft[step - 1] if step and alive else row.tokens[-1]]
            for row, draft, alive in zip(self.active, drafts, live, strict=True)
        ]
        positions = [start + min(step, len(draft) + 1) for start, draft in zip(starts, drafts, strict=True)]
        placement = Placement.of(positions, live, 1, self.scratch, self.model.device)
        return self._run(self._embed(tokens, placement), 0, self.settings.exit_layer, placement)

    def _embed(self, tokens: list[list[int]], placement: Placement) -> torch.Tensor:
        return self.model.embed(torch.tensor(tokens, device=self.model.device), placement.positions)

    def _run(self, hidden: torch.Tensor, start: int, stop: int, placement: Placement) -> torch.Tensor:
        """Runs a span of layers; counts early tokens where layer 1 runs, late ones where layer L does."""
        if start == stop:
            return hidden
        for row, live, padding in zip(self.active, placement.live, placement.padding, strict=True):
            if start == 0:
                row.tally.early_layer_tokens += live
                row.tally.padding_tokens += padding
            if stop == self.model.num_layers:
                row.tally.late_layer_tokens += live
        return self.model.run(hidden, start, stop, placement=placement, cache=self.cache, rotary=self.rotary)

    def _score(self, hidden: torch.Tensor, drafts: list[list[int]]) -> Scored:
        """Returns the full head's output for states `(rows, width, hidden)`: after the last token and every draft."""
        logits = self.model.logits(hidden)
        if self.processors is None:
            return Scored(logits, logits)
        places = [(index, offset) for index, draft in enumerate(drafts) for offset in range(len(draft) + 1)]
        index, offset = torch.tensor(places, device=self.processors.device).unbind(1)
        rows = [self.active[place] for place, _ in places]
        scores = logits.to(self.processors.device, torch.float32, copy=True)
        scores[index, offset], _ = self.processors(
            scores[index, offset],
            [row.index for row in rows],
            [len(row.tokens) + offset for row, (_, offset) in zip(rows, places, strict=True)],
        )
        return Scored(logits, scores)

    def _accept(self, drafts: list[list[int]], scored: Scored) -> list[Block]:
        """Settles what each row emits: its accepted drafts and the target that follows, cut at the first stop.

        Args:
            drafts: of each active row.
            scored: the full model's output after each row's last token and after each of its drafts.

        Raises:
            ValueError: a row goes on, and the processors leave no token to choose from.
        """
        blocks = []
        accepted, targets = self.choice.verify(scored.scores, drafts)
        for place, (row, draft, count, target) in enumerate(zip(self.active, drafts, accepted, targets, strict=True)):
            before = len(row.tokens)
            emitted = draft[:count] if target is None else [*draft[:count], target]
            # The transcript holds the drafts already.
            self._write(row, before + count, emitted[count:])
            for offset, token in enumerate(emitted):
                if self.processors is not None:
                    self.processors.require(row.index, before + offset)
                row.tokens.append(token)
                # Copies, since a view would keep the whole round's output alive.
                if self.settings.keep_scores:
                    row.scores.append(scored.scores[place, offset].to(torch.float32, copy=True))
                    row.shown.append(row.scores[-1].expand(len(self.rows), -1))
                if self.settings.keep_logits:
                    row.logits.append(scored.logits[place, offset].to(torch.float32, copy=True))
                shown = row.shown if self.settings.keep_scores else None
                row.finish_reason = self.settings.stops.reason(row.index, row.tokens, self.transcript, shown)
                if row.finish_reason is not None:
                    break
            if target is None and row.finish_reason is None:
                self._refuse(row)
            length = len(row.tokens) - before
            if self.transcript is not None:
                self.transcript.clear(row.index, len(row.tokens))
            kept = min(count, length)
            was_cut = length <= count
            if before:
                row.tally.outcomes[kept if was_cut else len(draft), kept] += 1
                row.tally.cut += was_cut
            row.tally.emitted += length
            flags = tuple(position < kept for position in range(length))
            blocks.append(Block(row.index, tuple(row.tokens[before:]), flags))
        return blocks

    def _refuse(self, row: Row) -> NoReturn:
        """Raises since nothing may follow a row that has not ended."""
        if self.processors is not None:
            self.processors.require(row.index, len(row.tokens))
        raise ValueError(
            f"no token is left to choose from for row {row.index} after {len(row.tokens)} new tokens: all scores are "
            "-inf, or one is NaN; loosen the logits processors, or look for NaN in the model's logits."
        )

    def _write(self, row: Row, start: int, tokens: list[int]) -> None:
        """Shows processors and criteria the new tokens of a row from its `start`-th on."""
        if self.transcript is not None:
            self.transcript.write(row.index, start, tokens)

    def _book(self, rows: list[Row], **seconds: float) -> None:
        """Books the time of a round's phases to the call and to every row that took part."""
        for counter in (self.seconds, *(row.tally.seconds for row in rows)):
            counter.update(seconds)

    def _roll_back(self) -> None:
        """Cuts the cache to what is settled, and moves finished rows behind the active ones."""
        self.cache.rollback([row.committed - 1 for row in self.active])
        left = len(self.active)
        for place in reversed(range(left)):
            if self.order[place].finish_reason is not None:
                left -= 1
                if place != left:
                    self.cache.swap(place, left)
                    self.order[place], self.order[left] = self.order[left], self.order[place]
        self.active = self.order[:left]
