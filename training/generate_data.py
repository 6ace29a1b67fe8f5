"""Makes training data of a model's own answers, the best data to teach its early layers what its last one says.

    python training/generate_data.py --model demo-base --prompts prompts.txt --out own.jsonl
    python training/generate_data.py --model PATH_OR_ID --prompts rows.jsonl --out own.jsonl --skip-unfinished --resume

Prompts are the lines of a .txt file, or the rows of a .jsonl file that have `prompt` (a string or a list of messages),
or `messages` (without the assistant's last turn), or `text`, the first of these that a row has; other columns are
ignored. Answers are greedy, those of all layers. Every line of the output is a row to train on:

    {"prompt": [{"role": "user", "content": "Name a river."}], "completion": "The Rhine.", "finish_reason": "stop"}

Rows stand in the order in which they are answered, the longest prompts first. Each batch is written when it is done, so
that a run that was interrupted goes on with --resume, which leaves out the prompts that the file has. Empty answers are
not written. The last line on standard output is a JSON object:

    {"rows", "already_there", "empty", "unfinished", "retokenized_differently", "tokens", "seconds",
     "tokens_per_second"}

`rows` were written by this run; `unfinished` answers ran into --max-new-tokens, and with --skip-unfinished they are not
among the rows. Training sees the tokens of a row's text, and EOS behind a finished one: in `retokenized_differently`
rows these are not the tokens that the model chose. `tokens` are all that it chose.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import layerskip
from layerskip.decoding.prompts import longest_first, read_prompts
from layerskip.files import drop_unfinished_line, whole_lines
from layerskip.program import answering_tokenizer, load_engine, run_program
from layerskip.prompt_file import Prompt, as_chat, json_rows, prompts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder, a hub id, demo or demo-base")
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="a .txt or .jsonl file")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --out, where there is one")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (default 256)")
    parser.add_argument("--skip-unfinished", action="store_true", help="leave out answers that --max-new-tokens cut")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts that are answered together (default 16)")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="send each string as a user message through the chat template; by default where the tokenizer has one",
    )
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--device", help="cpu, cuda, …; by default CUDA where there is a device")
    return parser.parse_args()


# --- Prompts ---------------------------------------------------------------------------------------------------------


def with_chat(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> list[Prompt]:
    """Returns the prompts as the model is asked them; `chat` is the user's choice, or `None`.

    Raises:
        ValueError: a chat template that is needed and not there, or not wanted.
    """
    if chat and tokenizer.chat_template is None:
        raise ValueError("--chat needs a chat template, and the model's tokenizer has none; leave --chat out.")
    if chat is not False:
        return as_chat(prompts, tokenizer)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("--no-chat was given, but some prompts are messages, which need a chat template.")
    return prompts


# --- The file of answers ---------------------------------------------------------------------------------------------


def check_output(path: Path, resume: bool) -> list[Prompt]:
    """Returns the prompts that the file of answers has already.

    Raises:
        ValueError: the file is there without `resume`, its folder is not, or it holds something else.
    """
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: the folder {path.parent} is not there; make it first.")
    if not path.exists():
        return []
    if not resume:
        raise ValueError(f"--out {path} is there already; go on with --resume, or choose another file.")
    answered = []
    for where, row in json_rows(whole_lines(path), f"--out {path}"):
        if not {"prompt", "completion", "finish_reason"} <= set(row):
            raise ValueError(f"{where} is no answer of this program; choose another file.")
        answered.append(row["prompt"])
    return answered


def without(prompts: list[Prompt], answered: list[Prompt]) -> list[Prompt]:
    """Returns the prompts that were not answered; one that occurs several times, as often as it is missing."""
    done = Counter(map(_key, answered))
    left = []
    for prompt in prompts:
        key = _key(prompt)
        if done[key]:
            done[key] -= 1
        else:
            left.append(prompt)
    return left


def _key(prompt: Prompt) -> str:
    return json.dumps(prompt, sort_keys=True)


# --- Answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A row, the number of its answer's tokens, and whether training will see these."""

    row: dict[str, Any]
    tokens: int
    seen_as_chosen: bool


@dataclass
class Report:
    """What a run did; the closing line of its output."""

    rows: int = 0
    already_there: int = 0
    empty: int = 0
    unfinished: int = 0
    retokenized_differently: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, int | float | None]:
        """Returns everything with the speed, which is `None` where nothing was generated."""
        return {**asdict(self), "tokens_per_second": self.tokens / self.seconds if self.seconds else None}

    def count(self, answer: Answer, skip_unfinished: bool) -> bool:
        """Counts an answer; returns whether it is to be written."""
        self.tokens += answer.tokens
        unfinished = answer.row["finish_reason"] == "length"
        if not answer.row["completion"].strip():
            self.empty += 1
            return False
        self.unfinished += unfinished
        if unfinished and skip_unfinished:
            return False
        self.rows += 1
        self.retokenized_differently += not answer.seen_as_chosen
        return True


def answer(engine: layerskip.Engine, prompts: list[Prompt], max_new_tokens: int) -> list[Answer]:
    """Returns the model's answers to one batch of prompts."""
    tokenizer: Any = engine.tokenizer
    result = engine.generate(prompts, strategy="autoregressive", do_sample=False, max_new_tokens=max_new_tokens)
    answers = []
    for prompt, text, finish_reason, chosen in zip(
        prompts, result.texts or [], result.finish_reasons, result.new_token_ids, strict=True
    ):
        seen = tokenizer(text, add_special_tokens=False)["input_ids"]
        if finish_reason == "stop":
            seen = [*seen, tokenizer.eos_token_id]
        row = {"prompt": prompt, "completion": text, "finish_reason": finish_reason}
        answers.append(Answer(row, len(chosen), seen == chosen))
    return answers


def generate_data(engine: layerskip.Engine, prompts: list[Prompt], arguments: argparse.Namespace) -> Report:
    """Answers the prompts, batch by batch, and appends each batch to the file; returns what was done."""
    report = Report()
    with tqdm(total=len(prompts), desc="Answering", unit="prompt") as bar:
        for first in range(0, len(prompts), arguments.batch_size):
            batch = prompts[first : first + arguments.batch_size]
            start = time.perf_counter()
            answers = answer(engine, batch, arguments.max_new_tokens)
            report.seconds += time.perf_counter() - start
            kept = [made for made in answers if report.count(made, arguments.skip_unfinished)]
            # Opened anew, so that a first batch that is refused leaves no empty file.
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(made.row, ensure_ascii=False) + "\n" for made in kept))
            bar.update(len(batch))
    return report


def run() -> None:
    """Reads the prompts, answers them, and reports."""
    arguments = parse_arguments()
    if arguments.batch_size < 1:
        raise ValueError(f"--batch-size {arguments.batch_size} is out of range; allowed are integers from 1 on.")
    prompts = prompts_of(arguments.prompts)
    answered = check_output(arguments.out, arguments.resume)
    engine = load_engine(arguments.model, ROOT, dtype=arguments.dtype, device=arguments.device)
    tokenizer = answering_tokenizer(engine, arguments.model)
    asked = with_chat(prompts, tokenizer, arguments.chat)
    left = without(asked, answered)
    if left:
        rows = read_prompts(left, tokenizer, None, engine.layered.vocab_size).rows
        left = [left[index] for index in longest_first(rows)]
    drop_unfinished_line(arguments.out)
    report = generate_data(engine, left, arguments)
    report.already_there = len(asked) - len(left)
    print(json.dumps(report.to_dict()))


if __name__ == "__main__":
    run_program(run)
