"""How a call decodes: strategy, exit layer, draft length and draft vocabulary, from call, engine and checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from layerskip.decoding.cost import CostTable
from layerskip.model.metadata import Metadata

STRATEGIES = ("self_speculative", "autoregressive", "early_exit")
DEFAULT_NUM_DRAFT_TOKENS = 4
AUTO = "auto"
STATIC, ADAPTIVE = DRAFT_STOPS = ("static", "adaptive")
OFF, CHECKED, TRUSTED = COPY_NGRAMS = ("off", "checked", "trusted")
# Beyond that a pass costs more than the few likely tokens in it can bring.
MAX_TREE_NODES = 64
STORED = "the checkpoint's "
NO_EXIT = "the model has a single layer, which cannot draft for itself; use strategy='autoregressive'"


@dataclass(frozen=True)
class Plan:
    """How one call decodes.

    Attributes:
        strategy: one of `STRATEGIES`.
        exit_layer: E, counted from 1; "auto" where it is chosen between rounds; `None` for "autoregressive".
        num_draft_tokens: γ, of a tree its depth; `None` where nothing is drafted.
        draft_vocab_size: how many of the draft token ids to draft from; `None` for the full head.
        draft_stop: "static" drafts γ tokens, "adaptive" ends where one more no longer pays.
        copy_ngrams: "off" copies nothing; with "checked" the exit cuts what is copied from the text where it disagrees,
            with "trusted" the full model alone judges it.
        tree_nodes: at most how many tokens a round drafts as a tree; `None` drafts a chain.
        compile: compile rounds.
        costs: what rounds cost, where the plan depends on it.
    """

    strategy: str
    exit_layer: int | str | None = None
    num_draft_tokens: int | None = None
    draft_vocab_size: int | None = None
    draft_stop: str = "static"
    copy_ngrams: str = "off"
    tree_nodes: int | None = None
    compile: bool = False
    costs: CostTable | None = None

    def depth(self, num_layers: int) -> int:
        """Returns the layer whose exit gives the output: the last one, or E for an answer from the early layers."""
        return self.exit_layer if self.strategy == "early_exit" and isinstance(self.exit_layer, int) else num_layers

    def check_choice(self, *, is_sampled: bool, has_processors: bool, keeps_scores: bool, rows: int) -> None:
        """Checks that a call's tokens can be chosen as it asks for in rounds as they are planned.

        Args:
            is_sampled: tokens are drawn.
            has_processors: logits pass processors before.
            keeps_scores: scores or logits are to be returned.
            rows: of the batch.

        Raises:
            ValueError: they cannot; the message says what to leave out.
        """
        unfit = {
            "do_sample=True": is_sampled,
            "logits processors (penalties, min_new_tokens, bad words and the like)": has_processors,
        }
        if self.tree_nodes is not None:
            _refuse(f"tree_nodes={self.tree_nodes}", unfit)
        if self.compile:
            several = f"a batch of {rows} rows"
            _refuse("compile=True", {**unfit, "output_scores or output_logits": keeps_scores, several: rows > 1})


def _refuse(option: str, unfit: dict[str, bool]) -> None:
    """Raises for the first of some things that are asked for and do not go with an option."""
    for name, is_asked in unfit.items():
        if is_asked:
            raise ValueError(f"{option} does not go with {name}; leave one of them out.")


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
    """What a call or an engine asks for, `None` where it leaves something open; the names are those of `Plan`."""

    exit_layer: int | str | None = None
    num_draft_tokens: int | None = None
    draft_vocab_size: int | None = None
    draft_stop: str | None = None
    copy_ngrams: str | None = None
    tree_nodes: int | None = None
    compile: bool | None = None

    def checked(self, limits: Limits) -> Wishes:
        """Returns the same with numbers as plain integers.

        Raises:
            TypeError: a number that is none, or a switch that is neither true nor false.
            ValueError: a number out of range, an unknown word, or options that do not go together.
        """
        for name, value, words in (
            ("draft_stop", self.draft_stop, DRAFT_STOPS),
            ("copy_ngrams", self.copy_ngrams, COPY_NGRAMS),
        ):
            if value is not None and (not isinstance(value, str) or value not in words):
                raise ValueError(f"{name}={value!r} is unknown; allowed are {', '.join(words)}.")
        if not isinstance(self.compile, bool | None):
            raise TypeError(f"compile={self.compile!r} is a {type(self.compile).__name__}; pass True or False.")
        _check_together(self)
        is_auto = isinstance(self.exit_layer, str) and self.exit_layer == AUTO
        return replace(
            self,
            exit_layer=AUTO if is_auto else check_exit_layer(self.exit_layer, limits.num_layers),
            num_draft_tokens=check_num_draft_tokens(self.num_draft_tokens),
            draft_vocab_size=check_draft_vocab_size(self.draft_vocab_size, limits),
            tree_nodes=_checked_count(
                "tree_nodes", self.tree_nodes, MAX_TREE_NODES, f"allowed are 1 to {MAX_TREE_NODES}"
            ),
        )

    def over(self, others: Wishes) -> Wishes:
        """Returns these wishes, and those of `others` where these leave something open."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(others, **{name: value for name, value in own.items() if value is not None})


