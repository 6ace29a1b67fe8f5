"""The levers of self-speculative decoding, alone and together: how each is run, what it is predicted to give, and gave.

A prediction is what the rounds of a run cost by a `CostTable` of the same machine; what it leaves out, such as the
scoring of exits and wider passes for copied spans and trees, shows as a measured speed below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerskip.comparison.benchmark import Measurement
from layerskip.comparison.forced import LOGIT_ROWS, answer_states, following
from layerskip.comparison.table import format_table
from layerskip.decoding.cost import CostTable, expected_tokens
from layerskip.decoding.plan import ADAPTIVE, AUTO, CHECKED, TRUSTED
from layerskip.decoding.tree_drafting import best_choices
from layerskip.model.layered import LayeredModel

BASELINE = "autoregressive"
# Of an exit's first choices, how many are looked at for the right token.
TOP = (1, 2, 4, 8)
# Answers that pass together.
ANSWERS = 8
HEADER = (
    *("lever", "E", "γ", "predicted", "measured", "lowest", "highest", "tokens_per_round", "draft_acceptance_rate"),
    *("V_per_round", "rounds_by_exit", "same_as_first"),
)


@dataclass(frozen=True)
class LeverSettings:
    """What the levers are run with.

    Attributes:
        exit_layer, num_draft_tokens: E and γ of the static lever, and of what changes nothing about them; `None` where
            there is no such exit, and then levers that need one are left out.
        longest: γ where rounds are decided by cost, which is a limit only.
        tree_nodes: the sizes of the trees.
        tree_depth: how deep they are at most; `None` for the engine's own choice.
        compile: whether there are compiled levers.
    """

    exit_layer: int | None
    num_draft_tokens: int | None
    longest: int
    tree_nodes: tuple[int, ...] = ()
    tree_depth: int | None = None
    compile: bool = False


def lever_names(tree_nodes: Sequence[int], compile: bool) -> list[str]:
    """Returns the names of all levers, plain decoding first."""
    names = [BASELINE, "static", "adaptive", "ngrams", "trusted", "adaptive+ngrams", "auto", "all", "all-trusted"]
    names += [f"tree-{nodes}" for nodes in tree_nodes]
    return [*names, "compiled-autoregressive", "compiled-static"] if compile else names


def needs_exit(name: str) -> bool:
    """Whether a lever has an exit that is fixed."""
    return name not in (BASELINE, "auto", "all", "all-trusted", "compiled-autoregressive")


def lever_options(settings: LeverSettings) -> dict[str, dict[str, Any]]:
    """Returns what `engine_arm` takes for each lever, by name, in the order of `lever_names`."""
    static = {"exit_layer": settings.exit_layer, "num_draft_tokens": settings.num_draft_tokens}
    adaptive = {"exit_layer": settings.exit_layer, "num_draft_tokens": settings.longest, "draft_stop": ADAPTIVE}
    auto = {"exit_layer": AUTO, "num_draft_tokens": settings.longest}
    tree = {"exit_layer": settings.exit_layer, "num_draft_tokens": settings.tree_depth}
    options: dict[str, dict[str, Any]] = {
        BASELINE: {"strategy": BASELINE},
        "static": static,
        "adaptive": adaptive,
        "ngrams": {**static, "copy_ngrams": CHECKED},
        "trusted": {**static, "copy_ngrams": TRUSTED},
        "adaptive+ngrams": {**adaptive, "copy_ngrams": CHECKED},
        "auto": auto,
        "all": {**auto, "draft_stop": ADAPTIVE, "copy_ngrams": CHECKED},
        "all-trusted": {**auto, "draft_stop": ADAPTIVE, "copy_ngrams": TRUSTED},
        **{f"tree-{nodes}": {**tree, "tree_nodes": nodes} for nodes in settings.tree_nodes},
        "compiled-autoregressive": {"strategy": BASELINE, "compile": True},
        "compiled-static": {**static, "compile": True},
    }
    names = lever_names(settings.tree_nodes, settings.compile)
    return {name: options[name] for name in names if settings.exit_layer is not None or not needs_exit(name)}


# --- Predicted and measured -------------------------------------------------------------------------------------------


def predicted_speed(
    work: Mapping[tuple[int, int, int], int], table: CostTable, tokens: int, num_layers: int
) -> float | None:
    """Returns the speed of some rounds over plain decoding of the same tokens: what both cost by the table.

    A pass that drafts counts as one of a single token, however wide it was.

    Args:
        work: {(E, steps, V): rounds}, as in `Tally.work`; rounds of the last layer are steps of plain decoding, or
            drafted copies alone.
        table: what rounds cost.
        tokens: that the rounds emitted.
        num_layers: L.

    Returns:
        The speed; `None` without rounds, or where an exit or a width V was not measured.
    """
    seconds = 0.0
    for (exit_layer, steps, verified), rounds in work.items():
        if verified > table.max_num_draft_tokens or exit_layer not in (*table.exit_layers, num_layers):
            return None
        is_plain = exit_layer == num_layers
        cost = table.plain_seconds(verified) if is_plain else table.seconds(exit_layer, steps, verified)
        seconds += rounds * cost
    return tokens * table.autoregressive_step / seconds if seconds else None


@dataclass(frozen=True)
class LeverFigures:
    """What one lever was predicted to give, and gave.

    Attributes:
        label: of its arm.
        lever: its name.
        exit_layer: E; "auto" where it is chosen between rounds; `None` without one.
        num_draft_tokens: γ; `None` where nothing is drafted.
        predicted: speed over plain decoding, by the costs of the rounds that it ran; `None` where the table does not
            have them, and for compiled rounds, which cost something else.
        measured: speed over plain decoding in the same runs, median over repeats.
        lowest, highest: the same, of the slowest and the fastest repeat.
        tokens_per_round: tokens after the first ones over rounds; `None` without rounds, as the two that follow.
        draft_acceptance_rate: accepted over drafted, of a tree over its depth; `None` where nothing was drafted.
        verified_per_round: V over rounds.
        rounds_by_exit: {E: rounds}; those of the last layer are steps of plain decoding.
        same_as_first, answers: answers that are plain decoding's token by token in every repeat, and how many there
            are.
    """

    label: str
    lever: str
    exit_layer: int | str | None
    num_draft_tokens: int | None
    predicted: float | None
    measured: float
    lowest: float
    highest: float
    tokens_per_round: float | None
    draft_acceptance_rate: float | None
    verified_per_round: float | None
    rounds_by_exit: dict[int, int]
    same_as_first: int | None
    answers: int

    @classmethod
    def of(cls, measured: Measurement, table: CostTable, num_layers: int) -> LeverFigures:
        """Returns the figures of a lever from what was measured; the table and L are as of `predicted_speed`."""
        work = {(exit_layer, steps, verified): rounds for exit_layer, steps, verified, rounds in measured.work}
        rounds = sum(work.values())
        by_exit = {exit_layer: 0 for exit_layer, _, _ in sorted(work)}
        for (exit_layer, _, _), count in work.items():
            by_exit[exit_layer] += count
        is_compiled = measured.name.startswith("compiled")
        return cls(
            label=measured.label,
            lever=measured.name,
            exit_layer=measured.exit_layer,
            num_draft_tokens=measured.num_draft_tokens,
            predicted=None if is_compiled else predicted_speed(work, table, measured.decoded, num_layers),
            measured=measured.ratio,
            lowest=measured.lowest_ratio,
            highest=measured.highest_ratio,
            tokens_per_round=measured.decoded / rounds if rounds else None,
            draft_acceptance_rate=measured.draft_acceptance_rate,
            verified_per_round=sum(key[2] * count for key, count in work.items()) / rounds if rounds else None,
            rounds_by_exit=by_exit,
            same_as_first=measured.same_as_first,
            answers=measured.answers,
        )


# --- What wider drafts could give -------------------------------------------------------------------------------------


@torch.inference_mode()
def top_k_rates(
    layered: LayeredModel,
    prompt_ids: Sequence[list[int]],
    new_tokens: Sequence[list[int]],
    exit_layers: Sequence[int],
    draft_token_ids: torch.Tensor | None = None,
) -> dict[int, dict[int, float]]:
    """Returns for each exit how often the model's own next token is among the exit's first k choices, {E: {k: rate}}.

    Args:
        layered: the model, in eval mode.
        prompt_ids: the prompts' tokens.
        new_tokens: the model's greedy answers, at least one token each.
        exit_layers: the exits, counted from 1.
        draft_token_ids: what is drafted from, `(ids,)`, ascending; `None` for all ids.

    Raises:
        ValueError: no answer has a second token, which a round could draft.
    """
    tokens = sum(len(answer) - 1 for answer in new_tokens)
    if not tokens:
        raise ValueError("every answer ends with its first token, so that nothing can be drafted; pass others.")
    hits = {exit_layer: dict.fromkeys(TOP, 0) for exit_layer in exit_layers}
    for first in range(0, len(new_tokens), ANSWERS):
        prompts, answers = prompt_ids[first : first + ANSWERS], new_tokens[first : first + ANSWERS]
        follow = following(answers).to(layered.device)
        for exit_layer, states in answer_states(layered, prompts, answers, exit_layers):
            for found in _found(layered, states, follow, draft_token_ids):
                for k in TOP:
                    hits[exit_layer][k] += int(found[:, :k].sum())
    return {exit_layer: {k: count / tokens for k, count in counts.items()} for exit_layer, counts in hits.items()}


def _found(
    layered: LayeredModel, states: torch.Tensor, follow: torch.Tensor, ids: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """Yields for some tokens at a time which of an exit's first choices is the one that follows, `(tokens, k)` bool."""
    chosen_from = None if ids is None else ids.to(layered.device)
    for chunk, wanted in zip(states.split(LOGIT_ROWS), follow.split(LOGIT_ROWS), strict=True):
        if not len(chunk):
            continue
        logits = layered.logits(chunk).to(layered.device)
        drafted = logits if chosen_from is None else logits[:, chosen_from]
        choices, _ = best_choices(drafted, chosen_from, count=max(TOP))
        yield choices == wanted.unsqueeze(1)


