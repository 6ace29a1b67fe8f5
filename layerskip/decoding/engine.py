"""The engine: a model, a tokenizer, and how to decode with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from layerskip.decoding.loop import DecodeLoop, DecodeSettings
from layerskip.decoding.options import GenerationOptions, read_options
from layerskip.decoding.prompts import Prompts, read_prompts
from layerskip.decoding.result import GenerationResult, StreamEvent
from layerskip.decoding.statistics import Statistics
from layerskip.decoding.text import GrowingText
from layerskip.model.layered import LayeredModel
from layerskip.model.loading import load_model
from layerskip.model.metadata import Metadata

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

STRATEGIES = ("self_speculative", "autoregressive", "early_exit")
DEFAULT_NUM_DRAFT_TOKENS = 4
STORED = "config.json's layerskip."


class Engine:
    """Generates with one causal language model that drafts with its early layers and verifies with the rest.

    The model stays the caller's: nothing in it is replaced, renamed or switched.

    Example:
        >>> engine = Engine(model, tokenizer, exit_layer=8)
        >>> engine.generate("The capital of France is", max_new_tokens=32).texts[0]
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        exit_layer: int | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        """Makes an engine for `model`.

        Args:
            model: a transformers causal LM of a supported family, in eval mode when it generates.
            tokenizer: for prompts and results as text.
            exit_layer: E, how many layers a draft runs, 1 to L − 1; by default the checkpoint's.
            num_draft_tokens: γ, at most how many tokens a round drafts; by default the checkpoint's, else 4.

        Raises:
            ValueError: a model that is not supported, or a number out of range.
            TypeError: a model or a number that is none.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.layered = LayeredModel(model)
        self.metadata = Metadata.of(model.config)
        self.exit_layer = self._checked_exit_layer(exit_layer)
        self.num_draft_tokens = _checked_num_draft_tokens(num_draft_tokens)

    def generate(
        self,
        prompts: Any,
        *,
        attention_mask: torch.Tensor | None = None,
        strategy: str = "self_speculative",
        exit_layer: int | None = None,
        num_draft_tokens: int | None = None,
        cache: None = None,
        generator: None = None,
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
            exit_layer: E for this call.
            num_draft_tokens: γ for this call.
            cache: not supported.
            generator: not supported; greedy decoding draws no random numbers.
            generation_config: settings of this call; the model's own fill what is left open.
            **arguments: single fields of `GenerationConfig`, such as `max_new_tokens`; they override both.

        Returns:
            A `GenerationResult`. Greedy tokens are those of `model.generate(do_sample=False)`: equal in fp32; in
            bf16 and fp16 up to ties that rounding decides.

        Raises:
            TypeError, ValueError: anything that cannot be done as asked, before any layer runs.
        """
        _refuse_argument("cache", cache)
        _refuse_argument("generator", generator)
        call = self._prepare(
            prompts, attention_mask, strategy, exit_layer, num_draft_tokens, generation_config, arguments
        )
        for _ in call.loop.blocks():
            pass
        return call.result()

    def stream(
        self,
        prompt: Any,
        *,
        attention_mask: torch.Tensor | None = None,
        strategy: str = "self_speculative",
        exit_layer: int | None = None,
        num_draft_tokens: int | None = None,
        generation_config: GenerationConfig | None = None,
        **arguments: Any,
    ) -> Iterator[StreamEvent]:
        """Generates one row and yields what prefill and then every round emits, as soon as it is settled.

        Takes what `generate` takes, for one prompt. The texts of the events add up to the text of the result, which
        the last event carries.

        Raises:
            TypeError, ValueError: as `generate`, at the call itself; and for more than one prompt.
        """
        call = self._prepare(
            prompt, attention_mask, strategy, exit_layer, num_draft_tokens, generation_config, arguments
        )
        if len(call.prompts.rows) != 1:
            raise ValueError(f"stream takes one prompt, not {len(call.prompts.rows)}; use generate for a batch.")
        return call.events()

    def _prepare(
        self,
        prompts: Any,
        attention_mask: torch.Tensor | None,
        strategy: str,
        exit_layer: int | None,
        num_draft_tokens: int | None,
        generation_config: GenerationConfig | None,
        arguments: dict[str, Any],
    ) -> _Call:
        """Checks everything a caller may get wrong and returns a call that is ready to run."""
        strategy, exit_layer, num_draft_tokens = self._plan(strategy, exit_layer, num_draft_tokens)
        self.layered.check_attention()
        if any(module.training for module in self.model.modules()):
            raise ValueError(
                "the model, or a part of it, is in train mode, where its outputs are random; call model.eval()."
            )
        read = read_prompts(prompts, self.tokenizer, attention_mask, self.layered.vocab_size)
        width = max(len(row) for row in read.rows) if read.padded is None else read.padded.shape[1]
        options = read_options(self.model, generation_config, arguments, width)
        read.tensor(options.pad_token_id)
        self.layered.check_length(max(len(row) for row in read.rows) + options.max_new_tokens)
        return _Call(self, read, options, strategy, exit_layer, num_draft_tokens)

    def _plan(
        self, strategy: str, exit_layer: int | None, num_draft_tokens: int | None
    ) -> tuple[str, int | None, int | None]:
        """Returns strategy, E and γ of a call: its own arguments, else the engine's, else the checkpoint's."""
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} is unknown; allowed are {', '.join(STRATEGIES)}.")
        asked_exit_layer = self._checked_exit_layer(exit_layer)
        asked_num_draft_tokens = _checked_num_draft_tokens(num_draft_tokens)
        if strategy != "self_speculative" and asked_num_draft_tokens is not None:
            raise ValueError(
                f"num_draft_tokens={num_draft_tokens} has no meaning with strategy={strategy!r}; leave it out."
            )
        if strategy == "autoregressive":
            if asked_exit_layer is not None:
                raise ValueError(f"exit_layer={exit_layer} has no meaning with strategy={strategy!r}; leave it out.")
            return strategy, None, None
        stored = self.metadata
        chosen = (
            asked_exit_layer or self.exit_layer or self._checked_exit_layer(stored.exit_layer, f"{STORED}exit_layer")
        )
        if chosen is None and stored.compared and strategy == "self_speculative":
            if asked_num_draft_tokens is not None:
                raise ValueError(
                    f"num_draft_tokens={num_draft_tokens} without exit_layer: the checkpoint says that no exit pays, "
                    "and nothing would be drafted; pass exit_layer as well, or leave it out."
                )
            return "autoregressive", None, None
        if chosen is None:
            raise ValueError(
                f"strategy={strategy!r} needs exit_layer=1..{self.layered.num_layers - 1}, and the checkpoint does not "
                "name one; inference/compare_exits.py finds out which one pays and stores it."
            )
        if strategy == "early_exit":
            return strategy, chosen, None
        wanted = asked_num_draft_tokens or self.num_draft_tokens
        if wanted is None:
            wanted = _checked_num_draft_tokens(stored.num_draft_tokens, f"{STORED}num_draft_tokens")
        return strategy, chosen, wanted or DEFAULT_NUM_DRAFT_TOKENS

    def _checked_exit_layer(self, exit_layer: Any, name: str = "exit_layer") -> int | None:
        last = self.layered.num_layers - 1
        allowed = f"allowed are 1 to {last} (the model has {last + 1} layers, counted from 1)"
        return _checked_count(name, exit_layer, last, allowed)


