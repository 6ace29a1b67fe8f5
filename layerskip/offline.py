"""Answers to the prompts of a file, made by one process or by the ranks of a launch, each with the whole model."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from layerskip.answer_parts import AnswerParts, Answers
from layerskip.comparison.machine import fingerprint
from layerskip.decoding.plan import NAMES, Wishes
from layerskip.decoding.prompts import longest_first, read_prompts
from layerskip.prompt_file import Prompt, PromptRow, as_chat, naming

if TYPE_CHECKING:
    from layerskip.decoding.engine import Engine

# How long a rank that is done waits for the others; the libraries' own limits are minutes.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Asking:
    """How prompts are asked.

    Attributes:
        options: of `Engine.generate`, `strategy` among them.
        chat: each string is a user's message.
        seed: with which the draws of every prompt begin; `None` for torch's global random numbers. A batch of several
            draws from one generator, so that its answers would depend on one another.
        batch_size: prompts that are answered together.
    """

    options: Mapping[str, Any]
    chat: bool = False
    seed: int | None = None
    batch_size: int = 1

    def prompts(self, engine: Engine, texts: Sequence[Prompt]) -> list[Prompt]:
        """Returns prompts as the model is asked them.

        Raises:
            TypeError, ValueError: options that the model does not have, or a chat template or a padding token is
                needed, and there is none.
        """
        wishes = {name: value for name, value in self.options.items() if name in NAMES}
        engine.plan(self.options["strategy"], Wishes(**wishes))
        if self.chat and (engine.tokenizer is None or engine.tokenizer.chat_template is None):
            raise ValueError("--chat needs a chat template, and the model's tokenizer has none; leave --chat out.")
        config = engine.model.generation_config
        if self.batch_size > 1 and config.pad_token_id is None and config.eos_token_id is None:
            raise ValueError(
                f"--batch-size {self.batch_size} needs a token that fills up rows, and the model's "
                "generation_config.json has neither pad_token_id nor eos_token_id; set one there, or leave it out."
            )
        return as_chat(texts, engine.tokenizer) if self.chat else list(texts)

    def begun(self) -> dict[str, Any]:
        """Returns the options of a call, which begins with the seed."""
        drawing = {} if self.seed is None else {"generator": torch.Generator().manual_seed(self.seed)}
        return {**self.options, **drawing}

    def lines(self, engine: Engine, texts: Sequence[Prompt], prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Answers a batch of prompts and returns prompt, text, token ids, finish reason and statistics of each.

        Args:
            engine: the model.
            texts, prompts: the prompts as they were given, and the same as the model is asked them.

        Raises:
            TypeError, ValueError: what `Engine.generate` refuses.
        """
        result = engine.generate(list(prompts), **self.begun())
        return [
            {
                "prompt": text,
                "text": None if result.texts is None else result.texts[row],
                "token_ids": result.new_token_ids[row],
                "finish_reason": result.finish_reasons[row],
                "statistics": (result.statistics if len(texts) == 1 else result.statistics.per_row[row]).to_dict(),
            }
            for row, text in enumerate(texts)
        ]


@dataclass(frozen=True)
class OfflineReport:
    """What a run has done.

    Attributes:
        answers: made by this run.
        already_there: made by earlier ones.
        tokens: of the answers of this run.
        seconds: that passed from when all ranks were ready.
        ranks: that took part; 0 where the file was whole already.
    """

    answers: int
    already_there: int
    tokens: int = 0
    seconds: float = 0.0
    ranks: int = 1

    def to_dict(self) -> dict[str, int | float | None]:
        """Returns everything with the speed, which is `None` where nothing was generated."""
        return {**vars(self), "tokens_per_second": self.tokens / self.seconds if self.tokens else None}