@dataclass(frozen=True)
class FullTree:
    """A full tree: every node down to the last depth has k children. With k = 1 it is a chain.

    Attributes:
        exit_layer: E.
        children: k.
        rate: how often the right token is among the exit's first k choices.
        depth: of the leaves.
        nodes: k + k² + … + k^depth.
        tokens_per_round: on average.
        predicted: speed over plain decoding.
    """

    exit_layer: int
    children: int
    rate: float
    depth: int
    nodes: int
    tokens_per_round: float
    predicted: float


def full_tree(table: CostTable, exit_layer: int, children: int, rate: float, depth: int) -> FullTree | None:
    """Returns what rounds that draft a full tree would give; `None` where the table does not reach so many nodes.

    A round emits 1 + Σ rate^d tokens, d = 1..depth, and takes `table.seconds(E, depth, nodes)`. That assumes that the
    right token is among the first k choices at every depth as often as on average, whatever came before it; and that a
    pass over a whole level of the tree takes what a pass over one token takes. The engine's trees are not full: they
    spend their nodes where the exit is sure, and may do better with as many.

    Args:
        table: what rounds cost.
        exit_layer: E.
        children: k, at least 1.
        rate: in [0, 1].
        depth: at least 1.
    """
    nodes = sum(children**level for level in range(1, depth + 1))
    if nodes > table.max_num_draft_tokens:
        return None
    tokens = expected_tokens(rate, depth)
    predicted = tokens * table.autoregressive_step / table.seconds(exit_layer, depth, nodes)
    return FullTree(exit_layer, children, rate, depth, nodes, tokens, predicted)


