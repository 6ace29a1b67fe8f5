"""Comparing exits step by step: reading them on own answers, measuring costs, running the cells that promise most."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from layerskip.comparison.arms import engine_arm
from layerskip.comparison.batches import Batch, spread
from layerskip.comparison.benchmark import summarise, timed, warm_up
from layerskip.comparison.comparison_folder import ComparisonFolder, ReadAnswer
from layerskip.comparison.exit_comparison import ALL, ExitComparison, Recommendation
from layerskip.comparison.exit_report import draw, write_report
from layerskip.comparison.latency import measure_costs, rounds_length
from layerskip.comparison.machine import describe_machine, fingerprint
from layerskip.comparison.own_answers import answer
from layerskip.comparison.plain_greedy import left_out, plain_greedy
from layerskip.comparison.prediction import cells_to_run
from layerskip.comparison.quality import read_answers
from layerskip.decoding.engine import Engine
from layerskip.decoding.plan import Plan, Wishes
from layerskip.decoding.prompts import read_prompts
from layerskip.model.draft_head import TENSORS_FILE, write_draft_token_ids
from layerskip.model.metadata import update_metadata
from layerskip.prompt_file import Prompt


@dataclass(frozen=True)
class ComparisonSettings:
    """How exits are compared.

    Attributes:
        max_num_draft_tokens: the longest draft.
        max_new_tokens: the budget of an answer, at least 3, which leaves room for a draft.
        batch_size: prompts that are answered together.
        temperature: of the expected acceptance, above 0.
        run_cells: how many cells are run for real.
        run_rows: on how many of the prompts, spread over their categories.
        repeats: passes over these.
        cost_repeats: passes over all costs.
    """

    max_num_draft_tokens: int = 12
    max_new_tokens: int = 64
    batch_size: int = 8
    temperature: float = 1.0
    run_cells: int = 6
    run_rows: int = 12
    repeats: int = 3
    cost_repeats: int = 7


@dataclass
class Comparison:
    """A comparison that is under way.

    Attributes:
        engine: the model.
        prompts: strings or lists of messages.
        settings: how exits are compared.
        folder: what was done so far.
        about: what exits.json says beside that.
        found: what was found so far.
    """

    engine: Engine
    prompts: Sequence[Prompt]
    settings: ComparisonSettings
    folder: ComparisonFolder
    about: Mapping[str, Any]
    found: ExitComparison

    @classmethod
    def open(
        cls,
        engine: Engine,
        prompts: Sequence[Prompt],
        categories: Sequence[str | None],
        exit_layers: Sequence[int],
        settings: ComparisonSettings,
        path: Path,
        about: Mapping[str, Any],
        *,
        resume: bool,
    ) -> Comparison:
        """Returns a comparison that begins, or goes on where an interrupted one has ended.

        Args:
            engine: the model, with its draft vocabulary.
            prompts: strings, tokenised as they stand, or lists of messages.
            categories: of the prompts; `None` where one has none.
            exit_layers: in rising order.
            path: the folder of the comparison.
            about: what it is of, by name, such as the model.
            resume: whether a comparison that is there may be gone on with.

        Raises:
            OSError, ValueError: as `ComparisonFolder`.
            TypeError, ValueError: prompts that cannot be read, or are too long for the model.
        """
        rows = read_prompts(prompts, engine.tokenizer, None, engine.layered.vocab_size).rows
        lengths = list(map(len, rows))
        engine.layered.check_length(max(lengths) + settings.max_new_tokens, lengths)
        # What the rounds take whose costs are measured, behind a single token.
        engine.layered.check_length(1 + rounds_length(settings.max_num_draft_tokens))
        whole = {
            **about,
            "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            "categories": list(categories),
            "weights_sha256": fingerprint(engine.model),
            "left_out": left_out(engine.model),
            "exit_layers": list(exit_layers),
            "draft_vocab_size": _plan(engine, exit_layers).draft_vocab_size,
            **asdict(settings),
            **describe_machine(engine.model),
        }
        folder = ComparisonFolder(path, whole, resume=resume)
        found = ExitComparison(
            tuple(exit_layers),
            engine.layered.num_layers,
            settings.max_new_tokens,
            tuple(categories),
            folder.answers(),
            folder.costs(),
        )
        return cls(engine, prompts, settings, folder, whole, found)

    def read_exits(self) -> None:
        """Lets all layers answer the prompts greedily, and reads the exits on the answers.

        Raises:
            TypeError, ValueError: what `Engine.generate` refuses, and where every answer ends with its first token.
        """
        settings, engine, answers = self.settings, self.engine, self.found.answers
        drafted = engine.drafted_token_ids(_plan(engine, self.found.exit_layers))
        with plain_greedy(engine.model):
            for batch in answer(engine, self.prompts, settings.max_new_tokens, settings.batch_size, done=answers):
                readings = read_answers(
                    engine.layered,
                    [made.prompt_ids for made in batch],
                    [made.token_ids for made in batch],
                    self.found.exit_layers,
                    draft_token_ids=drafted,
                    temperature=settings.temperature,
                )
                read = [
                    ReadAnswer(made.index, made.prompt_ids, made.token_ids, made.finish_reason, reading)
                    for made, reading in zip(batch, readings, strict=True)
                ]
                self.folder.add_answers(read)
                answers.update({made.index: made for made in read})
        if not any(made.reading.tokens for made in answers.values()):
            raise ValueError("every answer ends with its first token, so that nothing can be drafted; pass others.")
        self.write()

    def measure_costs(self) -> None:
        """Measures what rounds cost behind a prompt of middling length and half of its answer."""
        if self.found.costs is not None:
            return
        by_length = sorted(self.found.answers.values(), key=lambda made: len(made.prompt_ids) + len(made.token_ids))
        middle = by_length[len(by_length) // 2]
        context = middle.prompt_ids + middle.token_ids[: len(middle.token_ids) // 2]
        rounds = rounds_length(self.settings.max_num_draft_tokens)
        try:
            self.engine.layered.check_length(len(context) + rounds, [len(context)])
        except ValueError:
            # As much of it as is known to fit the model.
            fits = max(len(made.prompt_ids) for made in by_length) + self.settings.max_new_tokens
            context = context[: max(1, fits - rounds)]
        longest, repeats = self.settings.max_num_draft_tokens, self.settings.cost_repeats
        costs = measure_costs(self.engine, self.found.exit_layers, longest, context, repeats)
        self.folder.write_costs(costs)
        self.found = replace(self.found, costs=costs)
        self.write()

    def run_cells(self) -> Recommendation:
        """Runs the best cells and plain decoding for real, in turns, and returns what they recommend."""
        engine, settings = self.engine, self.settings
        # An answer of one token leaves nothing to time.
        timeable = [index for index, made in sorted(self.found.answers.items()) if made.reading.tokens]
        categories = [self.found.categories[index] for index in timeable]
        indices = [timeable[place] for place in spread(categories, settings.run_rows)]
        places = [cell.place for cell in cells_to_run(self.found.cells(), settings.run_cells)]
        cells = [cell for cell in self.found.cells(indices) if cell.place in places]
        arms = [engine_arm("autoregressive", engine, strategy="autoregressive", stop_at_eos=True)]
        arms += [
            engine_arm("self_speculative", engine, exit_layer=exit_layer, num_draft_tokens=drafts, stop_at_eos=True)
            for exit_layer, drafts in (cell.place for cell in cells)
        ]
        batches = [Batch.of([self.found.answers[index].prompt_ids], engine.layered.device) for index in indices]
        samples = self.folder.samples()
        done = {(sample.arm, sample.batch, sample.repeat) for sample in samples}
        with plain_greedy(engine.model):
            if len(done) < len(arms) * len(batches) * settings.repeats:
                warm_up(arms, batches, settings.max_new_tokens)
            for sample in timed(arms, batches, settings.max_new_tokens, settings.repeats, done=done):
                self.folder.add_sample(sample)
                samples.append(sample)
        self.found = self.found.with_measured(cells, summarise(arms, samples))
        return self.found.recommendation(self.is_trained)

    @property
    def is_trained(self) -> bool:
        """Whether the checkpoint says that exits were trained."""
        return bool(self.engine.metadata.exit_layers)

    def recommendation(self) -> Recommendation | None:
        """Returns what real runs recommend; `None` before them."""
        return self.found.recommendation(self.is_trained) if self.found.measured else None

    def write(self) -> None:
        """Writes exits.json and exits.csv from what there is."""
        write_report(self.folder.path, self.found, self.recommendation(), self.about)

    def draw(self) -> list[Path]:
        """Draws what there is data for, and returns the files."""
        tokenizer = self.engine.tokenizer
        decode = str if tokenizer is None else lambda token: str(tokenizer.decode([token]))
        return draw(self.folder.path, self.found, self.recommendation(), decode)

    def save(self, checkpoint: Path) -> None:
        """Writes what real runs recommend, and the costs, into the checkpoint's folder.

        Raises:
            OSError: a file cannot be written.
            ValueError: nothing was run yet.
        """
        best, costs, engine = self.recommendation(), self.found.costs, self.engine
        if best is None or costs is None:
            raise ValueError("nothing was run yet, so that there is nothing to save; call run_cells first.")
        size, ids = _plan(engine, self.found.exit_layers).draft_vocab_size, engine.draft_token_ids
        if ids is not None:
            # The full head, where a list of ids would mean all of them.
            size = engine.layered.vocab_size if size is None else size
            if not (checkpoint / TENSORS_FILE).is_file():
                write_draft_token_ids(checkpoint, ids)
        trained = {"exit_layers": list(engine.metadata.exit_layers)} if self.is_trained else {}
        update_metadata(
            checkpoint,
            {
                **trained,
                "exit_layer": best.exit_layer,
                "num_draft_tokens": best.num_draft_tokens,
                "draft_vocab_size": size,
                "cost_table": replace(costs, acceptance=self._agreement(costs.exit_layers)).to_dict(),
            },
        )

    def _agreement(self, exit_layers: Sequence[int]) -> tuple[float, ...]:
        """Returns how often each exit's first choice is the full model's, over all answers; `()` where one is new."""
        rates = {each.exit_layer: each.agreement for each in self.found.quality()[ALL]}
        return tuple(rates[layer] for layer in exit_layers) if rates.keys() >= set(exit_layers) else ()


def _plan(engine: Engine, exit_layers: Sequence[int]) -> Plan:
    """Returns how drafts are made, whatever the exit."""
    return engine.plan("self_speculative", Wishes(exit_layers[0], 1))
