"""The engine: a model, a tokenizer, and how to decode with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from layerskip.decoding.call import Call
from layerskip.decoding.cost import CostTable
from layerskip.decoding.graph_rounds import GraphPool
from layerskip.decoding.handover import Handover, behind_cache, read_columns
from layerskip.decoding.options import GenerationOptions, check_config, merged_config, token_ids, with_values
from layerskip.decoding.plan import NAMES, Limits, Plan, Wishes, make_plan
from layerskip.decoding.prompts import inferred_mask, read_prompts
from layerskip.decoding.result import GenerationResult, StreamEvent
from layerskip.model.cache import CachedTokens
from layerskip.model.draft_head import check_draft_token_ids
from layerskip.model.layered import LayeredModel
from layerskip.model.metadata import Metadata
from layerskip.model.peft_models import causal_lm_beneath
from layerskip.model.readiness import check_layers, check_ready

if TYPE_CHECKING:
    from peft import PeftMixedModel, PeftModel
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation.streamers import BaseStreamer


class Engine:
    """Generates with one causal language model that drafts with its early layers and verifies with the rest.

    The model stays the caller's: nothing in it is replaced, renamed or switched. Of a PEFT model the attribute `model`
    is the causal LM beneath, in whose modules its adapters stand; `disable_adapter` and `set_adapter` bear on the next
    call.

    Example:
        >>> engine = Engine(model, tokenizer, exit_layer=8)
        >>> engine.generate("The capital of France is", max_new_tokens=32).texts[0]
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | PeftMixedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        exit_layer: int | str | None = None,
        num_draft_tokens: int | None = None,
        draft_vocab_size: int | None = None,
        draft_stop: str | None = None,
        copy_ngrams: str | None = None,
        tree_nodes: int | None = None,
        compile: bool | None = None,
        draft_token_ids: torch.Tensor | None = None,
        cost_table: CostTable | None = None,
        graphs: GraphPool | None = None,
    ) -> None:
        """Makes an engine for `model`.

        Args:
            model: a transformers causal LM of a supported family, or a PEFT model around one, in eval mode when it
                generates.
            tokenizer: for prompts and results as text.
            exit_layer: E, how many layers a draft runs, 1 to L − 1; "auto" chooses among the exits of the cost table
                before every round, or plain decoding where none pays. By default the checkpoint's.
            num_draft_tokens: γ, at most how many tokens a round drafts, of a tree its depth; by default the
                checkpoint's, else 4; where rounds are decided by cost, as many as the cost table knows.
            draft_vocab_size: how many of `draft_token_ids`, from the first on, can be drafted, so that drafting reads
                only these rows of the head; the model's vocabulary size for the full head. By default the
                checkpoint's, else all of `draft_token_ids`, else the full head. Verification always has the full
                head, so that the output is the same.
            draft_stop: "static" drafts γ tokens; "adaptive" ends a draft where one more no longer pays, by the cost
                table and by what the call has shown so far.
            copy_ngrams: what followed the last few tokens before, in prompt or answer, is copied. "checked": it passes
                the early layers at once, and the exit cuts it where it disagrees, so that drafts come cheaper but stay
                the same. "trusted": it is drafted as it stands, and the full model alone judges it, which pays where
                answers repeat their prompts. "off" by default.
            tree_nodes: draft a tree of at most so many likely tokens instead of a chain; greedy decoding only.
            compile: compile rounds with torch.compile, for one row and greedy decoding without processors. The first
                call of a kind takes a minute or so for that.
            draft_token_ids: the tokens that are worth drafting, `(ids,)`, the most important first.
            cost_table: what rounds cost on this machine, see `layerskip.comparison.latency.measure_costs`; by default
                the checkpoint's. It bears on speed alone, and is taken as it stands: for batches pass one that was
                measured with as many rows, for long texts one of such a context. The ranks of a tensor parallel model
                need the same one.
            graphs: compiled rounds that are shared with other engines for the same model; its own by default.

        Raises:
            ValueError: a model, adapters or quantised weights that are not supported, a number out of range, options
                that do not go together, or token ids that the model does not have or that occur twice.
            TypeError: `model` is no transformers model, `tokenizer` no tokenizer, a number is no integer, or
                `draft_token_ids` no tensor.
        """
        if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(
                f"tokenizer is a {type(tokenizer).__name__}; pass what AutoTokenizer.from_pretrained(…) returns."
            )
        if not isinstance(cost_table, CostTable | None):
            raise TypeError(
                f"cost_table is a {type(cost_table).__name__}; pass a CostTable, such as CostTable.read makes of JSON."
            )
        self.model = causal_lm_beneath(model)
        self.tokenizer = tokenizer
        layered = self.layered
        check_layers(self.model)
        self.metadata = Metadata.of(self.model.config)
        ids = None if draft_token_ids is None else check_draft_token_ids(draft_token_ids, layered.vocab_size)
        self._draft_token_ids = ids
        # Sorted once for calls of any draft_vocab_size: the ids in ascending order, and the rank of each.
        self._ranked_ids = None if ids is None else ids.sort()
        self.exit_layer = exit_layer
        self.num_draft_tokens = num_draft_tokens
        self.draft_vocab_size = draft_vocab_size
        self.draft_stop = draft_stop
        self.copy_ngrams = copy_ngrams
        self.tree_nodes = tree_nodes
        self.compile = compile
        self._cost_table = cost_table
        self._graphs = GraphPool() if graphs is None else graphs
        self._wishes.checked(self._limits(layered))

    def generate(
        self,
        prompts: Any,
        *,
        attention_mask: torch.Tensor | None = None,
        strategy: str = "self_speculative",
        exit_layer: int | str | None = None,
        num_draft_tokens: int | None = None,
        draft_vocab_size: int | None = None,
        draft_stop: str | None = None,
        copy_ngrams: str | None = None,
        tree_nodes: int | None = None,
        compile: bool | None = None,
        cache: CachedTokens | None = None,
        return_cache: bool = False,
        generator: torch.Generator | None = None,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
        streamer: BaseStreamer | None = None,
        generation_config: GenerationConfig | None = None,
        **arguments: Any,
    ) -> GenerationResult:
        """Generates a continuation of every prompt.

        Args:
            prompts: a string (tokenised as it stands), a list of messages (through the chat template), a list of
                either, or token ids `(batch, tokens)`.
            attention_mask: `(batch, tokens)` beside token ids: 0 for padding, which may stand on either side.
            strategy: "self_speculative" drafts with layers 1..E and verifies with the rest; "autoregressive" runs
                all layers for every token; "early_exit" answers from layers 1..E alone, which is another, worse model.
            exit_layer, num_draft_tokens, draft_vocab_size, draft_stop, copy_ngrams, tree_nodes, compile: for this
                call; see `Engine`.
            cache: the `cache` of an earlier result of this model, for a conversation: the prompts are the whole
                conversation so far, and what the cache holds of their beginnings is not processed again.
            return_cache: give the result a `cache`.
            generator: for `do_sample=True`, in place of torch's global generator; makes the call repeatable. The ranks
                of a tensor parallel model all draw from the first one's.
            logits_processor: further logits processors, each a function of (ids, scores) alone, since it sees drafts as
                well, in every row as `generate` shows it, padded on the left. One that changes at its first call is
                refused.
            stopping_criteria: further stopping criteria, asked token by token; in a batch each returns one value for
                each row.
            prefix_allowed_tokens_fn: a function of a row's index and its ids alone: the tokens that may follow.
            streamer: a transformers streamer, for one prompt: gets the prompt, then what each round emits at once.
            generation_config: settings of this call; the model's own fill what is left open.
            **arguments: single fields of `GenerationConfig`, such as `max_new_tokens`; they override both.

        Returns:
            A `GenerationResult`. Greedy tokens are those of `model.generate(do_sample=False)`: equal in fp32; in
            bf16 and fp16 up to ties that rounding decides. Sampled tokens are distributed as the full model's own.

        Raises:
            TypeError, ValueError: anything that cannot be done as asked, before any layer runs; later only for what the
                caller's own functions do or return.
        """
        call = self._prepare(
            prompts,
            attention_mask=attention_mask,
            strategy=strategy,
            exit_layer=exit_layer,
            num_draft_tokens=num_draft_tokens,
            draft_vocab_size=draft_vocab_size,
            draft_stop=draft_stop,
            copy_ngrams=copy_ngrams,
            tree_nodes=tree_nodes,
            compile=compile,
            cache=cache,
            return_cache=return_cache,
            generator=generator,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            generation_config=generation_config,
            **arguments,
        )
        return call.run(streamer)

    def stream(self, prompt: Any, **arguments: Any) -> Iterator[StreamEvent]:
        """Generates one row and yields what prefill and then every round emits, as soon as it is settled.

        Args:
            prompt: as `generate` takes it, one.
            **arguments: of `generate`, all but `streamer`.

        Returns:
            An iterator over events. Their texts add up to the text of the result, which the last event carries.

        Raises:
            TypeError, ValueError: as `generate`, at the call itself; and for more than one row.
        """
        call = self._prepare(prompt, **arguments)
        if len(call.loop.rows) != 1:
            raise ValueError(f"stream takes one prompt and gives one row, not {len(call.loop.rows)}; use generate.")
        return call.events()

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """The tokens that are worth drafting, `(ids,)`, the most important first; `None` without a list."""
        return self._draft_token_ids

    @property
    def cost_table(self) -> CostTable | None:
        """What rounds cost: as passed, or where the checkpoint's exits were compared; `None` where nobody says.

        Raises:
            ValueError: the checkpoint's is damaged.
        """
        stored = self.metadata.cost_table
        if self._cost_table is not None or stored is None:
            return self._cost_table
        return CostTable.read(stored, "the checkpoint's cost_table")

    def plan(self, strategy: str, wishes: Wishes) -> Plan:
        """Returns how a call with this strategy and these wishes decodes: what they leave open is filled in.

        Raises:
            TypeError, ValueError: what the call would refuse.
        """
        return make_plan(
            strategy,
            wishes,
            engine=self._wishes,
            metadata=self.metadata,
            limits=self._limits(self.layered),
            costs=lambda: self.cost_table,
        )

    @property
    def layered(self) -> LayeredModel:
        """The model as it is now, runnable in spans of layers; made anew, since its modules may be exchanged.

        Raises:
            TypeError, ValueError: a model that is not supported.
        """
        return LayeredModel(self.model)

    @property
    def _wishes(self) -> Wishes:
        return Wishes(**{name: getattr(self, name) for name in NAMES})

    def _limits(self, layered: LayeredModel) -> Limits:
        ids = 0 if self.draft_token_ids is None else len(self.draft_token_ids)
        return Limits(layered.num_layers, layered.vocab_size, ids)

    def drafted_token_ids(self, plan: Plan) -> torch.Tensor | None:
        """Returns the tokens that a plan drafts from, `(ids,)`, ascending; `None` for all of them."""
        if plan.draft_vocab_size is None or self._ranked_ids is None:
            return None
        ascending, ranks = self._ranked_ids
        return ascending[ranks < plan.draft_vocab_size]

    def _prepare(
        self,
        prompts: Any,
        *,
        attention_mask: torch.Tensor | None = None,
        strategy: str = "self_speculative",
        cache: CachedTokens | None = None,
        return_cache: bool = False,
        generator: torch.Generator | None = None,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
        generation_config: GenerationConfig | None = None,
        **arguments: Any,
    ) -> Call:
        """Checks everything a caller may get wrong and returns a call that is ready to run."""
        layered = self.layered
        wishes = {name: arguments.pop(name) for name in NAMES if name in arguments}
        plan = self.plan(strategy, Wishes(**wishes))
        check_ready(self.model)
        # `None` leaves these open, as in `generate`.
        open_if_none = ("max_length", "min_length", "num_beams", "num_return_sequences")
        arguments = {name: value for name, value in arguments.items() if value is not None or name not in open_if_none}
        for name, functions in (("logits_processor", logits_processor), ("stopping_criteria", stopping_criteria)):
            if not isinstance(functions, list | tuple | None):
                raise TypeError(f"{name} is a {type(functions).__name__}; pass a list of them.")
        if arguments.get("return_dict_in_generate") is False:
            raise ValueError(
                "return_dict_in_generate=False has no effect, since the engine's results always carry all; leave "
                "it out."
            )
        check_config(generation_config)
        # transformers warns about outputs that are asked for without it.
        generation_config, arguments = with_values(generation_config, arguments, return_dict_in_generate=True)
        read = read_prompts(prompts, self.tokenizer, attention_mask, layered.vocab_size)
        config = merged_config(self.model, generation_config, arguments)
        pad = GenerationOptions.of(config).pad_token_id
        if attention_mask is None and read.padded is not None:
            eos_token_ids = frozenset(token_ids("eos_token_id", config.eos_token_id))
            mask = inferred_mask(read.padded, pad, eos_token_ids)
            read = read_prompts(prompts, self.tokenizer, mask, layered.vocab_size)
        # `generate` would look for a tokenizer if it saw stop strings, and drop the one that it is given.
        generation_config, arguments = with_values(generation_config, arguments, pad_token_id=pad, stop_strings=None)
        if self.model.generation_config.stop_strings is not None:
            # Only an argument overrides the model's own.
            arguments = {**arguments, "stop_strings": None}
        ids, mask = read.left_padded(0 if pad is None else pad, layered.device)
        generate: Any = self.model.generate
        handover = generate(
            ids,
            attention_mask=mask,
            generation_config=generation_config,
            custom_generate=Handover.take,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            **arguments,
        )
        columns = read_columns(layered, handover)
        copies = len(columns.prompts) // len(read.rows)
        rows = [row for row in read.rows for _ in range(copies)]
        if cache is not None:
            columns = behind_cache(columns, rows, cache, self.model, plan.depth(layered.num_layers))
        return Call.prepare(
            layered,
            plan,
            handover,
            columns,
            shown=read.tensor(pad).repeat_interleave(copies, dim=0),
            tokenizer=self.tokenizer,
            draft_token_ids=self.drafted_token_ids(plan),
            generator=generator,
            stop_strings=config.stop_strings,
            cached_prompts=rows if return_cache else None,
            graphs=self._graphs,
        )