def best_trees(table: CostTable, rates: Mapping[int, Mapping[int, float]]) -> list[FullTree]:
    """Returns for each exit and k the full tree of the depth that is predicted to be fastest, of those that fit.

    Args:
        table: what rounds cost.
        rates: {E: {k: rate}}; exits that the table has.
    """
    best = []
    for exit_layer, by_children in rates.items():
        for children, rate in by_children.items():
            depths = range(1, table.max_num_draft_tokens + 1)
            trees = [full_tree(table, exit_layer, children, rate, depth) for depth in depths]
            fitting = [tree for tree in trees if tree is not None]
            if fitting:
                best.append(max(fitting, key=lambda tree: tree.predicted))
    return best


# --- As tables --------------------------------------------------------------------------------------------------------


def levers_table(figures: Sequence[LeverFigures]) -> str:
    """Returns a line for each lever; rounds by exit are told as E:rounds."""
    rows: list[list[object]] = []
    for each in figures:
        by_exit = " ".join(f"{exit_layer}:{rounds}" for exit_layer, rounds in each.rounds_by_exit.items())
        row = [each.lever, each.exit_layer, each.num_draft_tokens, each.predicted, each.measured, each.lowest]
        row += [each.highest, each.tokens_per_round, each.draft_acceptance_rate, each.verified_per_round]
        rows.append([*row, by_exit or None, f"{each.same_as_first} of {each.answers}"])
    return format_table(HEADER, rows)


def costs_table(costs: CostTable) -> str:
    """Returns a line for each exit: c, and what verifications cost, in steps of plain decoding."""
    widest = costs.max_num_draft_tokens
    widths = [width for width in (0, 1, 2, 4, 8, 16, 32) if width < widest] + [widest]
    header = ["costs in plain steps", "c", *(f"V={width}" for width in widths)]
    return format_table(
        header,
        [
            [f"E={exit_layer}", costs.c(exit_layer), *(costs.verify_cost(exit_layer, width) for width in widths)]
            for exit_layer in costs.exit_layers
        ],
    )


def top_k_table(rates: Mapping[int, Mapping[int, float]], trees: Sequence[FullTree]) -> str:
    """Returns a line for each exit: how often the right token is among its first k choices, and the best full trees.

    A tree is told as its predicted speed and its depth; with k = 1 it is a chain.
    """
    best = {(tree.exit_layer, tree.children): f"{tree.predicted:.2f} ({tree.depth} deep)" for tree in trees}
    header = ["exit", *(f"top {k}" for k in TOP), "chain", *(f"tree of {k}" for k in TOP[1:])]
    rows = [
        [f"E={exit_layer}", *by_k.values(), *(best.get((exit_layer, k)) for k in TOP)]
        for exit_layer, by_k in rates.items()
    ]
    return format_table(header, rows)