class _Call:
    """One prepared call: its loop, and the result once that has run."""

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        options: GenerationOptions,
        strategy: str,
        exit_layer: int | None,
        num_draft_tokens: int | None,
    ) -> None:
        self.prompts = prompts
        self.options = options
        self.strategy = strategy
        self.exit_layer = exit_layer
        self.num_draft_tokens = num_draft_tokens
        self.tokenizer = engine.tokenizer
        depth = exit_layer if strategy == "early_exit" and exit_layer else engine.layered.num_layers
        settings = DecodeSettings(
            draft_layers=exit_layer or depth,
            depth=depth,
            num_draft_tokens=num_draft_tokens or 0,
            max_new_tokens=options.max_new_tokens,
            eos_token_ids=options.eos_token_ids,
            keep_logits=options.output_scores or options.output_logits,
        )
        self.loop = DecodeLoop(engine.layered, prompts.rows, settings)

    def events(self) -> Iterator[StreamEvent]:
        """Runs the loop for its only row and yields an event for prefill and for every round."""
        text = None if self.tokenizer is None else GrowingText(self.tokenizer)
        for (block,) in self.loop.blocks():
            piece = "" if text is None else text.add(block.token_ids)
            if self.loop.active:
                yield StreamEvent(piece, block.token_ids, block.accepted)
            else:
                piece += "" if text is None else text.finish()
                yield StreamEvent(piece, block.token_ids, block.accepted, self.result())

    def result(self) -> GenerationResult:
        """Returns the result; the loop must have run to its end."""
        rows = self.loop.rows
        steps = max(len(row.tokens) for row in rows)
        pad = self.options.pad_token_id
        # Rows of different lengths exist only where EOS tokens do, and then there is a padding token.
        filled = torch.tensor([row.tokens + [pad or 0] * (steps - len(row.tokens)) for row in rows])
        prompts = self.prompts.tensor(pad)
        logits = _stack_steps([row.logits for row in rows], steps) if self.loop.settings.keep_logits else None
        texts = None
        if self.tokenizer is not None:
            texts = [str(self.tokenizer.decode(row.tokens, skip_special_tokens=True)) for row in rows]
        settings = (self.strategy, self.exit_layer, self.num_draft_tokens)
        per_row = tuple(Statistics.of([row.tally], row.tally.seconds, *settings) for row in rows)
        total = Statistics.of([row.tally for row in rows], self.loop.seconds, *settings, per_row)
        return GenerationResult(
            sequences=torch.cat([prompts.long(), filled.to(prompts.device)], dim=1),
            texts=texts,
            finish_reasons=[str(row.finish_reason) for row in rows],
            statistics=total,
            scores=logits if self.options.output_scores else None,
            logits=logits if self.options.output_logits else None,
        )