def answer_file(
    load: Callable[[str | torch.device], Engine],
    rows: Sequence[PromptRow],
    parts: AnswerParts,
    asking: Asking,
    *,
    resume: bool,
    device: str | None = None,
    loading: Mapping[str, Any],
    one_loads_first: bool = False,
) -> OfflineReport | None:
    """Answers the prompts of a file, each rank its share, the longest first, and writes the answers in their order.

    Every rank calls this. Whatever one has written stays if it or another one fails, and any number of them can go on
    from it.

    Args:
        load: makes the engine on a device.
        rows: the prompts.
        parts: where answers to just these prompts go.
        asking: how prompts are asked.
        resume: go on with what is there.
        device: of all ranks; by default each has the CUDA device of its number, or the CPU where there is none.
        loading: what else the answers depend on; with other values a run is not gone on with.
        one_loads_first: one rank makes what the others find made.

    Returns:
        What was done, on the first rank; `None` on others.

    Raises:
        OSError: something cannot be read or written.
        TypeError, ValueError: answers cannot go there, what is there is of another run, or a prompt cannot be answered,
            which is named.
    """
    settings = {
        "prompts": hashlib.sha256(json.dumps(parts.prompts).encode()).hexdigest(),
        "chat": asking.chat,
        "seed": asking.seed,
        **loading,
        **asking.options,
    }
    from accelerate import PartialState

    # Ranks only wait for each other: by gloo without CUDA, and where they may share a device.
    state = PartialState(cpu=device is not None or not torch.cuda.is_available(), timeout=PATIENCE)
    whole = OfflineReport(answers=0, already_there=len(rows), ranks=0) if state.is_main_process else None
    # What can be told before the model is loaded.
    if parts.check_place(resume=resume):
        state.destroy_process_group()
        return whole
    parts.check_settings(settings)
    with state.main_process_first() if one_loads_first else nullcontext():
        engine = load(device or state.device)
    settings["model"] = fingerprint(engine.model)
    prompts = asking.prompts(engine, parts.prompts)
    order = _longest_first(engine, rows, prompts)
    with parts.held() if state.is_main_process else nullcontext():
        state.wait_for_everyone()
        # Another run may have been here meanwhile.
        if parts.check_place(resume=resume):
            state.destroy_process_group()
            return whole
        parts.check_settings(settings)
        done = parts.answers()
        left = [index for index in order if index not in done]
        # All have read what is there before anything is written.
        state.wait_for_everyone()
        if state.is_main_process:
            parts.begin(settings)
        state.wait_for_everyone()
        start = time.perf_counter()
        share = left[state.process_index :: state.num_processes]
        with tqdm(total=len(share), desc="Answering", unit="prompt", disable=not state.is_main_process) as bar:
            for answers in _answers(engine, rows, prompts, share, asking):
                parts.add(state.process_index, answers)
                bar.update(len(answers))
        state.wait_for_everyone()
        report = None
        if state.is_main_process:
            seconds = time.perf_counter() - start
            merged = parts.merge()
            tokens = sum(len(merged[index]["token_ids"]) for index in left)
            report = OfflineReport(len(left), len(done), tokens, seconds, state.num_processes)
    state.destroy_process_group()
    return report


def _longest_first(engine: Engine, rows: Sequence[PromptRow], prompts: Sequence[Prompt]) -> list[int]:
    """Returns the indices of the prompts, those of most tokens first; raises ValueError for one that has none."""
    tokens = []
    for row, prompt in zip(rows, prompts, strict=True):
        with naming(row.where):
            tokens += read_prompts([prompt], engine.tokenizer, None, engine.layered.vocab_size).rows
    return longest_first(tokens)


def _answers(
    engine: Engine, rows: Sequence[PromptRow], prompts: Sequence[Prompt], share: Sequence[int], asking: Asking
) -> Iterator[Answers]:
    """Yields the answers to the prompts of a share, batch by batch, by their index."""
    for first in range(0, len(share), asking.batch_size):
        batch = share[first : first + asking.batch_size]
        with naming(", ".join(rows[index].where for index in batch)):
            lines = asking.lines(engine, [rows[index].prompt for index in batch], [prompts[index] for index in batch])
        yield dict(zip(batch, lines, strict=True))
