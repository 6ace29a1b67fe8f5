"""LayerSkip models in EleutherAI's lm-evaluation-harness: the last layer, one exit, or self-speculation.

    python -m layerskip.comparison.lm_eval_model run --tasks hellaswag --batch_size 16 --device cuda \\
        --model layerskip --model_args pretrained=CKPT,strategy=early_exit,exit_layer=8

This is lm-eval's own command line with the model `layerskip` registered; its default for --device is cuda:0. In Python,
importing this module registers it: `lm_eval.simple_evaluate(model="layerskip", model_args=…)`; or pass
`model=LayerSkipLM(engine)`.

`lm_eval --model layerskip` alone does not know the name with lm-eval 0.4.13, the newest release when this was written:
it reads no entry points, takes no "module:class" and imports no other module. For releases that do, as the plugin guide
of lm-eval's development version says, the package has the entry point `layerskip` in the group `lm_eval.models`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

import torch
from tqdm import tqdm

from layerskip.decoding.engine import Engine
from layerskip.decoding.load import load
from layerskip.decoding.options import SAMPLING, token_ids
from layerskip.decoding.plan import Wishes
from layerskip.decoding.prompts import Prompts, longest_first
from layerskip.decoding.statistics import Statistics
from layerskip.model.cache import SharedCache
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement
from layerskip.model.readiness import check_ready

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.models import utils as model_utils
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        'layerskip.comparison.lm_eval_model needs lm-eval, which is missing: run `pip install "layerskip[eval]"`.'
    ) from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

NAME = "layerskip"
ARGUMENTS = ("pretrained", "strategy", "exit_layer", "num_draft_tokens", "draft_vocab_size", "max_length", "batch_size")
LOADING = ("base", "device", "dtype", "attn_implementation", "revision")
# What a task may set beside `until` and the number of tokens.
GENERATION = {"do_sample", "num_beams", "repetition_penalty", "no_repeat_ngram_size"} | SAMPLING
# New tokens where a task names no number, as lm-eval's own models have it.
MAX_GEN_TOKS = 256
# Rows of logits that are held at a time.
LOGIT_ROWS = 512


class LayerSkipLM(TemplateLM):
    """A LayerSkip checkpoint as lm-eval's model; in fp32 its last layer gives what lm-eval's `hf` model gives.

    Prompts are cut on the left to `max_length`, and texts without a context follow the BOS token, else EOS, as there.
    In bf16 and fp16 probabilities are taken in fp32, where `hf` rounds them to the model's type.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | Engine,
        *,
        strategy: str = "autoregressive",
        exit_layer: int | None = None,
        num_draft_tokens: int | None = None,
        draft_vocab_size: int | None = None,
        max_length: int | str | None = None,
        batch_size: int | str = 1,
        **loading: Any,
    ) -> None:
        """Loads a checkpoint for lm-eval.

        Args:
            pretrained: a local folder or a hub id, or an engine.
            strategy: "autoregressive": the last layer. "early_exit": layers 1..E alone, in likelihoods and in texts.
                "self_speculative": texts are drafted at E and verified; they are the last layer's, and so are the
                likelihoods, for which nothing is drafted.
            exit_layer: E, counted from 1; by default the checkpoint's.
            num_draft_tokens: γ; by default the checkpoint's, else 4.
            draft_vocab_size: how many of the checkpoint's draft token ids to draft from.
            max_length: tokens that the model sees at once; by default what its configuration, else the tokenizer, says.
            batch_size: rows that pass together.
            **loading: `base`, `device`, `dtype`, `attn_implementation` and `revision`, of `layerskip.load`.

        Raises:
            TypeError: an argument of another name or type.
            ValueError: what `layerskip.load` and `Engine.plan` refuse, a number out of range, or no EOS token.
        """
        super().__init__()
        allowed = ARGUMENTS if isinstance(pretrained, Engine) else ARGUMENTS + LOADING
        for name in loading.keys() - set(allowed):
            raise TypeError(f"{name}={loading[name]!r} is no argument of {NAME!r}; allowed are {', '.join(allowed)}.")
        self.batch_size = _count("batch_size", batch_size)
        length = None if max_length is None else _count("max_length", max_length)
        self.engine = pretrained if isinstance(pretrained, Engine) else load(pretrained, **loading)
        numbers = Wishes(exit_layer, num_draft_tokens, draft_vocab_size)
        self.plan = self.engine.plan(strategy, numbers)
        check_ready(self.engine.model)
        if self.engine.tokenizer is None or self.engine.tokenizer.eos_token_id is None:
            raise ValueError("pretrained has no tokenizer with an EOS token, which ends texts; save one beside it.")
        self.tokenizer: PreTrainedTokenizerBase = self.engine.tokenizer
        self.max_length: int = length or model_utils.resolve_max_length(self.engine.model.config, self.tokenizer)
        self._device = self.engine.layered.device
        self._decoding = {"strategy": strategy, **asdict(numbers)}
        self._calls: list[Statistics] = []

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Returns a model; its arguments go before the device and batch size that lm-eval's command line adds."""
        added = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**{**added, **arg_dict})

    @property
    def eot_token_id(self) -> int:
        """The EOS token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: BOS, or EOS where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, by which lm-eval stores the requests that it has built."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Returns what lm-eval writes beside its results: the model, how it was decoded, and what all texts took."""
        model, taken = self.engine.model, Statistics.total(self._calls).to_dict() if self._calls else {}
        taken.pop("per_row", None)
        size = {"model_num_parameters": model.num_parameters(), "model_dtype": str(model.dtype)}
        return {**size, **asdict(self.plan), "statistics": taken or None}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the token ids of a text; by default without special tokens where it begins with the prefix token."""
        if add_special_tokens is None and string.startswith(str(self.tokenizer.decode([self.prefix_token_id]))):
            add_special_tokens = False
        if add_special_tokens is not None:
            kwargs["add_special_tokens"] = add_special_tokens
        return list(self.tokenizer.encode(string, **kwargs))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns messages as one text; the last stays open, to be gone on from, without `add_generation_prompt`."""
        template: Any = self.tokenizer.apply_chat_template
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(template(chat_history, tokenize=False, **ends))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether it is the greedy one.

        Args:
            requests: (what lm-eval stores the answer by, or `None`; context; continuation) each.
        """
        layered = self.engine.layered
        # The choices of a question often differ in their last token alone, which does not pass: they share a row.
        members: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (key, context, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"the continuation {continuation if key is None else key[1]!r} has {len(continuation)} tokens; "
                    f"allowed are 1 to max_length={self.max_length}."
                )
            tokens = [*(context or [self.prefix_token_id]), *continuation]
            members[tuple(tokens[-(self.max_length + 1) : -1])].append(index)
        rows = list(members)
        lengths = list(map(len, rows))
        layered.check_length(max(lengths, default=0), lengths)
        found: dict[int, tuple[float, bool]] = {}
        for batch in self._batches(rows, "reading likelihoods", disable_tqdm):
            ends = [(row, index) for row, place in enumerate(batch) for index in members[rows[place]]]
            continuations = [(row, requests[index][2]) for row, index in ends]
            depth = self.plan.depth(layered.num_layers)
            scores = end_scores(layered, depth, [rows[place] for place in batch], continuations)
            for (_, index), score in zip(ends, scores, strict=True):
                found[index] = score
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], score)
        return [found[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of whole texts, read in windows of `max_length` tokens."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += log_likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns a text for each request, cut before the first of its stop strings.

        Raises:
            TypeError: a generation argument that is not known.
            ValueError: one that is not supported or has no effect, or too many new tokens for `max_length`.
        """
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(index)
        # All settings are read before the first text is made.
        settings = [self._read_settings(requests[group[0]].args[1]) for group in groups.values()]
        texts: dict[int, str] = {}
        for (until, arguments), group in zip(settings, groups.values(), strict=True):
            room = self.max_length - arguments["max_new_tokens"]
            rows = [self.tok_encode(requests[index].args[0])[-room:] or [self.prefix_token_id] for index in group]
            for batch in self._batches(rows, "generating", disable_tqdm):
                made = self._generate([rows[place] for place in batch], until, arguments)
                for index, text in zip((group[place] for place in batch), made, strict=True):
                    texts[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return [texts[index] for index in range(len(requests))]

    def _read_settings(self, gen_kwargs: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Returns a task's stop strings, EOS among them, and arguments of `Engine.generate`."""
        arguments = dict(model_utils.normalize_gen_kwargs(dict(gen_kwargs), MAX_GEN_TOKS))
        eos = str(self.tokenizer.decode([self.eot_token_id]))
        until = [text for text in model_utils.handle_stop_sequences(arguments.pop("until"), eos) if text]
        count = arguments.pop("max_gen_toks")
        for name in sorted(arguments.keys() - GENERATION):
            raise TypeError(
                f"{name}={arguments[name]!r} is not supported among a task's generation arguments; allowed are until, "
                f"max_gen_toks, {', '.join(sorted(GENERATION))}."
            )
        if not 1 <= count < self.max_length:
            raise ValueError(
                f"max_gen_toks={count} is out of range; allowed are 1 to {self.max_length - 1}, since "
                f"max_length={self.max_length} holds the prompt as well."
            )
        if not arguments["do_sample"]:
            # lm-eval sets it to 0 for greedy decoding.
            arguments.pop("temperature", None)
        return until, {**arguments, "max_new_tokens": count}

    def _generate(self, rows: list[list[int]], until: list[str], arguments: dict[str, Any]) -> list[str]:
        """Returns the texts that follow some prompts, given as token ids."""
        prompts = Prompts(rows)
        ids, mask = prompts.left_padded(self.eot_token_id, self.engine.layered.device)
        own = token_ids("eos_token_id", self.engine.model.generation_config.eos_token_id)
        result = self.engine.generate(
            ids,
            attention_mask=mask,
            eos_token_id=sorted({self.eot_token_id, *own}),
            stopping_criteria=[StopTexts(self.tokenizer, until, prompts.width)],
            **self._decoding,
            **arguments,
        )
        self._calls.append(result.statistics)
        return [model_utils.postprocess_generated_text(text, until, None) for text in result.texts or []]

    def _batches(self, rows: Sequence[Sequence[int]], doing: str, is_silent: bool) -> Iterator[list[int]]:
        """Yields places of rows that pass together, the longest first; a progress bar counts rows."""
        order = longest_first(rows)
        with tqdm(total=len(rows), desc=doing, disable=is_silent) as progress:
            for first in range(0, len(order), self.batch_size):
                batch = order[first : first + self.batch_size]
                yield batch
                progress.update(len(batch))


class StopTexts:
    """A stopping criterion: one of some texts has come up among the new tokens, however they are split.

    transformers' own criterion for stop strings takes in the end of the prompt as well, which lm-eval does not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], width: int) -> None:
        """Waits for `texts`, at least one, behind prompts of `width` tokens, padding included."""
        self.tokenizer = tokenizer
        self.texts = tuple(texts)
        self.width = width
        # A text may be spelled in more tokens than the tokenizer would take; what is missed is cut away all the same.
        self.last = max(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts) + 2

    def __call__(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        """Returns for each row of ids `(rows, tokens)` whether it ends here, `(rows,)` bool."""
        recent = self.tokenizer.batch_decode(ids[:, self.width :][:, -self.last :])
        return torch.tensor([any(text in row for text in self.texts) for row in recent], device=ids.device)


@torch.inference_mode()
def end_scores(
    layered: LayeredModel, depth: int, rows: Sequence[Sequence[int]], continuations: Sequence[tuple[int, list[int]]]
) -> list[tuple[float, bool]]:
    """Returns the summed log-probability of each continuation, and whether each of its tokens is the first choice.

    Args:
        layered: the model, in eval mode.
        depth: the layer whose output goes through norm and head.
        rows: token ids.
        continuations: (row, tokens) each: what the last positions of this row are to predict.
    """
    device = layered.device
    placement = Placement.prompt([len(row) for row in rows], device)
    padded = torch.tensor([[*row, *[0] * (placement.width - len(row))] for row in rows], device=device)
    hidden = layered.embed(padded, placement.positions)
    cache, rotary = SharedCache(depth, len(rows), placement.width), layered.rotary_tables(placement.width)
    hidden = layered.run(hidden, 0, depth, placement=placement, cache=cache, rotary=rotary).to(device)
    places = [
        (row, len(rows[row]) - len(tokens) + place, token)
        for row, tokens in continuations
        for place, token in enumerate(tokens)
    ]
    row_of, column_of, wanted = torch.tensor(places, device=device).unbind(1)
    found, first = [], []
    for states, ids in zip(hidden[row_of, column_of].split(LOGIT_ROWS), wanted.split(LOGIT_ROWS), strict=True):
        log_probs = layered.logits(states).to(device).float().log_softmax(-1)
        found.append(log_probs.gather(1, ids.unsqueeze(1)).squeeze(1))
        first.append(log_probs.argmax(-1) == ids)
    counts = [len(tokens) for _, tokens in continuations]
    split = zip(torch.cat(found).cpu().split(counts), torch.cat(first).cpu().split(counts), strict=True)
    return [(float(values.sum()), bool(flags.all())) for values, flags in split]


def _count(name: str, value: Any) -> int:
    """Returns a number that lm-eval passes on as an integer or as text; raises ValueError by name."""
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"{name}={value!r} is not allowed; pass an integer from 1 on.")
    return int(value)


def main() -> None:
    """Runs lm-eval's own command line, in which `--model layerskip` is known."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


# By its path, so that there is one class, however this module is run and whether lm-eval has found it already.
if NAME not in model_registry:
    model_registry.register(NAME, target="layerskip.comparison.lm_eval_model:LayerSkipLM")

if __name__ == "__main__":
    main()
