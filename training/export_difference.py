r"""Exports what a run with adapters learned: half the size, without its base model and without names of this machine.

    python training/export_difference.py runs/commands --out inference/checkpoints/smollm2-135m-commands \
        --base demo-base --exit-layer 3 --num-draft-tokens 6 --draft-vocab-size 4096

The exit layer and the draft length are those that the checkpoint recommends; `inference/evaluate.py` and
`inference/benchmark.py` measure what they give. A model card in the folder stays as it is. The last line of the output
is a JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from layerskip.program import run_program


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run with lora.merge: false")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write to")
    parser.add_argument("--base", required=True, help="what the adapters call their base model")
    parser.add_argument("--exit-layer", required=True, type=int, help="the recommended exit layer")
    parser.add_argument("--num-draft-tokens", required=True, type=int, help="the recommended draft length")
    parser.add_argument(
        "--draft-vocab-size", type=int, help="draft from so many of the run's draft tokens; default all"
    )
    return parser.parse_args()


def run() -> None:
    """Exports and reports."""
    from layerskip.training.difference import export_difference

    arguments = parse_arguments()
    size = export_difference(
        arguments.run,
        arguments.out,
        base=arguments.base,
        exit_layer=arguments.exit_layer,
        num_draft_tokens=arguments.num_draft_tokens,
        draft_vocab_size=arguments.draft_vocab_size,
    )
    print(json.dumps({"out": str(arguments.out), "tensor_bytes": size}))


if __name__ == "__main__":
    run_program(run)
