"""A stock causal language model that can stop after any layer and resume there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layerskip.model.cache import SharedCache
from layerskip.model.devices import device_of
from layerskip.model.families import ABSENT, SLIDING_ATTENTION, family_of
from layerskip.model.masks import attention_mask
from layerskip.model.placement import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RotaryTables:
    """Cosines and sines of all positions of one call, `(1, positions, head size)`, for each layer type."""

    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]

    def at(self, placement: Placement, layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows of the two tables for the tokens of a pass: `(rows or 1, width, head size)` each."""
        cos, sin = self.tables[layer_type]
        if placement.start is None or placement.trees is not None:
            return cos[0][placement.positions], sin[0][placement.positions]
        stop = placement.start + placement.width
        return cos[:, placement.start : stop], sin[:, placement.start : stop]


class LayeredModel:
    """Runs a transformers causal LM in spans of layers, through its own modules, changing nothing in it.

    `embed`, `run` and `logits` are the whole interface, with `place` for prompts that come embedded, and `normed` for
    those who multiply with a part of the head. Layers are counted from 1: `run(hidden, 0, E, …)` executes layers 1..E,
    and its output is what transformers calls `hidden_states[E]`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Wraps `model`.

        Raises:
            TypeError: something else than a transformers model.
            ValueError: a family, setting or attention implementation that is not supported, or a model without a
                language-model head; the message says what is supported.
        """
        _check_is_causal_lm(model)
        self.model = model
        self.config: Any = model.config
        self.family = family_of(self.config)
        implementation = self.config._attn_implementation
        if implementation not in self.family.attention:
            raise ValueError(
                f"attn_implementation={implementation!r} is not supported for model_type={self.config.model_type!r}; "
                f"load the model with {' or '.join(map(repr, self.family.attention))}."
            )
        self.causal_by_flag = implementation == "sdpa"
        self.layers = list(self.family.part(model, self.family.layers).children())
        self.num_layers: int = self.config.num_hidden_layers
        if len(self.layers) != self.num_layers:
            raise ValueError(
                f"config.num_hidden_layers={self.num_layers}, but the model has {len(self.layers)} layers; "
                "set it back to the number of layers."
            )
        self.layer_types = self.family.layer_types(self.config)
        self.embedding: Any = model.get_input_embeddings()
        positions = self.family.learned_positions
        self.position_embedding = None if positions is None else self.family.part(model, positions)
        self.project_in = self.family.part(model, self.family.project_in)
        self.norm = self.family.part(model, self.family.norm)
        self.project_out = self.family.part(model, self.family.project_out)
        self.head: Any = model.get_output_embeddings()
        self.vocab_size: int = self.config.vocab_size

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return device_of(self.embedding, self.embedding.weight)

    @property
    def ends(self) -> list[nn.Module]:
        """The modules before and behind the layers that the model has: embeddings, projections, norm and head."""
        parts = (
            self.embedding,
            self.project_in,
            self.position_embedding,
            self.norm,
            self.project_out,
            self.head,
        )
        return [part for part in parts if part is not None and part is not ABSENT]

    def check_length(self, tokens: int, made: Sequence[int] = (0,)) -> None:
        """Checks that `tokens` positions can be held by the model.

        Args:
            tokens: prompt and budget.
            made: the lengths at which keys are made that stay: of the prompts, or of what a cache holds.

        Raises:
            ValueError: more positions than there are, or a rotary type whose table depends on the length: "dynamic"
                past the model's length, "longrope" where its original length lies between two of the lengths.
        """
        limit: int = self.config.max_position_embeddings
        if self.has_last_position:
            if tokens > limit:
                raise ValueError(
                    f"prompt + max_new_tokens = {tokens} tokens, but the model has only {limit} positions; "
                    "shorten the prompt or lower max_new_tokens."
                )
            return
        for parameters in self._rope_parameters():
            kind = parameters["rope_type"]
            # longrope switches tables at a length of its own, dynamic at the longest that the model was made for.
            original = parameters["original_max_position_embeddings"] if kind == "longrope" else limit
            if kind == "dynamic" and tokens > original:
                raise ValueError(
                    f"rope_type='dynamic' changes its table past {original} tokens, which a shared cache cannot "
                    f"follow, but prompt + max_new_tokens = {tokens}; shorten the prompt or lower max_new_tokens."
                )
            if kind == "longrope" and len({length > original for length in (tokens, *made)}) > 1:
                raise ValueError(
                    f"rope_type='longrope' changes its table past {original} tokens, which a shared cache cannot "
                    f"follow, but prompt + max_new_tokens = {tokens}; shorten the prompt or lower max_new_tokens, or "
                    "pass prompts alone, and a cache, that are all longer already."
                )

    def _rope_parameters(self) -> list[dict[str, Any]]:
        """Returns the rotary settings that layers have."""
        parameters = self.config.rope_parameters
        if self.family.rotary_by_layer_type:
            return [parameters[layer_type] for layer_type in set(self.layer_types)]
        return [parameters]

    @property
    def has_last_position(self) -> bool:
        """Whether positions end at `max_position_embeddings`: they were learned, or stand in a table of that length."""
        return self.position_embedding is not None or self.family.rotary_ends

    def masks(self, start: int, width: int) -> bool:
        """Whether a pass of one row, `width` tokens from position `start` on, needs a mask in any layer.

        It does not where a token sees all before it, and attention masks a whole prompt by itself.
        """
        is_sliding = SLIDING_ATTENTION in self.layer_types
        within_window = not is_sliding or start + width <= self.config.sliding_window
        return not (within_window and (width == 1 or (start == 0 and self.causal_by_flag)))

    def rotary_tables(self, tokens: int) -> RotaryTables:
        """Returns the model's own rotary tables for positions `0 .. tokens − 1`; empty where positions are learned."""
        if self.position_embedding is not None:
            return RotaryTables({})
        rotary = self.family.part(self.model, "rotary_emb")
        like = torch.empty(0, dtype=self.embedding.weight.dtype, device=self.device)
        positions = torch.arange(tokens, device=self.device).unsqueeze(0)

        def tables(*layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
            # A dynamic table that an earlier, longer call stretched is reset by a short one, as a prefill would.
            rotary(like, positions[:, :1], *layer_type)
            cos, sin = rotary(like, positions, *layer_type)
            # Where placements are; accelerate often puts the module on the last device.
            return cos.to(self.device), sin.to(self.device)

        if self.family.rotary_by_layer_type:
            return RotaryTables({kind: tables(kind) for kind in set(self.layer_types)})
        return RotaryTables(dict.fromkeys(self.layer_types, tables()))

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the hidden state before layer 1, `(rows, width, hidden)`.

        Args:
            ids: token ids `(rows, width)`.
            positions: `(rows or 1, width)`; used by families with learned positions only.
        """
        return self.place(self.embedding(ids), positions)

    def place(self, embedded: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the hidden state before layer 1 of tokens that come embedded, `(rows, width, hidden)`.

        Args:
            embedded: what the model's embedding module gives for tokens, or the caller's own, `(rows, width, hidden)`.
            positions: `(rows or 1, width)`; added by families with learned positions only.
        """
        hidden: torch.Tensor = self.project_in(self.family.scale_embedding(embedded, self.config))
        if self.position_embedding is None:
            return hidden
        return hidden + self.family.embed_positions(self.position_embedding, positions).to(hidden.device)

    def run(
        self,
        hidden: torch.Tensor,
        start: int,
        stop: int,
        *,
        placement: Placement,
        cache: SharedCache,
        rotary: RotaryTables,
    ) -> torch.Tensor:
        """Runs layers `start + 1 .. stop` over the tokens of one pass and stores their keys and values.

        Args:
            hidden: the output of layer `start`, `(rows, width, hidden)`.
            placement: where the tokens stand.
            cache: the cache of this call; it must hold all that stands before them.
            rotary: from `rotary_tables`.

        Returns:
            The output of layer `stop`, `(rows, width, hidden)`.
        """
        cache.placement = placement
        arguments = {}
        for layer_type in set(self.layer_types[start:stop]):
            window = self.config.sliding_window if layer_type == SLIDING_ATTENTION else None
            mask = attention_mask(placement, window, hidden.dtype, self.causal_by_flag)
            arguments[layer_type] = (mask, rotary.at(placement, layer_type) if rotary.tables else None)
        for layer, layer_type in zip(self.layers[start:stop], self.layer_types[start:stop], strict=True):
            mask, tables = arguments[layer_type]
            hidden = self.family.run_layer(layer, hidden, mask, cache, tables)
        return hidden

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what the head multiplies: the final norm, and the projection behind it where there is one.

        Args:
            hidden: the output of any layer before the final norm, `(..., hidden)`.

        Returns:
            `(..., width of the head)`.
        """
        normed: torch.Tensor = self.project_out(self.norm(hidden))
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the vocabulary logits of hidden states: the model's final norm, head, and soft-cap or scale.

        Args:
            hidden: the output of any layer before the final norm, `(..., hidden)`.

        Returns:
            `(..., vocabulary)`, in the model's type.
        """
        return self.family.finish_logits(self.head(self.normed(hidden)), self.config)


def _check_is_causal_lm(model: object) -> None:
    from transformers import PreTrainedModel

    wanted = "pass a transformers causal language model, such as AutoModelForCausalLM.from_pretrained(…) returns"
    if not isinstance(model, PreTrainedModel):
        base = ""
        if "OptimizedModule" in str(type(model)):
            base = "; of a compiled model take _orig_mod, or compile its forward"
        raise TypeError(f"model is a {type(model).__name__}, not a transformers model; {wanted}{base}.")
    if model.get_output_embeddings() is None and not model.config.is_encoder_decoder:
        raise ValueError(f"model is a {type(model).__name__}, which has no language-model head; {wanted}.")
