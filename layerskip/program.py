"""What the command-line programs share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from layerskip import demo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def model_path(model: str) -> str:
    """Returns where to load `--model` from; `demo` is fetched first where it is missing.

    Raises:
        FetchError, ImportError, OSError: the demo model could not be made.
    """
    return str(demo.fetch()) if model == "demo" else model


def as_chat(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> list[Any]:
    """Returns each text as a user's message where the tokenizer has a chat template, else as it stands."""
    if tokenizer is None or tokenizer.chat_template is None:
        return list(texts)
    return [[{"role": "user", "content": text}] for text in texts]
