"""Self-speculative decoding behind `model.generate(..., custom_generate=…)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import ModelOutput

from layerskip.decoding.call import Call
from layerskip.decoding.cost import CostTable
from layerskip.decoding.engine import Engine
from layerskip.decoding.graph_rounds import GraphPool
from layerskip.decoding.handover import Handover, PromptColumns, read_columns
from layerskip.decoding.options import check_supported
from layerskip.decoding.plan import Wishes
from layerskip.decoding.statistics import Statistics
from layerskip.model.dynamic_cache import write_dynamic_cache
from layerskip.model.readiness import check_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache
    from transformers.generation.streamers import BaseStreamer


@dataclass
class SelfSpeculativeOutput(ModelOutput):
    """What `generate` returns with `return_dict_in_generate=True`: its own fields, and what the call did.

    Attributes:
        sequences: `(rows, tokens)`: prompts and new tokens; rows that finished early are filled with the padding token.
        scores: with `output_scores=True`, for each step the processed scores `(rows, vocabulary)` in fp32; zeros for
            rows that had finished.
        logits: with `output_logits=True`, the same before processing.
        attentions, hidden_states: always `None`, since `generate` is refused where it is asked for them.
        cache: a DynamicCache in `generate`'s layout, to go on from; `None` where prompts are padded on the right. It
            lacks the last token of a row that ended before others, so that only the others can go on.
        finish_reasons: "stop", "length" or "criteria", for each row.
        statistics: counted work, acceptance and time.
    """

    sequences: torch.Tensor | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    attentions: None = None
    hidden_states: None = None
    cache: Cache | None = None
    finish_reasons: list[str] | None = None
    statistics: Statistics | None = None


def self_speculative(
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
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | Sequence[str] | None = None,
    generator: torch.Generator | None = None,
) -> Callable[..., torch.Tensor | SelfSpeculativeOutput]:
    """Returns a function for the argument `custom_generate` of a model's `generate`.

    All that `generate` prepares is followed: its GenerationConfig and arguments, logits processors, stopping criteria,
    masks, `inputs_embeds`, a DynamicCache of an earlier call (which is read, not changed: go on with the output's).
    What cannot be done is refused by name: beams, guidance, prompt lookup, `output_attentions`,
    `output_hidden_states`, static and other caches, `use_cache=False`. Finished rows are filled up with the padding
    token, also where a stopping criterion has ended them. A PEFT model's `generate` takes it as well, its adapters on.

    `generate` keeps some of its arguments to itself. `streamer=`, `tokenizer=`, `assistant_model=` and `synced_gpus=`
    given to it never arrive here and have no effect, except that such a streamer gets the prompt and then nothing, not
    even its end. With `stop_strings=`, or such strings in the model's `generation_config` (pass `stop_strings=None`
    then), it raises for want of the tokenizer that it dropped. Streamer, tokenizer and stop strings are therefore
    arguments of this function.

    Processors are shown the ids as `generate` shows them, also where rows are padded on the right.

    Example:
        >>> model.generate(**inputs, custom_generate=layerskip.self_speculative(exit_layer=8), max_new_tokens=64)

    Args:
        exit_layer, num_draft_tokens, draft_vocab_size, cost_table: as `Engine` takes them, by default the checkpoint's.
        draft_stop, copy_ngrams, tree_nodes, compile: likewise, off by default. Compiled rounds are kept for further
            calls as long as the function lives, and the models with them.
        draft_token_ids: the tokens that are worth drafting, `(ids,)`, the most important first.
        streamer: a transformers streamer, for one row: gets the prompt, then what each round emits at once.
        tokenizer: to find `stop_strings` in tokens.
        stop_strings: strings that end a row as soon as they are complete.
        generator: for `do_sample=True`, in place of torch's global generator; the ranks of a tensor parallel model all
            draw from the first one's.

    Returns:
        A function that `generate` calls. It returns `sequences`, or a `SelfSpeculativeOutput` with
        `return_dict_in_generate=True`; it raises TypeError or ValueError for anything that cannot be done as asked,
        before any layer runs, and later only for what the caller's own functions do or return.

    Raises:
        ValueError: stop strings without a tokenizer.
    """
    if stop_strings is not None and tokenizer is None:
        raise ValueError(f"stop_strings={stop_strings!r} need a tokenizer to be found in tokens; pass tokenizer=….")

    # For all calls of the function.
    graphs = GraphPool()

    def decode(model: PreTrainedModel, *arguments: Any, **keywords: Any) -> torch.Tensor | SelfSpeculativeOutput:
        engine = Engine(
            model,
            tokenizer,
            exit_layer=exit_layer,
            num_draft_tokens=num_draft_tokens,
            draft_vocab_size=draft_vocab_size,
            draft_stop=draft_stop,
            copy_ngrams=copy_ngrams,
            tree_nodes=tree_nodes,
            compile=compile,
            draft_token_ids=draft_token_ids,
            cost_table=cost_table,
            graphs=graphs,
        )
        plan = engine.plan("self_speculative", Wishes())
        # The engine has looked at the layers.
        check_mode(model)
        handover = Handover.take(model, *arguments, **keywords)
        check_supported(handover.config)
        layered = engine.layered
        columns = read_columns(layered, handover)
        call = Call.prepare(
            layered,
            plan,
            handover,
            columns,
            tokenizer=tokenizer,
            draft_token_ids=engine.drafted_token_ids(plan),
            generator=generator,
            stop_strings=stop_strings,
            graphs=graphs,
        )
        result = call.run(streamer)
        if not handover.config.return_dict_in_generate:
            return result.sequences
        return SelfSpeculativeOutput(
            sequences=result.sequences,
            scores=result.scores,
            logits=result.logits,
            cache=_dynamic_cache(call, columns, model) if columns.are_left_padded else None,
            finish_reasons=result.finish_reasons,
            statistics=result.statistics,
        )

    return decode


def _dynamic_cache(call: Call, columns: PromptColumns, model: PreTrainedModel) -> Cache:
    """Returns what a call has cached, in `generate`'s layout."""
    rows = call.loop.rows
    lengths = [row.committed - 1 for row in rows]
    before = max(start + row.prompt_length for start, row in zip(columns.starts, rows, strict=True))
    width = before + max(len(row.tokens) for row in rows) - 1
    config: Any = model.config
    return write_dynamic_cache(call.loop.kept(), lengths, columns.starts, width, config.get_text_config(decoder=True))
