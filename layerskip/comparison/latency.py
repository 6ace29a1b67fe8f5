"""Measuring what rounds cost on this machine: real rounds of the engine, of every exit and length, none accepted."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from tqdm import tqdm

from layerskip.comparison.machine import describe_machine
from layerskip.decoding.choice import GreedyChoice, Sources
from layerskip.decoding.cost import CostTable
from layerskip.decoding.engine import Engine
from layerskip.decoding.loop import DecodeLoop
from layerskip.decoding.plan import Wishes
from layerskip.decoding.rows import DecodeSettings, Past
from layerskip.decoding.stopping import Stops
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from layerskip.model.readiness import check_ready

# Rounds between two prefills at most, each of which leaves one token more in the cache.
ROUNDS_PER_TEXT = 16
# Steps of plain decoding in a pass over all cells, since every ratio is over them.
PLAIN_STEPS = 5


class RejectingChoice(GreedyChoice):
    """Accepts no draft, so that rounds of any length can be run at any place of a text, whatever is drafted."""

    def verify(
        self, scores: torch.Tensor, drafts: Sequence[list[int]], sources: Sources
    ) -> tuple[list[int], list[int | None]]:
        """Returns no accepted draft for each row, and the token that follows its last one; see `GreedyChoice`."""
        targets: list[list[int]] = scores.argmax(-1).tolist()
        return [0] * len(drafts), [target[0] for target in targets]


@dataclass
class _Samples:
    """Seconds of draft steps by exit, and of the rest of a round by (exit, drafts)."""

    drafts: dict[int, list[float]] = field(default_factory=dict)
    verifications: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def add(self, exit_layer: int, drafts: int, seconds: dict[str, float]) -> None:
        """Notes a round by its phases; the draft phase of a round without drafts counts to its verification.

        So does what follows: on a GPU the verification is waited for only when its outcome is read there.
        """
        if drafts:
            self.drafts.setdefault(exit_layer, []).append(seconds["draft"] / drafts)
        verify = seconds["verify"] + seconds["other"] + (0 if drafts else seconds["draft"])
        self.verifications.setdefault((exit_layer, drafts), []).append(verify)


def measure_costs(
    engine: Engine,
    exit_layers: Sequence[int],
    max_num_draft_tokens: int,
    context: Sequence[int],
    repeats: int,
    *,
    rows: int = 1,
) -> CostTable:
    """Returns what rounds cost behind `context`: medians over `repeats` passes over all cells.

    In a pass every exit runs a round with 0 to `max_num_draft_tokens` drafts and plain decoding some steps, in an order
    that is shuffled anew, with the engine's own loop and draft head; a pass that is not timed comes first. The progress
    bar on standard error counts rounds.

    Args:
        engine: the model and its draft vocabulary.
        exit_layers: the exits, in rising order.
        max_num_draft_tokens: the longest round, at least 1.
        context: token ids that stand in the cache, at least one; as many as in use.
        repeats: at least 1.
        rows: how many rows decode together, each behind the same context and, as all reject, equally far behind it.

    Raises:
        ValueError: no repeat or row, an exit that the model does not have, or a text too long for it.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} measures nothing; pass 1 or more.")
    if rows < 1:
        raise ValueError(f"rows={rows} decodes nothing; pass 1 or more.")
    if not exit_layers or list(exit_layers) != sorted(set(exit_layers)):
        raise ValueError(f"exit_layers={list(exit_layers)} must be one or more layers, rising.")
    if not context:
        raise ValueError("context is empty; pass the token ids of a text, one or more.")
    layered = engine.layered
    plan = engine.plan("self_speculative", Wishes(exit_layers[0], max_num_draft_tokens))
    for exit_layer in exit_layers:
        engine.plan("self_speculative", Wishes(exit_layer, max_num_draft_tokens))
    check_ready(engine.model)
    drafted_ids = engine.drafted_token_ids(plan)
    cells = [(exit_layer, drafts) for exit_layer in exit_layers for drafts in range(max_num_draft_tokens + 1)]
    cells += [(layered.num_layers, 0)] * PLAIN_STEPS
    budget = rounds_length(max_num_draft_tokens)
    layered.check_length(len(context) + budget, [len(context)])
    settings = DecodeSettings(layered.num_layers, layered.num_layers, 0, Stops(budget))
    draws = random.Random(0)
    samples = _Samples()
    past = _past(layered, context[:-1], rows)
    with tqdm(total=len(cells) * (repeats + 1), desc="measuring costs", unit="round") as progress:
        for turn in range(repeats + 1):
            order = draws.sample(cells, len(cells))
            for first in range(0, len(order), ROUNDS_PER_TEXT):
                part = order[first : first + ROUNDS_PER_TEXT]
                loop = DecodeLoop(
                    layered,
                    [[context[-1]]] * rows,
                    settings,
                    choice=RejectingChoice(),
                    draft_token_ids=drafted_ids,
                    past=past,
                )
                for cell, seconds in zip(part, timed_rounds(loop, part), strict=True):
                    if turn:
                        samples.add(*cell, seconds)
                    progress.update()
    plain = statistics.median(samples.verifications[layered.num_layers, 0])
    state = torch.zeros(rows, 1, layered.config.hidden_size, dtype=layered.model.dtype, device=layered.device)
    head = _head_seconds(lambda: layered.logits(state).argmax(-1), repeats)
    draft_head = head
    if drafted_ids is not None:
        trimmed = DraftHead.of(layered, drafted_ids)
        draft_head = _head_seconds(lambda: trimmed.choose(state), repeats)
    return CostTable(
        exit_layers=tuple(exit_layers),
        draft_steps=tuple(statistics.median(samples.drafts[exit_layer]) for exit_layer in exit_layers),
        verifications=tuple(
            tuple(
                statistics.median(samples.verifications[exit_layer, drafts])
                for drafts in range(max_num_draft_tokens + 1)
            )
            for exit_layer in exit_layers
        ),
        autoregressive_step=plain,
        head=head,
        draft_head=draft_head,
        measured_on={
            **describe_machine(layered.model),
            "context": len(context),
            "draft_vocab_size": plan.draft_vocab_size,
            "repeats": repeats,
        },
        rows=rows,
    )


