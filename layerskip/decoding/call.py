"""One generation call: made ready from what `generate` hands over, then run to its end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.stopping_criteria import StopStringCriteria

from layerskip.decoding.choice import GreedyChoice, SampledChoice
from layerskip.decoding.compiled import CompiledSettings, rounded_capacity
from layerskip.decoding.graph_rounds import GraphPool, Loan
from layerskip.decoding.handover import Handover, PromptColumns
from layerskip.decoding.loop import DecodeLoop
from layerskip.decoding.options import GenerationOptions
from layerskip.decoding.plan import ADAPTIVE, AUTO, CHECKED, TRUSTED, Plan
from layerskip.decoding.processors import Processors
from layerskip.decoding.ranks import check_criteria, share_random_state
from layerskip.decoding.result import GenerationResult, StreamEvent
from layerskip.decoding.rows import DecodeSettings
from layerskip.decoding.state import Watch
from layerskip.decoding.stopping import Stops
from layerskip.decoding.text import GrowingText
from layerskip.decoding.transcript import Transcript
from layerskip.model.cache import CachedTokens
from layerskip.model.layered import LayeredModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True, eq=False)
class Call:
    """A prepared call; nothing has run yet.

    Attributes:
        loop: what runs.
        plan: how it decodes.
        options: what of its settings is left.
        shown: the prompts as they come back in `sequences`, `(rows, tokens)`.
        tokenizer: for the result as text.
        cached_prompts: the token ids of each row's prompt, where the result is to carry what the call has cached.
        watches: stopping criteria that must not have changed at the end.
        loan: the graphs that run its rounds; free for others once the call is dropped.
    """

    loop: DecodeLoop
    plan: Plan
    options: GenerationOptions
    shown: torch.Tensor
    tokenizer: PreTrainedTokenizerBase | None = None
    cached_prompts: Sequence[Sequence[int]] | None = None
    watches: tuple[Watch, ...] = ()
    loan: Loan | None = None

    @classmethod
    def prepare(
        cls,
        layered: LayeredModel,
        plan: Plan,
        handover: Handover,
        columns: PromptColumns,
        *,
        shown: torch.Tensor | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_token_ids: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        stop_strings: str | Sequence[str] | None = None,
        cached_prompts: Sequence[Sequence[int]] | None = None,
        graphs: GraphPool,
    ) -> Call:
        """Returns a call that is ready to run.

        Args:
            handover: settings, processors and criteria.
            columns: the prompts that the handover holds, or what a cache leaves of them.
            shown: the prompts as they come back in `sequences`, where not as `generate` shows them.
            generator: for sampling; torch's global one by default.
            stop_strings: further stop strings, which need the tokenizer.
            graphs: where compiled rounds come from.

        Raises:
            TypeError, ValueError: anything that cannot be done as asked.
        """
        options = GenerationOptions.of(handover.config)
        width = handover.input_ids.shape[1]
        criteria = [*handover.criteria, *_stop_string_criteria(stop_strings, tokenizer)]
        stops = Stops.of(criteria, width)
        check_criteria(layered.model, stops.criteria)
        rows = len(columns.prompts)
        if rows > 1 and stops.ends_rows_early and options.pad_token_id is None:
            raise ValueError(
                "pad_token_id=None, but rows may end at different lengths, and something must fill them up; pass "
                "pad_token_id=…."
            )
        if generator is not None:
            if not isinstance(generator, torch.Generator):
                raise TypeError(f"generator is a {type(generator).__name__}, not a torch.Generator.")
            if not options.do_sample:
                raise ValueError("generator has no effect on greedy decoding; pass do_sample=True, or leave it out.")
        held = (0,) * rows if columns.past is None else columns.past.lengths
        longest = max(length + len(prompt) for length, prompt in zip(held, columns.prompts, strict=True))
        made = [length or len(prompt) for length, prompt in zip(held, columns.prompts, strict=True)]
        if columns.past is not None:
            # All that the cache held, of which the prompts may share less.
            made.append(columns.past.layers[0][0].shape[2])
        layered.check_length(longest + stops.max_new_tokens, made)
        transcript, processors = None, None
        if handover.processors or stops.criteria:
            pad = 0 if options.pad_token_id is None else options.pad_token_id
            transcript = Transcript(handover.input_ids, stops.max_new_tokens, pad)
            processors = Processors(handover.processors, transcript) if handover.processors else None
        plan.check_choice(
            is_sampled=options.do_sample,
            has_processors=bool(handover.processors),
            keeps_scores=options.output_scores or options.output_logits,
            rows=rows,
        )
        settings = DecodeSettings(
            exit_layer=plan.exit_layer if isinstance(plan.exit_layer, int) else layered.num_layers,
            depth=plan.depth(layered.num_layers),
            num_draft_tokens=0 if plan.num_draft_tokens is None else plan.num_draft_tokens,
            stops=stops,
            keep_scores=options.output_scores,
            keep_logits=options.output_logits,
            chooses_exit=plan.exit_layer == AUTO,
            stops_drafts_early=plan.draft_stop == ADAPTIVE,
            copies_ngrams=plan.copy_ngrams == CHECKED,
            trusts_copies=plan.copy_ngrams == TRUSTED,
            tree_nodes=plan.tree_nodes,
            costs=plan.costs,
        )
        loan = None
        if plan.compile:
            ids = None if draft_token_ids is None else tuple(draft_token_ids.tolist())
            loan = graphs.take(
                layered,
                CompiledSettings(
                    settings.exit_layer,
                    settings.depth,
                    settings.num_draft_tokens,
                    rounded_capacity(layered, longest + stops.max_new_tokens),
                    ids,
                    stops.eos_token_ids,
                ),
            )
        loop = DecodeLoop(
            layered,
            columns.prompts,
            settings,
            choice=SampledChoice(generator) if options.do_sample else GreedyChoice(),
            transcript=transcript,
            processors=processors,
            draft_token_ids=draft_token_ids,
            past=columns.past,
            compiled=None if loan is None else loan.graphs,
        )
        if options.do_sample:
            share_random_state(layered.model, generator)
        return cls(
            loop,
            plan,
            options,
            handover.input_ids if shown is None else shown,
            tokenizer,
            cached_prompts,
            stops.watches() if rows > 1 else (),
            loan,
        )

    def run(self, streamer: BaseStreamer | None = None) -> GenerationResult:
        """Runs to the end and returns the result.

        Args:
            streamer: gets the prompt, then what each round emits, in one `put` each, then `end()`.

        Raises:
            ValueError: a streamer for several rows, before anything runs.
        """
        rows = len(self.loop.rows)
        if streamer is not None and rows > 1:
            raise ValueError(f"streamer takes the tokens of one row, and there are {rows}; stream one at a time.")
        try:
            if streamer is not None:
                streamer.put(self.shown.cpu())
            for blocks in self.loop.blocks():
                if streamer is not None:
                    streamer.put(torch.tensor(blocks[0].token_ids))
            if streamer is not None:
                streamer.end()
            return self.result()
        except BaseException:
            self._end_loan()
            raise

    def events(self) -> Iterator[StreamEvent]:
        """Runs a call of one row and yields an event a round; the last one carries the result."""
        text = None if self.tokenizer is None else GrowingText(self.tokenizer)
        try:
            for [block] in self.loop.blocks():
                piece = "" if text is None else text.add(block.token_ids)
                if self.loop.active:
                    yield StreamEvent(piece, block.token_ids, block.accepted)
                else:
                    piece += "" if text is None else text.finish()
                    result = self.result()
                    self._end_loan()
                    yield StreamEvent(piece, block.token_ids, block.accepted, result)
        finally:
            self._end_loan()

    def _end_loan(self) -> None:
        """Gives back the graphs; a traceback, or an iterator, may keep the call for as long as somebody holds it."""
        if self.loan is not None:
            self.loan.is_over = True

    def result(self) -> GenerationResult:
        """Returns the result of a call that has run to its end.

        Raises:
            ValueError: a function of the caller's own has changed, so that tokens may be wrong.
        """
        if self.loop.processors is not None:
            self.loop.processors.check_unchanged()
        for watch in self.watches:
            watch.check()
        cache = None
        if self.cached_prompts is not None:
            held = zip(self.cached_prompts, self.loop.rows, strict=True)
            token_ids = tuple((*prompt, *row.tokens[:-1]) for prompt, row in held)
            cache = CachedTokens(token_ids, self.loop.kept(), weakref.ref(self.loop.model.model))
        return GenerationResult.of(self.loop, self.shown, self.plan, self.options, self.tokenizer, cache)


def _stop_string_criteria(
    stop_strings: str | Sequence[str] | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[Any]:
    """Returns the criterion for stop strings, if there are any."""
    if stop_strings is None:
        return []
    strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    is_list = isinstance(strings, list | tuple) and bool(strings)
    if not is_list or not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop_strings={stop_strings!r} must be a string or a list of strings, none of them empty.")
    if tokenizer is None:
        raise ValueError(
            f"stop_strings={stop_strings!r} need a tokenizer, and there is none; pass Engine(model, tokenizer)."
        )
    try:
        return [StopStringCriteria(tokenizer, list(strings))]
    except ValueError as error:
        raise ValueError(f"stop_strings={stop_strings!r} cannot be found with this tokenizer: {error}.") from error