def load(
    path_or_id: str | os.PathLike[str],
    *,
    exit_layer: int | None = None,
    num_draft_tokens: int | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    revision: str | None = None,
) -> Engine:
    """Loads a checkpoint and its tokenizer and returns an `Engine` for them.

    Args:
        path_or_id: a local folder, or a model id on the Hugging Face hub.
        exit_layer: E; by default the checkpoint's recommendation.
        num_draft_tokens: γ; by default the checkpoint's recommendation, else 4.
        device: where the model goes; by default the first CUDA device where there is one, else the CPU.
        dtype: of the weights; "auto" keeps the checkpoint's.
        attn_implementation: "sdpa" or "eager"; by default what transformers chooses for the family.
        revision: of a model on the hub.

    Raises:
        ValueError: no model there, a family that is not supported, or a number out of range.
        TypeError: a number that is none.
    """
    model, tokenizer = load_model(
        path_or_id, device=device, dtype=dtype, attn_implementation=attn_implementation, revision=revision
    )
    return Engine(model, tokenizer, exit_layer=exit_layer, num_draft_tokens=num_draft_tokens)


def _refuse_argument(name: str, value: Any) -> None:
    if value is not None:
        raise ValueError(f"{name}={value!r} is not supported; leave it out.")


def _checked_num_draft_tokens(num_draft_tokens: Any, name: str = "num_draft_tokens") -> int | None:
    allowed = "allowed are whole numbers from 1 on (strategy='autoregressive' drafts nothing)"
    return _checked_count(name, num_draft_tokens, None, allowed)


def _checked_count(name: str, value: Any, highest: int | None, allowed: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not an integer; {allowed}.")
    if value < 1 or (highest is not None and value > highest):
        raise ValueError(f"{name}={value} is out of range; {allowed}.")
    return value


def _stack_steps(rows: list[list[torch.Tensor]], steps: int) -> tuple[torch.Tensor, ...]:
    """Returns per-step `(batch, vocabulary)` tensors of per-row lists; zeros where a row has finished."""
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else nothing for row in rows]) for step in range(steps))
