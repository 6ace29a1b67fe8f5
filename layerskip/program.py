"""What the command-line programs share."""

from __future__ import annotations

import itertools
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip import demo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from layerskip.decoding.engine import Engine
    from layerskip.decoding.result import GenerationResult, StreamEvent
    from layerskip.decoding.text import GrowingText

# The demo's adapters in a checkout; they are no part of the installed package.
DIFFERENCE = "inference/checkpoints/smollm2-135m-commands"
GREEN, RESET = "\033[32m", "\033[0m"


def run_program(run: Callable[[], None]) -> None:
    """Runs a program; a mistake of its user ends it with status 2 and one line that says what to do."""
    try:
        run()
    except BrokenPipeError:
        # Whoever reads the output has seen enough; Python would complain once more when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, ImportError, demo.FetchError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def load_engine(model: str, checkout: Path, **options: Any) -> Engine:
    """Returns an engine for what `--model` names; the demo model is fetched first where it is missing.

    Args:
        model: a local folder, a hub id, `demo` (the demo model with the checkout's adapters) or `demo-base` (the demo
            model alone).
        checkout: root of the checkout whose program is running.
        **options: of `layerskip.load`.

    Raises:
        FetchError, ImportError, OSError: the demo model could not be made.
        ValueError: as `layerskip.load`, and where the checkout's adapters are missing or damaged.
    """
    from layerskip.decoding.load import load

    if model == "demo":
        return demo.load(difference_folder(checkout), **options)
    return load(model_path(model), **options)


def model_path(model: str) -> str:
    """Returns the folder or hub id of a whole model; `demo-base` is fetched first where it is missing.

    Raises:
        FetchError, ImportError, OSError: the demo model could not be made.
        ValueError: `demo`, which is adapters on another model.
    """
    if model == "demo":
        raise ValueError(
            "model 'demo' is adapters on top of demo-base: train from demo-base; to go on from adapters use "
            "lora.continue_from."
        )
    return str(demo.fetch()) if model == "demo-base" else model


def writable_checkpoint(model: str, checkout: Path) -> Path:
    """Returns the folder whose metadata are those of what `--model` names, for --save.

    Raises:
        ValueError: there is no such folder, or it is not the user's own.
    """
    if model == "demo-base":
        raise ValueError("--save cannot write into --model demo-base, whose files are checked; copy its folder first.")
    folder = difference_folder(checkout) if model == "demo" else Path(model)
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise ValueError(f"--save needs a local checkpoint, and --model {model} is no folder that holds one.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--save cannot write into {folder}, the folder of --model {model}; copy it first.")
    return folder


def difference_folder(checkout: Path) -> Path:
    """Returns the folder of the demo's adapters in a checkout.

    Raises:
        ValueError: there is no such folder.
    """
    folder = checkout / DIFFERENCE
    if not folder.is_dir():
        raise ValueError(
            f"model 'demo' needs the adapters in {folder}, which are not there. Run the program from a whole checkout, "
            "in which they are, or take demo-base, the model without them."
        )
    return folder


def add_color(parser: ArgumentParser) -> None:
    """Adds the option --color."""
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="green for tokens that were drafted and accepted; auto (default): on a terminal, unless NO_COLOR is set",
    )


def use_color(choice: str) -> bool:
    """Whether to colour the output; `choice` is auto, always or never."""
    return choice == "always" or (choice == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def painted(event: StreamEvent, text: GrowingText) -> Iterator[str]:
    """Yields the text of an event in runs of tokens, accepted drafts in green; no character is ever split."""
    for accepted, run in itertools.groupby(zip(event.token_ids, event.accepted, strict=True), lambda pair: pair[1]):
        piece = text.add(tuple(token for token, _ in run))
        yield f"{GREEN}{piece}{RESET}" if accepted and piece else piece
    if event.result is not None:
        yield text.finish()


def show_stream(
    events: Iterator[StreamEvent], tokenizer: PreTrainedTokenizerBase | None, color: bool
) -> GenerationResult:
    """Prints an answer as it is settled and returns its result, which the last event carries.

    Args:
        events: of `Engine.stream`.
        tokenizer: the engine's; without one there is no text to print.
        color: whether accepted drafts are green.
    """
    from layerskip.decoding.text import GrowingText

    text = None if tokenizer is None else GrowingText(tokenizer)
    while True:
        event = next(events)
        for piece in painted(event, text) if color and text is not None else (event.text,):
            print(piece, end="", flush=True)
        if event.result is not None:
            return event.result


def answering_tokenizer(engine: Engine, model: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of an engine whose answers are to end, for what `--model` names.

    Raises:
        ValueError: no tokenizer, or no EOS token in it or in the model's generation configuration.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError(f"--model {model} has no tokenizer, without which no text can be read or written.")
    if tokenizer.eos_token_id is None or engine.model.generation_config.eos_token_id is None:
        raise ValueError(
            f"--model {model} has no EOS token, with which an answer ends, in its tokenizer or in its "
            "generation_config.json; set eos_token or eos_token_id there."
        )
    return tokenizer


def check_least(arguments: Namespace, least: Mapping[str, int]) -> None:
    """Checks that numbers of a command line are not below the least allowed ones; those left out are `None`.

    Args:
        arguments: the command line's.
        least: by the name of the argument.

    Raises:
        ValueError: one is; it names the flag.
    """
    for name, lowest in least.items():
        value = vars(arguments)[name]
        if value is not None and value < lowest:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {value} is out of range; allowed are integers from {lowest} on.")


def read_numbers(flag: str, text: str) -> list[int]:
    """Returns the different numbers of a list such as 6,12, in rising order.

    Raises:
        ValueError: anything else; it names the flag.
    """
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"{flag} {text!r} is not a list of numbers such as 6,12.") from None
