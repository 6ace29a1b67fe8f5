"""LayerSkipTrainer on tiny models: what it trains, logs, measures, saves and leaves behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback, TrainingArguments

import layerskip
from layerskip.model.layered import LayeredModel
from layerskip.training.data import Collator
from layerskip.training.exit_settings import ExitSettings
from layerskip.training.layer_dropout import DropoutSettings
from layerskip.training.trainer import LayerSkipTrainer
from tests import kit

EXITS = ExitSettings(exit_layers=(1, 2, 3), curriculum="rotational", rotation=3, weights="equal")


def rows(number: int = 16, seed: int = 0) -> Dataset:
    """Rows of different lengths and different numbers of tokens that count."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for row in range(number):
        ids = torch.randint(1, kit.VOCAB, (6 + row % 5,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100] * (row % 4) + ids[row % 4 :]})
    return Dataset.from_list(made)


def trainer(
    model: Any, folder: Path, *, exits: ExitSettings = EXITS, dropout: float = 0.0, data: Any = None, **changes: Any
) -> LayerSkipTrainer:
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 3,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **changes,
    }
    return LayerSkipTrainer(
        model,
        TrainingArguments(output_dir=str(folder), **options),
        exits=exits,
        dropout=DropoutSettings(p_max=dropout),
        train_dataset=rows() if data is None else data,
        eval_dataset=rows(10, seed=1),
        data_collator=Collator(pad_token_id=0),
    )


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_accumulation_gives_the_weights_of_one_batch(tmp_path: Path) -> None:
    """8 rows at once against 4 micro-batches of 2, with unequal numbers of labels."""
    found = []
    for batch, accumulated in ((8, 1), (2, 4)):
        model = kit.l4()
        settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
        trainer(model, tmp_path, optim="sgd", learning_rate=0.5, max_steps=3, **settings).train()
        found.append(weights_of(model))
    assert not torch.equal(found[0]["lm_head.weight"], weights_of(kit.l4())["lm_head.weight"])
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-5, rtol=1e-5)


def test_logs_have_loss_and_agreement_of_the_exits_that_were_on(tmp_path: Path) -> None:
    run = trainer(kit.l4(), tmp_path, logging_steps=1, learning_rate=0.0)
    run.train()
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(logs) == 4
    for step, entry in enumerate(logs):
        exits = {name for name in entry if "exit" in name}
        layer = step % 3 + 1
        assert exits == {f"loss_exit_{layer}", f"agreement_exit_{layer}"}
        mean = (entry[f"loss_exit_{layer}"] + entry["loss_last_layer"]) / 2
        assert entry["loss"] == pytest.approx(mean, abs=1e-5)
        assert 0 <= entry[f"agreement_exit_{layer}"] <= 1
        assert entry["tokens_per_second"] > 0


def test_evaluation_is_exact_per_token_over_the_whole_set(tmp_path: Path) -> None:
    """Batches of 4, 4 and 2 rows of unequal lengths, against one row after the other."""
    model = kit.mixed()
    run = trainer(model, tmp_path, per_device_eval_batch_size=4)
    metrics = run.evaluate()
    layered = LayeredModel(model)
    sums = torch.zeros(kit.NUM_LAYERS + 1)
    agreed, count = torch.zeros(kit.NUM_LAYERS + 1), 0
    for row in rows(10, seed=1):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:])
        states = model(ids, output_hidden_states=True).hidden_states
        choice = model(ids).logits[0, :-1].argmax(-1)
        for layer in (1, 2, 3, 4):
            logits = model(ids).logits if layer == 4 else layered.logits(states[layer])
            sums[layer] += torch.nn.functional.cross_entropy(logits[0, :-1], labels, reduction="sum").detach()
            agreed[layer] += int(((logits[0, :-1].argmax(-1) == choice) & (labels != -100)).sum())
        count += int((labels != -100).sum())
    assert metrics["eval_loss"] == pytest.approx(sums[4].item() / count, abs=1e-4)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(sums[4].item() / count), rel=1e-4)
    for layer in (1, 2, 3):
        assert metrics[f"eval_loss_exit_{layer}"] == pytest.approx(sums[layer].item() / count, abs=1e-4)
        assert metrics[f"eval_perplexity_exit_{layer}"] == pytest.approx(math.exp(sums[layer].item() / count), rel=1e-4)
        assert metrics[f"eval_agreement_exit_{layer}"] == pytest.approx(agreed[layer].item() / count)
    assert 0 < agreed[2] < count
    assert not any("logits" in name for name in metrics)


