"""What the decode loop takes and keeps: prompts, what stands before them, its settings, and the state of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from layerskip.decoding.cost import CostTable
from layerskip.decoding.statistics import Tally
from layerskip.decoding.stopping import Stops
from layerskip.model.cache import Layers

# The new tokens of a prompt: their ids, or their embeddings `(tokens, hidden)`.
Prompt = Sequence[int] | torch.Tensor


@dataclass(frozen=True)
class Past:
    """What stands before the prompts already.

    Attributes:
        layers: keys and values of each layer.
        lengths: how many slots of each row count.
        token_ids: the tokens of these slots, where they are known.
    """

    layers: Layers
    lengths: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class DecodeSettings:
    """What the loop needs to know.

    Attributes:
        exit_layer: E, the layers that run token by token; equal to `depth` where nothing is drafted.
        depth: the layer whose exit gives the output: L, or E for an answer from the early layers alone.
        num_draft_tokens: γ; 0 drafts nothing, and a round is one step of plain decoding.
        stops: what ends a row.
        keep_scores: keep the processed scores that each emitted token was chosen from.
        keep_logits: keep these scores as they were before processing.
        chooses_exit: choose the exit, and how many of γ tokens to draft, before every round.
        stops_drafts_early: end a draft where one more no longer pays.
        copies_ngrams: copy spans from the text, which the exit cuts where it disagrees.
        trusts_copies: copy spans from the text, which the full model alone judges.
        tree_nodes: at most how many tokens a round drafts as a tree, γ deep; `None` drafts a chain.
        costs: what rounds cost, where exits are chosen or drafts end by it.
    """

    exit_layer: int
    depth: int
    num_draft_tokens: int
    stops: Stops
    keep_scores: bool = False
    keep_logits: bool = False
    chooses_exit: bool = False
    stops_drafts_early: bool = False
    copies_ngrams: bool = False
    trusts_copies: bool = False
    tree_nodes: int | None = None
    costs: CostTable | None = None

    def room(self, row: Row) -> int:
        """Returns how many drafts a row's budget leaves room for, beside the target that follows them."""
        return self.stops.max_new_tokens - len(row.tokens) - 1


@dataclass
class Row:
    """One sequence that is being decoded.

    Attributes:
        index: its place in the caller's batch.
        prompt_length: tokens of its prompt, those that came in a cache included.
        tokens: new token ids so far.
        scores: what they were chosen from, `(vocabulary,)` in fp32 each, when asked for.
        shown: the scores as criteria see them, `(rows, vocabulary)` each, without a copy.
        logits: the scores before processing, when asked for.
        finish_reason: "stop" (an EOS token or a stop string), "length" or "criteria"; `None` while it goes on.
        tally: its counts.
    """

    index: int
    prompt_length: int
    tokens: list[int] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    shown: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    finish_reason: str | None = None
    tally: Tally = field(default_factory=Tally)

    @property
    def committed(self) -> int:
        """Tokens that are settled; the cache holds all but the last."""
        return self.prompt_length + len(self.tokens)


@dataclass(frozen=True)
class Block:
    """What one round (or prefill) emitted for one row: tokens, and for each whether it was drafted and accepted."""

    row: int
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
