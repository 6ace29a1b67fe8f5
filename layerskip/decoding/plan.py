"""How a call decodes: its strategy, exit layer and draft length, from the call, the engine and the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerskip.model.metadata import Metadata

STRATEGIES = ("self_speculative", "autoregressive", "early_exit")
DEFAULT_NUM_DRAFT_TOKENS = 4
STORED = "config.json's layerskip."
NO_EXIT = "the model has a single layer, which cannot draft for itself; use strategy='autoregressive'."


@dataclass(frozen=True)
class Plan:
    """How one call decodes.

    Attributes:
        strategy: one of `STRATEGIES`.
        exit_layer: E, counted from 1; `None` for "autoregressive".
        num_draft_tokens: γ; `None` where nothing is drafted.
    """

    strategy: str
    exit_layer: int | None = None
    num_draft_tokens: int | None = None


def make_plan(
    strategy: str,
    exit_layer: int | None,
    num_draft_tokens: int | None,
    *,
    engine: tuple[int | None, int | None],
    metadata: Metadata,
    num_layers: int,
) -> Plan:
    """Returns the plan of a call; its own arguments override the engine's, those the checkpoint's.

    Args:
        strategy, exit_layer, num_draft_tokens: the call's own; `None` where it leaves them open.
        engine: the engine's exit layer and draft length.
        metadata: the checkpoint's.
        num_layers: L; exits are 1 to L − 1.

    Raises:
        TypeError: a number that is no integer.
        ValueError: a number out of range, an unknown strategy, a number that the strategy has no use for, or no exit
            layer where one is needed.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown; allowed are {', '.join(STRATEGIES)}.")
    check_exit_layer(exit_layer, num_layers)
    check_num_draft_tokens(num_draft_tokens)
    if strategy == "autoregressive" and exit_layer is not None:
        raise ValueError(f"exit_layer={exit_layer} has no meaning with strategy={strategy!r}; leave it out.")
    if strategy != "self_speculative" and num_draft_tokens is not None:
        raise ValueError(
            f"num_draft_tokens={num_draft_tokens} has no meaning with strategy={strategy!r}; leave it out."
        )
    if strategy == "autoregressive":
        return Plan(strategy)

    chosen = exit_layer if exit_layer is not None else check_exit_layer(engine[0], num_layers)
    if chosen is None:
        chosen = check_exit_layer(metadata.exit_layer, num_layers, f"{STORED}exit_layer")
    if chosen is None and metadata.compared:
        if strategy == "self_speculative" and num_draft_tokens is None:
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
    drafts = num_draft_tokens if num_draft_tokens is not None else check_num_draft_tokens(engine[1])
    if drafts is None:
        drafts = check_num_draft_tokens(metadata.num_draft_tokens, f"{STORED}num_draft_tokens")
    return Plan(strategy, chosen, DEFAULT_NUM_DRAFT_TOKENS if drafts is None else drafts)


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


def _checked_count(name: str, value: Any, highest: int | None, allowed: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not an integer; {allowed}.")
    if value < 1 or (highest is not None and value > highest):
        raise ValueError(f"{name}={value} is out of range; {allowed}.")
    return value