def test_evaluation_in_the_middle_drops_no_layer_and_moves_nothing(tmp_path: Path) -> None:
    """Two evaluations at a step are equal, the model is in train mode before and after, the weights of a run with
    evaluations are those of one without."""

    class Twice(TrainerCallback):
        found: list[dict[str, float]] = []  # noqa: RUF012

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
            assert model.training
            self.found.append({name: value for name, value in run.evaluate().items() if "loss" in name})
            self.found.append({name: value for name, value in run.evaluate().items() if "loss" in name})

    results = []
    for evaluating in (True, False):
        model = kit.l4()
        run = trainer(model, tmp_path, dropout=0.7)
        if evaluating:
            run.add_callback(Twice())
        run.train()
        results.append(weights_of(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert len(Twice.found) == 8
    assert all(Twice.found[index] == Twice.found[index + 1] for index in range(0, 8, 2))


def test_training_drops_layers_by_step_and_micro_step(tmp_path: Path) -> None:
    """Different micro-batches of a window are dropped differently, and the same in a second run."""
    from layerskip.training import layer_dropout as module

    drawn: list[list[tuple[int, int, int]]] = []
    plain = module.kept_samples

    def recorded(rate: float, samples: int, *, seed: int, step: int, micro_step: int, layer: int) -> torch.Tensor:
        drawn[-1].append((step, micro_step, layer))
        return plain(rate, samples, seed=seed, step=step, micro_step=micro_step, layer=layer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "kept_samples", recorded)
        for _ in range(2):
            drawn.append([])
            trainer(kit.l4(), tmp_path, dropout=0.5, max_steps=2, gradient_accumulation_steps=2).train()
    expected = [(step, micro, layer) for step in range(2) for micro in range(2) for layer in range(1, 5)]
    assert drawn == [expected, expected]


def test_the_model_is_plain_again_afterwards(tmp_path: Path) -> None:
    model = kit.l4()
    before = list(model.state_dict())
    run = trainer(model, tmp_path, dropout=0.5, bf16=True)
    run.train()
    run.evaluate()
    assert list(model.state_dict()) == before
    assert not {"forward", "_original_forward"} & set(vars(model))
    assert all("forward" not in vars(layer) and not layer._forward_hooks for layer in kit.layers_of(model))
    assert model.config.use_cache is True
    assert "layerskip" not in model.config.to_dict()
    ids = kit.prompt_tensor()
    assert model.eval()(ids, labels=ids).logits is not None


def test_a_failure_in_training_leaves_the_model_plain(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            raise RuntimeError("stop")

    model = kit.l4()
    run = trainer(model, tmp_path, dropout=0.5)
    run.add_callback(Stop())
    with pytest.raises(RuntimeError, match="stop"):
        run.train()
    assert "forward" not in vars(model)
    assert all("forward" not in vars(layer) and not layer._forward_hooks for layer in kit.layers_of(model))


def stored_keys(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sorted(file.keys())


def test_a_checkpoint_has_the_originals_keys_and_loads_plainly(tmp_path: Path) -> None:
    """Tied weights: one tensor in the file, still tied when loaded, the same logits; the cache is left on."""
    model = kit.l4(tie_word_embeddings=True)
    kit.l4(tie_word_embeddings=True).save_pretrained(tmp_path / "plain")
    run = trainer(model, tmp_path / "run", dropout=0.5, max_steps=3)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    assert stored_keys(tmp_path / "saved") == stored_keys(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.config.use_cache is True
    ids = kit.prompt_tensor()
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["layerskip"]
    assert stored["format"] == 1 and stored["exit_layers"] == [1, 2, 3]
    assert stored["recipe"]["exits"]["rotation"] == 3 and stored["recipe"]["dropout"]["p_max"] == 0.5
    assert set(stored["versions"]) == {"layerskip", "transformers", "torch"}
    assert "exit_layer" not in stored


def test_the_engine_runs_a_trained_checkpoint(tmp_path: Path) -> None:
    run = trainer(kit.l4(), tmp_path / "run", gradient_checkpointing=True, max_steps=2)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    engine = layerskip.load(tmp_path / "saved", exit_layer=2, dtype="float32")
    ids = kit.prompt_tensor()
    found = engine.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0).sequences
    assert torch.equal(found, kit.reference(run.model.eval(), ids, 12))
    with pytest.raises(ValueError, match="compare_exits"):
        layerskip.load(tmp_path / "saved").generate(ids, max_new_tokens=2)


def test_a_model_in_training_is_refused_for_generation() -> None:
    model = kit.l4().train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        layerskip.Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=2)
    assert model.training


def lora(model: PreTrainedModel) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def test_adapters_learn_and_nothing_else(tmp_path: Path) -> None:
    model = lora(kit.l4())
    before = weights_of(model)
    run = trainer(model, tmp_path, dropout=0.5)
    run.train()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name for name in changed)
    run.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "config.json").exists()
    assert json.loads((tmp_path / "saved" / "layerskip.json").read_text())["exit_layers"] == [1, 2, 3]


def test_a_peft_model_is_plain_again_afterwards(tmp_path: Path) -> None:
    """Mixed precision wraps the PEFT model, the guard turns its adapters off and on, and one adapter is frozen."""
    model = lora(kit.l4())
    frozen = next(p for name, p in model.named_parameters() if "lora_A" in name)
    frozen.requires_grad_(False)
    trainer(model, tmp_path, exits=ExitSettings((1,), weights="equal", guard_weight=1.0), bf16=True).train()
    assert not {"forward", "_original_forward"} & (set(vars(model)) | set(vars(model.get_base_model())))
    assert not frozen.requires_grad


def test_copies_of_modules_cannot_be_guarded(tmp_path: Path) -> None:
    model = get_peft_model(kit.l4(), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match=r"modules_to_save=.*cannot be combined with guard_weight"):
        trainer(model, tmp_path, exits=ExitSettings((), guard_weight=1.0))


def test_the_guard_of_adapters_is_the_model_without_them(tmp_path: Path) -> None:
    """The guard's gradient shrinks random adapters: the last layer comes nearer to the model they sit on."""
    ids = torch.randint(1, kit.VOCAB, (4, 20), generator=torch.Generator().manual_seed(5))
    base = kit.l4()
    plain = base(ids).logits.log_softmax(-1)

    def distance(model: Any) -> float:
        with torch.no_grad():
            return float((plain.exp() * (plain - model.eval()(ids).logits.log_softmax(-1))).sum(-1).mean())

    data = Dataset.from_list([{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids])
    distances = []
    for weight in (0.0, 1000.0):
        model = lora(kit.l4())
        start = distance(model)
        exits = ExitSettings((), guard_weight=weight)
        trainer(model, tmp_path, exits=exits, data=data, max_steps=60, learning_rate=2e-2).train()
        distances.append(distance(model))
        assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())
    assert distances[1] < 0.3 * start
    assert distances[1] < 0.3 * distances[0]


def test_a_tiny_model_learns_to_exit_early(tmp_path: Path) -> None:
    """Counting upwards: before training the exit agrees with the model by chance, afterwards nearly always."""
    counting = [[(start + offset) % 90 + 1 for offset in range(12)] for start in range(0, 90, 3)]
    data = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in counting])
    exits = ExitSettings(exit_layers=(1,), weights="equal")
    run = trainer(
        kit.scale_late_layers(kit.l4(), 10.0),
        tmp_path,
        exits=exits,
        dropout=0.1,
        data=data,
        max_steps=40,
        learning_rate=1e-2,
        per_device_train_batch_size=16,
    )
    run.eval_dataset = data
    before, after = run.evaluate(), (run.train(), run.evaluate())[1]
    assert before["eval_agreement_exit_1"] < 0.1
    assert after["eval_agreement_exit_1"] > 0.9
    assert after["eval_loss"] < 0.5 < before["eval_loss"]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"compute_metrics": lambda prediction: {}}, "compute_metrics is not supported"),
        ({"compute_loss_func": lambda *arguments: 0}, "compute_loss_func is not supported"),
        ({"preprocess_logits_for_metrics": lambda *arguments: 0}, "preprocess_logits_for_metrics is not supported"),
        ({"model_init": kit.l4}, "model_init is not supported"),
    ],
)
def test_functions_that_would_be_ignored_are_refused(tmp_path: Path, named: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerSkipTrainer(kit.l4(), TrainingArguments(output_dir=str(tmp_path)), exits=EXITS, **named)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 is not supported"),
        ({"ddp_find_unused_parameters": False}, "ddp_find_unused_parameters=False"),
        ({"use_cache": True}, "use_cache=True"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics=True"),
        ({"prediction_loss_only": True}, "prediction_loss_only=True"),
        ({"eval_do_concat_batches": False}, "eval_do_concat_batches=False"),
        ({"include_for_metrics": ["inputs"]}, "include_for_metrics="),
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(kit.l4(), tmp_path, **changes)


def test_exits_that_the_model_does_not_have_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"exit_layers=\[4\]"):
        trainer(kit.l4(), tmp_path / "run", exits=ExitSettings(exit_layers=(4,)))
    assert not (tmp_path / "run").exists()


def test_a_router_loss_together_with_layer_dropout_is_refused(tmp_path: Path) -> None:
    model = kit.l4(output_router_logits=True)
    with pytest.raises(ValueError, match=r"output_router_logits=True .* model\.config\.output_router_logits to False"):
        trainer(model, tmp_path, dropout=0.1).train()
