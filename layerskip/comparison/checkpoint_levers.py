"""What levers give on a trained checkpoint and its prompts, at the exit and the draft length that its costs advise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from layerskip.comparison.arms import Arm, engine_arm
from layerskip.comparison.batches import Batch, make_batches
from layerskip.comparison.benchmark import Sample, summarise, timed
from layerskip.comparison.latency import measure_costs
from layerskip.comparison.levers import BASELINE, LeverFigures, LeverSettings, lever_options
from layerskip.comparison.prediction import Cell, best_cell, predict
from layerskip.comparison.quality import Reading, read_answers
from layerskip.comparison.time_limit import Part
from layerskip.decoding.compiled import rounded_capacity
from layerskip.decoding.cost import CostTable
from layerskip.decoding.engine import Engine
from layerskip.decoding.plan import Wishes
from layerskip.prompt_file import PromptRow

TREE_NODES = 16
EAGER = (BASELINE, "static", "adaptive", "auto", "all", f"tree-{TREE_NODES}")
COMPILED = ("compiled-autoregressive", "compiled-static")


@dataclass(frozen=True)
class CheckpointSettings:
    """How much is measured.

    Attributes:
        max_new_tokens: the budget of an answer, which ends at the model's end-of-sequence tokens.
        repeats: timed passes over all prompts.
        cost_repeats: passes over all costs.
        max_num_draft_tokens: the longest round whose cost is measured.
    """

    max_new_tokens: int = 64
    repeats: int = 3
    cost_repeats: int = 3
    max_num_draft_tokens: int = 16


class CheckpointRun:
    """Measures one checkpoint; what measurements share is made when the first of them needs it."""

    def __init__(
        self,
        load: Callable[[], tuple[Engine, Sequence[PromptRow]]],
        settings: CheckpointSettings,
    ) -> None:
        """Loads nothing yet.

        Args:
            load: returns an engine for the checkpoint, and the prompts.
            settings: how much is measured.
        """
        self._load = load
        self.settings = settings

    @cached_property
    def loaded(self) -> tuple[Engine, list[Batch]]:
        """The checkpoint, and its prompts as batches of one: those that one compiled graph can serve.

        A graph is made for a capacity of the cache; prompts that need another one than most are left out.
        """
        engine, rows = self._load()
        batches, _ = make_batches(rows, engine, 1)
        budget = self.settings.max_new_tokens
        capacities = [rounded_capacity(engine.layered, batch.ids.shape[1] + budget) for batch in batches]
        ((most, _),) = Counter(capacities).most_common(1)
        return engine, [batch for batch, capacity in zip(batches, capacities, strict=True) if capacity == most]

    @cached_property
    def costs(self) -> CostTable:
        """What rounds cost behind the prompt of median length.

        Raises:
            ValueError: a checkpoint that does not say which exits were trained.
        """
        engine, batches = self.loaded
        if not engine.metadata.exit_layers:
            raise ValueError("the checkpoint does not say which exits were trained; take one that does.")
        prompts = sorted((batch.ids[0].tolist() for batch in batches), key=len)
        return measure_costs(
            engine,
            sorted(engine.metadata.exit_layers),
            self.settings.max_num_draft_tokens,
            prompts[len(prompts) // 2],
            self.settings.cost_repeats,
        )

    @cached_property
    def readings(self) -> list[Reading]:
        """What the exits make of the model's own answers.

        Raises:
            ValueError: answers of one token each.
        """
        engine, batches = self.loaded
        plain = engine_arm(BASELINE, engine, stop_at_eos=self._stops(engine), strategy=BASELINE)
        answers = [plain.generate(batch, self.settings.max_new_tokens).token_ids[0] for batch in batches]
        ids = engine.drafted_token_ids(engine.plan("self_speculative", Wishes(self.costs.exit_layers[0], 1)))
        prompts = [batch.ids[0].tolist() for batch in batches]
        readings = read_answers(engine.layered, prompts, answers, self.costs.exit_layers, draft_token_ids=ids)
        if not any(reading.tokens for reading in readings):
            raise ValueError("every answer ends with its first token, so that nothing can be drafted; pass others.")
        return readings

    @cached_property
    def cell(self) -> Cell:
        """The exit and the draft length that the costs and the answers advise."""
        exits = self.costs.exit_layers
        matches = {layer: [reading.matches[place] for reading in self.readings] for place, layer in enumerate(exits)}
        return best_cell(predict(matches, self.costs, self.settings.max_new_tokens))

    @property
    def agreement(self) -> tuple[float, ...]:
        """How often each exit's first choice is the model's own next token."""
        found = []
        for place in range(len(self.costs.exit_layers)):
            matches = [match for reading in self.readings for match in reading.matches[place]]
            found.append(sum(matches) / len(matches))
        return tuple(found)

    def _stops(self, engine: Engine) -> bool:
        return engine.model.generation_config.eos_token_id is not None

    def measure_costs(self) -> dict[str, Any]:
        """Returns the table of costs, each exit's agreement with the model, and the cell that follows from both."""
        return {
            "prompts": len(self.loaded[1]),
            "cost_table": self.costs.to_dict(),
            "agreement": dict(zip(self.costs.exit_layers, self.agreement, strict=True)),
            "best_cell": asdict(self.cell),
        }

    def measure_levers(self, names: Sequence[str]) -> Iterator[Part]:
        """Yields the figures of some levers after every prompt that all have answered.

        Every lever has run on the first prompt before; `first_call_seconds` is what that took longer than later.

        Args:
            names: of `lever_options`; the first one is plain decoding, which the others are compared with.

        Raises:
            ValueError: the first one fails.
        """
        engine, batches = self.loaded
        arms = self.lever_arms(names)
        budget, failed, samples = self.settings.max_new_tokens, dict[str, str](), list[Sample]()
        first = {each.arm: each.run.seconds for each in timed(arms, batches[:1], budget, 1, failed=failed)}
        places = [(repeat, index) for repeat in range(self.settings.repeats) for index in range(len(batches))]
        for repeat, index in places:
            for each in timed(arms, [batches[index]], budget, 1, failed=failed):
                samples.append(replace(each, batch=index, repeat=repeat))
            if arms[0].label in failed:
                raise ValueError(f"{names[0]}, which all others are compared with, failed: {failed[arms[0].label]}")
            sound = [arm for arm in arms if arm.label not in failed]
            figures = self._figures(sound, samples, first, engine.layered.num_layers)
            yield Part({"levers": figures, "failed": failed}, (repeat, index) == places[-1])

    def lever_arms(self, names: Sequence[str]) -> list[Arm]:
        """Returns the arms of some levers, on an engine that decides by the measured costs."""
        engine, _ = self.loaded
        deciding = Engine(
            engine.model,
            engine.tokenizer,
            draft_vocab_size=engine.draft_vocab_size,
            draft_token_ids=engine.draft_token_ids,
            cost_table=replace(self.costs, acceptance=self.agreement),
        )
        longest = self.settings.max_num_draft_tokens
        options = lever_options(LeverSettings(*self.cell.place, longest, (TREE_NODES,), compile=True))
        return [engine_arm(name, deciding, stop_at_eos=self._stops(engine), **options[name]) for name in names]

    def _figures(
        self, arms: Sequence[Arm], samples: Sequence[Sample], first: dict[str, float], num_layers: int
    ) -> list[dict[str, Any]]:
        """Returns what was measured of each arm, by name; raises ValueError where an answer has but one token."""
        later = {each.arm: each.run.seconds for each in samples if each.batch == 0}
        return [
            {
                **asdict(each),
                **asdict(LeverFigures.of(each, self.costs, num_layers)),
                "first_call_seconds": first[each.label] - later[each.label],
            }
            for each in summarise(arms, samples)
        ]
