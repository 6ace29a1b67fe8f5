"""The decode loop: prefill, then rounds of drafting, verifying and accepting, for any number of rows at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from layerskip.decoding.chain_rounds import ChainRounds
from layerskip.decoding.choice import GreedyChoice, SampledChoice
from layerskip.decoding.compiled import CompiledRounds
from layerskip.decoding.exit_head import ExitHead
from layerskip.decoding.graph_rounds import GraphRounds
from layerskip.decoding.ngrams import NgramIndex
from layerskip.decoding.passes import Passes
from layerskip.decoding.processors import Processors
from layerskip.decoding.rounds import Outcome, Rounds
from layerskip.decoding.rows import Block, DecodeSettings, Past, Prompt, Row
from layerskip.decoding.transcript import Transcript
from layerskip.decoding.tree_rounds import TreeRounds
from layerskip.model.cache import Layers, SharedCache
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement

# At most so many tokens of a single prompt pass the layers at once where these need a mask, which would else grow with
# the square of its length.
PIECE = 512


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
        compiled: CompiledRounds | None = None,
    ) -> None:
        """Allocates the cache for all `prompts` (none of them empty); runs no layer yet.

        Args:
            choice: how tokens are chosen; greedily by default.
            transcript: what processors and criteria see; `None` where there are neither.
            processors: what turns logits into the scores that drafts and targets are chosen from.
            draft_token_ids: what drafts are chosen from, as `DraftHead.of` takes them; `None` for all tokens. They
                never touch what is emitted.
            past: what the cache holds already; the prompts are what follows.
            compiled: graphs that run the rounds of one row, in their own cache, which has room for prompt and budget.

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
        nodes = 0 if settings.tree_nodes is None else settings.tree_nodes
        self.compiled = compiled
        if compiled is None:
            self.cache = SharedCache(settings.depth, len(prompts), capacity + nodes)
            rotary, scratch = model.rotary_tables(capacity), capacity - 1
        else:
            compiled.reset()
            self.cache, rotary, scratch = compiled.cache, compiled.rotary, compiled.scratch
        if past is not None:
            self.cache.restore(past.layers, past.lengths)
        self.passes = Passes(model, self.cache, rotary, scratch)
        draft_head = None if draft_token_ids is None else DraftHead.of(model, draft_token_ids)
        self.head = ExitHead(model, draft_head, self.choice, processors)
        self.copies = _texts(prompts, past) if settings.copies_ngrams or settings.trusts_copies else None
        self.chain = ChainRounds(self.passes, self.head, settings, transcript=transcript, copies=self.copies)
        self.rounds: Rounds = self.chain
        if settings.tree_nodes is not None:
            self.rounds = TreeRounds(self.passes, self.head, settings, settings.tree_nodes)
        if compiled is not None:
            self.rounds = GraphRounds(compiled, settings)
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
        prompts = list(self.prompts)
        starts = [row.prompt_length - len(prompt) for row, prompt in zip(rows, prompts, strict=True)]
        if len(rows) == 1:
            while len(prompts[0]) > PIECE and self.model.masks(starts[0], len(prompts[0])):
                placement = self._place(starts, [PIECE])
                embedded = self._embed([prompts[0][:PIECE]], placement)
                self.passes.run(rows, embedded, 0, self.settings.depth, placement)
                prompts, starts = [prompts[0][PIECE:]], [starts[0] + PIECE]
        placement = self._place(starts, [len(prompt) for prompt in prompts])
        outcome = self.chain.prefill(rows, self._embed(prompts, placement), placement)
        blocks = self._settle(outcome)
        self._roll_back()
        self._book(rows, prefill=time.perf_counter() - begin)
        if self.compiled is not None and self.active:
            self._book(rows, compile=self.compiled.prepare())
        return blocks

    def _place(self, starts: list[int], lengths: list[int]) -> Placement:
        """Returns where prompts of these lengths stand behind what the cache holds."""
        if any(starts):
            return self.passes.place(starts, lengths, max(lengths))
        return Placement.prompt(lengths, self.model.device)

    def _embed(self, prompts: Sequence[Prompt], placement: Placement) -> torch.Tensor:
        """Returns the hidden state before layer 1 of prompts, filled up to the longest, `(rows, width, hidden)`."""
        embedded = [prompt for prompt in prompts if isinstance(prompt, torch.Tensor)]
        if embedded:
            padded = torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True).to(self.model.device)
            return self.model.place(padded, placement.positions)
        filled = [[*prompt, *[0] * (placement.width - len(prompt))] for prompt in prompts]
        return self.passes.embed(filled, placement)

    @torch.inference_mode()
    def _round(self) -> list[Block]:
        """Drafts with the early layers, verifies with the rest, accepts, and rolls back to what is settled."""
        begin = time.perf_counter()
        rows = list(self.active)
        outcome = self.rounds.run(rows)
        verified = time.perf_counter()
        blocks = self._settle(outcome)
        self._roll_back()
        drafted = outcome.drafted_at
        self._book(rows, draft=drafted - begin, verify=verified - drafted, other=time.perf_counter() - verified)
        return blocks

    def _settle(self, outcome: Outcome) -> list[Block]:
        """Emits for each active row its accepted drafts and the target that follows, cut at the first stop.

        Raises:
            ValueError: a row goes on, and the processors leave no token to choose from.
        """
        blocks = []
        for place, (row, verdict) in enumerate(zip(self.active, outcome.verdicts, strict=True)):
            before, count = len(row.tokens), len(verdict.accepted)
            emitted = verdict.accepted if verdict.target is None else [*verdict.accepted, verdict.target]
            if self.transcript is not None:
                self.transcript.write(row.index, before, emitted)
            for token, offset in zip(emitted, verdict.places, strict=False):
                if self.processors is not None:
                    self.processors.require(row.index, len(row.tokens))
                row.tokens.append(token)
                # Copies, since a view would keep the whole round's output alive.
                if self.settings.keep_scores and outcome.scored is not None:
                    row.scores.append(outcome.scored.scores[place, offset].to(torch.float32, copy=True))
                    row.shown.append(row.scores[-1].expand(len(self.rows), -1))
                if self.settings.keep_logits and outcome.scored is not None:
                    row.logits.append(outcome.scored.logits[place, offset].to(torch.float32, copy=True))
                shown = row.shown if self.settings.keep_scores else None
                row.finish_reason = self.settings.stops.reason(row.index, row.tokens, self.transcript, shown)
                if row.finish_reason is not None:
                    break
            if verdict.target is None and row.finish_reason is None:
                self._refuse(row)
            length = len(row.tokens) - before
            if self.transcript is not None:
                self.transcript.clear(row.index, len(row.tokens))
            if self.copies is not None:
                self.copies[row.index].extend(row.tokens[before:])
            kept = min(count, length)
            was_cut = length <= count
            if before:
                row.tally.outcomes[kept if was_cut else verdict.drafted, kept] += 1
                row.tally.work[outcome.exit_layer, outcome.steps, verdict.verified] += 1
                row.tally.draft_tokens_verified += verdict.verified
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


def _texts(prompts: Sequence[Prompt], past: Past | None) -> list[NgramIndex]:
    """Returns the text of each row, as far as its tokens are known, to copy from."""
    texts = []
    for row, prompt in enumerate(prompts):
        text = NgramIndex(() if past is None or past.token_ids is None else past.token_ids[row])
        if isinstance(prompt, torch.Tensor):
            # Embeddings tell no tokens, and what stands before them does not lead to what follows.
            text = NgramIndex()
        else:
            text.extend(prompt)
        texts.append(text)
    return texts
