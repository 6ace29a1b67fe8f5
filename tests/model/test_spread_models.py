"""A model whose embedding, layers, norm and head lie on devices of their own, all of which are pretended here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import layerskip
from layerskip import Engine
from layerskip.comparison.levers import top_k_rates
from layerskip.comparison.lm_eval_model import end_scores
from layerskip.comparison.own_answers import exit_matches
from layerskip.comparison.quality import read_answers
from layerskip.decoding.result import GenerationResult
from layerskip.model.cache import SharedCacheLayer
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from tests import kit
from tests.decoding.levers_kit import PROMPTS, TABLES, padded
from tests.model.placed_kit import BUILDERS, whole

CPU = torch.device("cpu")
DEVICE = torch.Tensor.device.__get__
NEW = 9


# Devices that are not there


class PretendedDevices(TorchFunctionMode):
    """Lets tensors claim to be on CUDA devices, and raises where torch would: where an operation reads from two.

    All are computed on the CPU. As in torch, indices and single numbers may be on the CPU, and `to`, copying and
    assigning to a slice cross devices.
    """

    def __init__(self) -> None:
        super().__init__()
        # By storage, which views share. The storages are kept, so that no address is given away twice.
        self.devices: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Returns where a tensor claims to be."""
        _, device = self.devices.get(tensor.untyped_storage()._cdata, (None, tensor.device))
        return device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == DEVICE:
            return self.device_of(args[0])
        if func == torch.Tensor.cpu:
            return self.moved(args[0], CPU)
        if func == torch.Tensor.to:
            devices = [each for each in args[1:] if isinstance(each, str | torch.device)]
            rest = [each for each in args[1:] if not isinstance(each, str | torch.device)]
            device = kwargs.pop("device", None) or next(iter(devices), self.device_of(args[0]))
            return self.moved(args[0], torch.device(device), *rest, **kwargs)
        used = self.devices_read(func, args, kwargs)
        if len(used) > 1:
            raise RuntimeError(f"{func.__name__} mixes {' and '.join(sorted(map(str, used)))}")
        # A factory names the device of its result; else it is where the operation is.
        device = torch.device(kwargs.pop("device", None) or next(iter(used), CPU))
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self.note(tensor, device)
        return result

    def moved(self, tensor: torch.Tensor, device: torch.device, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns what `to` would."""
        if device.type == "meta":
            return tensor.to(device, *args, **kwargs)
        result = tensor.to(*args, **kwargs) if args or kwargs else tensor
        if device != self.device_of(tensor) and result.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            result = result.clone()
        self.note(result, device)
        return result

    def devices_read(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[torch.device]:
        """Returns the devices that an operation reads from; several are a mistake."""
        if func == torch.Tensor.copy_:
            return self.used(args[:1])
        if func not in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return self.used([args, tuple(kwargs.values())])
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        # A value is copied from wherever it is, unless places are picked one by one.
        picks = any(isinstance(each, torch.Tensor | list) for each in index)
        return self.used(args[:1]) | (self.used(index) - {CPU}) | self.used(args[2:] if picks else ())

    def used(self, values: Any) -> set[torch.device]:
        """Returns the devices of the tensors among some values, but for single numbers on the CPU."""
        used = {(self.device_of(each), each.dim() == 0) for each in tensors_in(values)}
        return {device for device, is_number in used if not is_number or device != CPU}

    def note(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Notes where the result of an operation is."""
        if device.type == "cuda":
            storage = tensor.untyped_storage()
            self.devices.setdefault(storage._cdata, (storage, device))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among some values, which may be nested."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)


@pytest.fixture(scope="module")
def pretended() -> Iterator[PretendedDevices]:
    """The devices, for all models here; `with` puts them in force."""
    with pytest.MonkeyPatch.context() as patch:
        # Collects garbage after every weight that is moved.
        patch.setattr("accelerate.utils.modeling.clear_device_cache", lambda: None)
        yield PretendedDevices()


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda a, b: a + b,
    "linear": torch.nn.functional.linear,
    "where": lambda a, b: torch.where(a > 0, b, 0.0),
    "stack": lambda a, b: torch.stack([a, b]),
    "index": lambda a, b: a[b.long()],
    "assignment": lambda a, b: a.__setitem__([0, 1], b),
    "mask": lambda a, b: torch.nn.functional.scaled_dot_product_attention(a, a, a, attn_mask=b),
    "factory": lambda a, b: torch.zeros(2, 2, device=a.device) * b,
    "fresh": lambda a, b: a.new_zeros(2, 2) * b,
    "view": lambda a, b: a[0] + b[:, 0].contiguous(),
}
ALLOWED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "to": lambda a, b: a + b.to(a.device),
    "copy": lambda a, b: a.copy_(b),
    "slice": lambda a, b: a.__setitem__(slice(None), b),
    "number": lambda a, b: a * torch.tensor(2.0),
    "indices on the CPU": lambda a, b: a[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("operation", [*MIXED, *ALLOWED])
def test_pretended_devices_refuse_what_torch_refuses(pretended: PretendedDevices, operation: str) -> None:
    with pretended:
        a, b = torch.ones(2, 2, device="cuda:0"), torch.ones(2, 2, device="cuda:1")
        if operation in ALLOWED:
            ALLOWED[operation](a, b)
        else:
            with pytest.raises(RuntimeError, match="mixes cuda:0 and cuda:1"):
                MIXED[operation](a, b)


# A model all over them


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Puts every part of a model on a device of its own, but a tied head with its embedding, as a `device_map` does."""
    parts = []
    for name, part in model.base_model.named_children():
        path = f"{model.base_model_prefix}.{name}"
        parts += [f"{path}.{index}" for index in range(kit.NUM_LAYERS)] if part is kit.layers_of(model) else [path]
    device_map = {part: f"cuda:{index}" for index, part in enumerate(parts)}
    device_map["lm_head"] = "cuda:0" if model.config.tie_word_embeddings else "cuda:9"
    return dispatch_model(model, device_map, main_device="cuda:0", skip_keys=model._skip_keys_device_placement)


@pytest.fixture(scope="module")
def spread_models(pretended: PretendedDevices) -> dict[str, PreTrainedModel]:
    """The same models, all over the devices."""
    with pretended:
        return {family: spread(build()) for family, build in BUILDERS.items()}


IDS = torch.arange(0, kit.VOCAB, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"exit_layer": 2},
    "draft head": {"exit_layer": 2, "draft_token_ids": IDS},
    "tree": {"exit_layer": 2, "tree_nodes": 6},
    "tree with draft head": {"exit_layer": 2, "tree_nodes": 6, "draft_token_ids": IDS},
    "checked": {"exit_layer": 2, "draft_stop": "adaptive", "copy_ngrams": "checked", "draft_token_ids": IDS},
    "trusted": {"exit_layer": "auto", "draft_stop": "adaptive", "copy_ngrams": "trusted"},
    "auto with draft head": {"exit_layer": "auto", "draft_token_ids": IDS},
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "kept": {"output_scores": True, "output_logits": True, "eos_token_id": [44, 3]},
    "processed": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "output_scores": True},
    "constrained": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(5, kit.VOCAB)), "do_sample": True},
    "sampled": {"do_sample": True, "top_k": 0},
}
CASES = [
    ("llama", "plain", "kept"),
    ("llama", "plain", "constrained"),
    ("llama", "draft head", "processed"),
    ("llama", "draft head", "sampled"),
    ("llama", "tree", "kept"),
    ("llama", "checked", "processed"),
    ("llama", "checked", "sampled"),
    ("llama", "trusted", "sampled"),
    ("llama", "trusted", "processed"),
    ("llama", "auto with draft head", "greedy"),
    ("tied", "tree with draft head", "greedy"),
    ("gemma2", "tree with draft head", "greedy"),
    ("gemma2", "draft head", "kept"),
    ("gpt2", "plain", "greedy"),
]


def generated(model: PreTrainedModel, options: str, call: str) -> tuple[GenerationResult, GenerationResult]:
    """Returns what an engine gives for a batch, and what for its continuation from the cache of the first call."""
    engine = Engine(model, num_draft_tokens=3, cost_table=TABLES["gpu"], **OPTIONS[options])
    given = {"pad_token_id": 0, "return_cache": True, **CALLS[call]}
    torch.manual_seed(0)
    ids, mask = padded(PROMPTS)
    first = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, **given)
    ids, mask = padded([[*row, *new] for row, new in zip(PROMPTS, first.new_token_ids, strict=True)])
    return first, engine.generate(ids, attention_mask=mask, cache=first.cache, max_new_tokens=3, **given)


@pytest.mark.parametrize(("family", "options", "call"), CASES)
def test_a_model_all_over_devices_decodes_as_in_one_place(
    pretended: PretendedDevices, spread_models: dict[str, PreTrainedModel], family: str, options: str, call: str
) -> None:
    with pretended:
        found = generated(spread_models[family], options, call)
    for mine, wanted in zip(found, generated(whole(family), options, call), strict=True):
        assert torch.equal(mine.sequences, wanted.sequences)
        assert mine.statistics.acceptance_histogram == wanted.statistics.acceptance_histogram
        for one, other in zip(mine.scores or (), wanted.scores or (), strict=True):
            torch.testing.assert_close(one, other)
        for one, other in zip(mine.logits or (), wanted.logits or (), strict=True):
            torch.testing.assert_close(one, other)


def test_the_hook_goes_on_from_a_cache_whose_layers_are_on_several_devices(
    pretended: PretendedDevices, spread_models: dict[str, PreTrainedModel]
) -> None:
    ids, mask = padded(PROMPTS)
    decode = layerskip.self_speculative(exit_layer=2)
    given: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with pretended:
        model = spread_models["llama"]
        # The prompts come from the host, as a tokenizer gives them.
        first = model.generate(ids, attention_mask=mask, max_new_tokens=4, custom_generate=decode, **given)
        held = {layer.keys.device for layer in first.cache.layers}
        mask = torch.cat([mask, torch.ones(len(PROMPTS), 4, dtype=torch.long)], dim=1)
        found = model.generate(
            first.sequences, attention_mask=mask, max_new_tokens=8, cache=first.cache, custom_generate=decode, **given
        )
    assert len(held) == kit.NUM_LAYERS
    wanted = kit.reference(whole("llama"), ids, 12, attention_mask=padded(PROMPTS)[1])
    assert torch.equal(found.sequences, wanted)


def test_exits_of_a_model_all_over_devices_are_measured_as_in_one_place(
    pretended: PretendedDevices, spread_models: dict[str, PreTrainedModel]
) -> None:
    answers = [kit.PROMPT[:4], kit.PROMPT[4:]]

    def measured(model: PreTrainedModel, ids: torch.Tensor | None) -> list[Any]:
        layered = LayeredModel(model)
        return [
            read_answers(layered, PROMPTS[:2], answers, [1, 2], draft_token_ids=ids),
            top_k_rates(layered, PROMPTS[:2], answers, [1, 2], ids),
            exit_matches(layered, PROMPTS[:2], answers, [1, 2], [ids]),
            end_scores(layered, 4, PROMPTS[:2], [(0, PROMPTS[0][1:]), (1, PROMPTS[1][1:])]),
        ]

    for ids in (None, IDS):
        with pretended:
            found = measured(spread_models["llama"], ids)
        assert found == measured(whole("llama"), ids)


# Controls: without the moves between devices the tests above fail


def logits_without_a_move(head: DraftHead, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(head.layered.normed(hidden), head.weight)


def move_without_a_move(
    layer: SharedCacheLayer, rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    for buffer in (layer.keys, layer.values):
        buffer[rows, :, targets] = buffer[rows, :, sources]


@pytest.mark.parametrize(
    ("kind", "name", "mistake", "options"),
    [
        (DraftHead, "logits", logits_without_a_move, "draft head"),
        (SharedCacheLayer, "move", move_without_a_move, "tree"),
    ],
)
def test_a_forgotten_move_is_noticed(
    pretended: PretendedDevices,
    spread_models: dict[str, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    name: str,
    mistake: Any,
    options: str,
) -> None:
    wanted = generated(whole("llama"), options, "greedy")[0].sequences
    monkeypatch.setattr(kind, name, mistake)
    assert torch.equal(generated(whole("llama"), options, "greedy")[0].sequences, wanted)
    with pretended, pytest.raises(RuntimeError, match="mixes cuda"):
        generated(spread_models["llama"], options, "greedy")