def rounds_length(max_num_draft_tokens: int) -> int:
    """Returns how many tokens the rounds between two prefills of `measure_costs` take at most."""
    return ROUNDS_PER_TEXT + max_num_draft_tokens + 2


def _past(layered: LayeredModel, context: Sequence[int], rows: int) -> Past | None:
    """Returns what stands before the last token of all rows; `None` where nothing does.

    It is processed once, for one row: all texts begin behind it, and long ones take longer to read than all rounds.
    """
    if not context:
        return None
    loop = DecodeLoop(layered, [list(context)], DecodeSettings(layered.num_layers, layered.num_layers, 0, Stops(1)))
    next(loop.blocks())
    layers = tuple((keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)) for keys, values in loop.kept())
    return Past(layers, (len(context),) * rows)


@torch.inference_mode()
def timed_rounds(loop: DecodeLoop, cells: Sequence[tuple[int, int]]) -> Iterator[dict[str, float]]:
    """Runs a round for each (exit, drafts) behind a prefill and yields its seconds by phase: draft, verify, other.

    Args:
        loop: not begun yet, with a budget for all rounds, whose rows accept alike.
        cells: what each round does; (L, 0) is a step of plain decoding.
    """
    rounds = loop.blocks()
    next(rounds)
    for exit_layer, drafts in cells:
        loop.chain.settings = replace(loop.chain.settings, exit_layer=exit_layer, num_draft_tokens=drafts)
        before = loop.seconds.copy()
        next(rounds)
        yield {phase: loop.seconds[phase] - before[phase] for phase in ("draft", "verify", "other")}


@torch.inference_mode()
def _head_seconds(choose: Callable[[], torch.Tensor], repeats: int) -> float:
    """Returns the median time of a head whose choice is read, over some calls behind one that is not timed."""
    times = []
    for _ in range(4 * repeats + 1):
        begin = time.perf_counter()
        choose().tolist()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