NAMES = tuple(each.name for each in fields(Wishes))


def make_plan(
    strategy: str,
    call: Wishes,
    *,
    engine: Wishes,
    metadata: Metadata,
    limits: Limits,
    costs: Callable[[], CostTable | None] = lambda: None,
) -> Plan:
    """Returns the plan of a call; its own arguments override the engine's, those the checkpoint's.

    Args:
        strategy: one of `STRATEGIES`.
        call: what the call itself asks for.
        engine: what the engine asks for.
        metadata: the checkpoint's.
        limits: what all of them have to fit.
        costs: returns what rounds cost, where that is known; asked only where the plan depends on it.

    Raises:
        TypeError: a number that is no integer, or a switch that is neither true nor false.
        ValueError: something out of range or unknown, that the strategy has no use for, that does not go together, or
            that needs costs which nobody has measured; or no exit layer where one is needed.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown; allowed are {', '.join(STRATEGIES)}.")
    call, engine = call.checked(limits), engine.checked(limits)
    useful = {"self_speculative": set(NAMES), "early_exit": {"exit_layer", "compile"}, "autoregressive": {"compile"}}
    for name in NAMES:
        value = getattr(call, name)
        if value is not None and name not in useful[strategy]:
            raise ValueError(f"{name}={value} has no meaning with strategy={strategy!r}; leave it out.")
    asked = call.over(engine)
    if strategy == "autoregressive":
        return Plan(strategy, compile=bool(asked.compile))
    exit_layer = asked.exit_layer
    num_layers = limits.num_layers
    if exit_layer is None:
        exit_layer = check_exit_layer(metadata.exit_layer, num_layers, f"{STORED}exit_layer")
    if exit_layer is None and metadata.compared:
        levers = (engine.draft_stop, engine.copy_ngrams, engine.tree_nodes)
        if strategy == "self_speculative" and replace(call, compile=None) == Wishes() and levers == (None,) * 3:
            return Plan("autoregressive", compile=bool(asked.compile))
        raise ValueError(
            f"strategy={strategy!r} without exit_layer: the checkpoint says that no exit pays; pass an exit_layer of "
            f"1..{num_layers - 1} to use one all the same."
        )
    if num_layers < 2:
        raise ValueError(f"strategy={strategy!r} needs an exit, and {NO_EXIT}.")
    if exit_layer is None:
        trained = ""
        if metadata.exit_layers:
            trained = f" (trained are {', '.join(map(str, metadata.exit_layers))})"
        raise ValueError(
            f"strategy={strategy!r} needs exit_layer=1..{num_layers - 1}{trained}, and the checkpoint does not name "
            "one; inference/compare_exits.py finds out which one pays and stores it."
        )
    if strategy == "early_exit":
        if exit_layer == AUTO:
            raise ValueError(f"exit_layer={AUTO!r} has no meaning with strategy='early_exit'; pass a number.")
        return Plan(strategy, exit_layer, compile=bool(asked.compile))
    _check_together(replace(asked, exit_layer=exit_layer))
    known = None
    if exit_layer == AUTO or asked.draft_stop == ADAPTIVE:
        known = costs()
        _check_costs(exit_layer, asked.num_draft_tokens, known, num_layers)
    return Plan(
        strategy,
        exit_layer,
        _num_draft_tokens(asked, metadata, known),
        _draft_vocab_size(asked, metadata, limits),
        asked.draft_stop or STATIC,
        asked.copy_ngrams or OFF,
        asked.tree_nodes,
        bool(asked.compile),
        known,
    )


def _check_together(asked: Wishes) -> None:
    """Raises where two options exclude each other."""
    # A tree has a shape of its own, and compiled rounds have one that is fixed: neither goes with another option.
    fixed = {
        f"tree_nodes={asked.tree_nodes}": asked.tree_nodes is not None,
        "compile=True": bool(asked.compile),
    }
    free = {
        f"exit_layer={AUTO!r}": asked.exit_layer == AUTO,
        f"draft_stop={ADAPTIVE!r}": asked.draft_stop == ADAPTIVE,
        f"copy_ngrams={asked.copy_ngrams!r}": asked.copy_ngrams in (CHECKED, TRUSTED),
    }
    alone, *others = [name for name, is_on in fixed.items() if is_on] or [""]
    others += [name for name, is_on in free.items() if is_on]
    if alone and others:
        raise ValueError(f"{alone} does not go with {' and '.join(others)}; leave one of them out.")


def _check_costs(exit_layer: int | str, num_draft_tokens: int | None, costs: CostTable | None, num_layers: int) -> None:
    """Raises where rounds are to be decided by costs that are not known, or not this model's."""
    option = f"exit_layer={AUTO!r}" if exit_layer == AUTO else f"draft_stop={ADAPTIVE!r}"
    if costs is None:
        raise ValueError(
            f"{option} needs to know what rounds cost, and the checkpoint does not say; run inference/compare_exits.py "
            "with --save, or pass a cost_table."
        )
    if costs.max_num_draft_tokens < 1:
        raise ValueError(f"{option}, but the cost table knows no round with drafts; measure anew.")
    if costs.exit_layers[-1] >= num_layers:
        raise ValueError(
            f"{option}, but the cost table has exits {list(costs.exit_layers)}, and the model has {num_layers} layers: "
            "it was measured on another one; measure anew."
        )
    if exit_layer != AUTO and exit_layer not in costs.exit_layers:
        raise ValueError(
            f"{option} with exit_layer={exit_layer}, but the cost table has exits {list(costs.exit_layers)}; take one "
            "of these, or measure anew."
        )
    if num_draft_tokens is not None and num_draft_tokens > costs.max_num_draft_tokens:
        raise ValueError(
            f"num_draft_tokens={num_draft_tokens} with {option}, but the cost table ends at "
            f"{costs.max_num_draft_tokens}; take no more than that, or measure anew."
        )


def _num_draft_tokens(asked: Wishes, metadata: Metadata, costs: CostTable | None) -> int:
    """Returns γ; where rounds are decided by cost, the longest that is known, since it is a limit only."""
    if asked.num_draft_tokens is not None:
        return asked.num_draft_tokens
    if costs is not None:
        return costs.max_num_draft_tokens
    if asked.tree_nodes is not None:
        # What the checkpoint recommends is the length of a chain.
        return DEFAULT_NUM_DRAFT_TOKENS
    stored = check_num_draft_tokens(metadata.num_draft_tokens, f"{STORED}num_draft_tokens")
    return DEFAULT_NUM_DRAFT_TOKENS if stored is None else stored


def _draft_vocab_size(asked: Wishes, metadata: Metadata, limits: Limits) -> int | None:
    """Returns how many of the draft token ids to draft from; `None` for the full head."""
    size = asked.draft_vocab_size
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
