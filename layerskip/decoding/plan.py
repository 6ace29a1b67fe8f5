"""How a call decodes: strategy, exit layer, draft length and draft vocabulary, from call, engine and checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from layerskip.model.metadata import Metadata

STRATEGIES = ("self_speculative", "autoregressive", "early_exit")
DEFAULT_NUM_DRAFT_TOKENS = 4
STORED = "the checkpoint's "
NO_EXIT = "the model has a single layer, which cannot draft for itself; use strategy='autoregressive'."


@dataclass(frozen=True)
class Plan:
    """How one call decodes.

    Attributes:
        strategy: one of `STRATEGIES`.
        exit_layer: E, counted from 1; `None` for "autoregressive".
        num_draft_tokens: γ; `None` where nothing is drafted.
        draft_vocab_size: how many of the draft token ids to draft from; `None` for the full head.
    """

    strategy: str
    exit_layer: int | None = None
    num_draft_tokens: int | None = None
    draft_vocab_size: int | None = None

    def depth(self, num_layers: int) -> int:
        """Returns the layer whose exit gives the output: the last one, or E for an answer from the early layers."""
        return self.exit_layer if self.strategy == "early_exit" and self.exit_layer is not None else num_layers


@dataclass(frozen=True)
class Limits:
    """What the numbers of a plan have to fit.

    Attributes:
        num_layers: L; exits are 1 to L − 1.
        vocab_size: of the model; as `draft_vocab_size` it means the full head.
        num_draft_token_ids: how many there are to draft from; 0 without a list.
    """

    num_layers: int
    vocab_size: int
    num_draft_token_ids: int = 0


@dataclass(frozen=True)
class Wishes:
    """The numbers that a call or an engine asks for, `None` where it leaves one open."""

    exit_layer: int | None = None
    num_draft_tokens: int | None = None
    draft_vocab_size: int | None = None

    def checked(self, limits: Limits) -> Wishes:
        """Returns the same numbers as plain integers; raises TypeError for what is none, ValueError out of range."""
        return Wishes(
            check_exit_layer(self.exit_layer, limits.num_layers),
            check_num_draft_tokens(self.num_draft_tokens),
            check_draft_vocab_size(self.draft_vocab_size, limits),
        )


def make_plan(
    strategy: str,
    call: Wishes,
    *,
    engine: Wishes,
    metadata: Metadata,
    limits: Limits,
) -> Plan:
    """Returns the plan of a call; its own arguments override the engine's, those the checkpoint's.

    Args:
        strategy: one of `STRATEGIES`.
        call: the call's own numbers.
        engine: the engine's.
        metadata: the checkpoint's.
        limits: what all of them have to fit.

    Raises:
        TypeError: a number that is no integer.
        ValueError: a number out of range, an unknown strategy, a number that the strategy has no use for, or no exit
            layer where one is needed.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown; allowed are {', '.join(STRATEGIES)}.")
    call = call.checked(limits)
    drafting = {"num_draft_tokens": call.num_draft_tokens, "draft_vocab_size": call.draft_vocab_size}
    useless = {} if strategy == "self_speculative" else drafting
    if strategy == "autoregressive":
        useless = {"exit_layer": call.exit_layer, **useless}
    for name, value in useless.items():
        if value is not None:
            raise ValueError(f"{name}={value} has no meaning with strategy={strategy!r}; leave it out.")
    if strategy == "autoregressive":
        return Plan(strategy)

    num_layers = limits.num_layers
    chosen = call.exit_layer if call.exit_layer is not None else check_exit_layer(engine.exit_layer, num_layers)
    if chosen is None:
        chosen = check_exit_layer(metadata.exit_layer, num_layers, f"{STORED}exit_layer")
    if chosen is None and metadata.compared:
        if strategy == "self_speculative" and call == Wishes():
            return Plan("autoregressive")
        raise ValueError(
            f"strategy={strategy!r} without exit_layer: the checkpoint says that no exit pays; pass an exit_layer of "
            f"1..{num_layers - 1} to use one all the same."
        )
    if num_layers < 2:
        raise ValueError(f"strategy={strategy!r} needs an exit, and {NO_EXIT}")
    if chosen is None:
        trained = ""
        if metadata.exit_layers:
            trained = f" (trained are {', '.join(map(str, metadata.exit_layers))})"
        raise ValueError(
            f"strategy={strategy!r} needs exit_layer=1..{num_layers - 1}{trained}, and the checkpoint does not name "
            "one; inference/compare_exits.py finds out which one pays and stores it."
        )
    if strategy == "early_exit":
        return Plan(strategy, chosen)
    drafts = call.num_draft_tokens
    if drafts is None:
        drafts = check_num_draft_tokens(engine.num_draft_tokens)
    if drafts is None:
        drafts = check_num_draft_tokens(metadata.num_draft_tokens, f"{STORED}num_draft_tokens")
    if drafts is None:
        drafts = DEFAULT_NUM_DRAFT_TOKENS
    return Plan(strategy, chosen, drafts, _draft_vocab_size(call, engine, metadata, limits))


def _draft_vocab_size(call: Wishes, engine: Wishes, metadata: Metadata, limits: Limits) -> int | None:
    """Returns how many of the draft token ids to draft from; `None` for the full head."""
    size = call.draft_vocab_size
    if size is None:
        size = check_draft_vocab_size(engine.draft_vocab_size, limits)
    if size is None and limits.num_draft_token_ids:
        size = check_draft_vocab_size(metadata.draft_vocab_size, limits, f"{STORED}draft_vocab_size")
        if size is None:
            size = limits.num_draft_token_ids
    return None if size == limits.vocab_size else size


def check_exit_layer(value: Any, num_layers: int, name: str = "exit_layer") -> int | None:
    """Returns an exit layer, or `None` for none; raises TypeError or ValueError for what is not 1..L − 1."""
    allowed = f"allowed are 1 to {num_layers - 1} (the model has {num_layers} layers, counted from 1)"
    if num_layers < 2:
        allowed = NO_EXIT
    return _checked_count(name, value, num_layers - 1, allowed)


def check_num_draft_tokens(value: Any, name: str = "num_draft_tokens") -> int | None:
    """Returns a draft length, or `None` for none; raises TypeError or ValueError for what is no positive integer."""
    return _checked_count(
        name, value, None, "allowed are integers from 1 on (strategy='autoregressive' drafts nothing)"
    )


def check_draft_vocab_size(value: Any, limits: Limits, name: str = "draft_vocab_size") -> int | None:
    """Returns a size of the draft vocabulary, or `None` for none; raises TypeError or ValueError for what there are no
    token ids for."""
    full = f"{limits.vocab_size} (the model's vocabulary: the full head)"
    allowed = f"allowed are 1 to {limits.num_draft_token_ids} (as many draft_token_ids are there) and {full}"
    if not limits.num_draft_token_ids:
        allowed = (
            f"allowed is {full}, since no draft_token_ids are there; a training recipe with `draft_vocab_size: 8192` "
            "writes them into its checkpoint"
        )
    highest = limits.vocab_size if value == limits.vocab_size else limits.num_draft_token_ids
    return _checked_count(name, value, highest, allowed)


def _checked_count(name: str, value: Any, highest: int | None, allowed: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not an integer; {allowed}.")
    # A plain integer of whatever counts as one, numpy's for example: statistics go into JSON.
    count = int(value)
    if count < 1 or (highest is not None and count > highest):
        raise ValueError(f"{name}={count} is out of range; {allowed}.")
    return count
