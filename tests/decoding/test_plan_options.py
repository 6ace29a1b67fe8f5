"""Plans with exits and lengths by cost, copies, trees and compiled rounds: what they are, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from layerskip import Engine
from layerskip.decoding.cost import CostTable
from layerskip.decoding.plan import DEFAULT_NUM_DRAFT_TOKENS, MAX_TREE_NODES, Limits, Plan, Wishes, make_plan
from layerskip.model.metadata import Metadata
from tests import kit
from tests.decoding.levers_kit import padded

LIMITS = Limits(num_layers=4, vocab_size=97)
# Exits 1 and 2 with up to five drafts.
COSTS = CostTable((1, 2), (0.1, 0.2), ((1.0,) * 6,) * 2, 1.0, 0.05, 0.01)
NEW_OPTIONS: dict[str, Any] = {"draft_stop": "adaptive", "copy_ngrams": "checked", "tree_nodes": 8, "compile": True}


def plan(
    strategy: str = "self_speculative",
    engine: dict[str, Any] | None = None,
    metadata: Metadata | None = None,
    costs: CostTable | None = COSTS,
    **call: Any,
) -> Plan:
    """Returns the plan of a call on a model of four layers, of which engine and checkpoint say nothing by default."""
    return make_plan(
        strategy,
        Wishes(**call),
        engine=Wishes(**({} if engine is None else engine)),
        metadata=Metadata() if metadata is None else metadata,
        limits=LIMITS,
        costs=lambda: costs,
    )


def refused(message: str, error: type[Exception] = ValueError, **arguments: Any) -> None:
    """Checks that there is no such plan, and what the message says."""
    with pytest.raises(error, match=message):
        plan(**arguments)


# What is planned


def test_nothing_of_it_is_on_by_default() -> None:
    assert plan(exit_layer=2) == Plan("self_speculative", 2, DEFAULT_NUM_DRAFT_TOKENS)
    off = plan(exit_layer=2, draft_stop="static", copy_ngrams="off", compile=False)
    assert off == Plan("self_speculative", 2, DEFAULT_NUM_DRAFT_TOKENS)


def test_costs_are_planned_with_where_they_decide_alone() -> None:
    assert plan(exit_layer=2, copy_ngrams="checked").costs is None
    assert plan(exit_layer=2, draft_stop="adaptive").costs is COSTS
    assert plan(exit_layer="auto").costs is COSTS
    assert plan(exit_layer="auto").exit_layer == "auto"


@pytest.mark.parametrize("options", [{"exit_layer": "auto"}, {"exit_layer": 2, "draft_stop": "adaptive"}], ids=str)
def test_a_length_that_nobody_names_is_the_longest_of_the_table(options: dict[str, Any]) -> None:
    stored = Metadata(num_draft_tokens=2)
    assert plan(**options, metadata=stored).num_draft_tokens == 5
    assert plan(**options, metadata=stored, num_draft_tokens=3).num_draft_tokens == 3
    assert plan(**options, metadata=stored, engine={"num_draft_tokens": 4}).num_draft_tokens == 4


def test_a_static_length_is_the_checkpoints_else_four() -> None:
    assert plan(exit_layer=2, copy_ngrams="checked", metadata=Metadata(num_draft_tokens=7)).num_draft_tokens == 7
    assert plan(exit_layer=2, copy_ngrams="checked").num_draft_tokens == DEFAULT_NUM_DRAFT_TOKENS
    assert plan(exit_layer=2, num_draft_tokens=30).num_draft_tokens == 30


def test_the_call_overrides_the_engine_and_the_engine_the_checkpoint() -> None:
    stored = Metadata(compared=True, exit_layer=1)
    assert plan(metadata=stored).exit_layer == 1
    assert plan(metadata=stored, engine={"exit_layer": "auto"}).exit_layer == "auto"
    assert plan(metadata=stored, engine={"exit_layer": "auto"}, exit_layer=3).exit_layer == 3
    assert plan(metadata=stored, engine={"exit_layer": 3}, exit_layer="auto").exit_layer == "auto"
    engine = {"exit_layer": 2, "draft_stop": "adaptive", "copy_ngrams": "checked"}
    assert (plan(engine=engine).draft_stop, plan(engine=engine).copy_ngrams) == ("adaptive", "checked")
    turned_off = plan(engine=engine, draft_stop="static", copy_ngrams="off")
    assert (turned_off.draft_stop, turned_off.copy_ngrams, turned_off.costs) == ("static", "off", None)
    assert plan(engine={"exit_layer": 2, "tree_nodes": 8}, tree_nodes=5).tree_nodes == 5
    assert not plan(engine={"exit_layer": 2, "compile": True}, compile=False).compile


def test_a_checkpoint_of_which_no_exit_pays_decodes_plainly_unless_an_exit_is_asked_for() -> None:
    stored = Metadata(compared=True, exit_layer=None)
    assert plan(metadata=stored) == Plan("autoregressive")
    assert plan(metadata=stored, compile=True) == Plan("autoregressive", compile=True)
    assert plan(metadata=stored, exit_layer="auto").exit_layer == "auto"
    refused("no exit pays", metadata=stored, copy_ngrams="checked")
    for engine in ({"copy_ngrams": "trusted"}, {"draft_stop": "adaptive"}, {"tree_nodes": 8}):
        refused("no exit pays", metadata=stored, engine=engine)


def test_costs_are_not_asked_for_where_nothing_depends_on_them() -> None:
    def unexpected() -> CostTable:
        raise AssertionError("the table was read")

    limits = Limits(num_layers=4, vocab_size=97)
    for strategy, wishes in (("self_speculative", Wishes(exit_layer=2)), ("autoregressive", Wishes())):
        found = make_plan(strategy, wishes, engine=Wishes(), metadata=Metadata(), limits=limits, costs=unexpected)
        assert found.costs is None


@pytest.mark.parametrize("exits", [(1, 4), (1, 2, 9)])
@pytest.mark.parametrize("options", [{"exit_layer": "auto"}, {"exit_layer": 1, "draft_stop": "adaptive"}], ids=str)
def test_costs_of_another_model_are_refused(options: dict[str, Any], exits: tuple[int, ...]) -> None:
    other = CostTable(exits, (0.1,) * len(exits), ((1.0, 1.0),) * len(exits), 1.0, 0.1, 0.1)
    refused("the cost table has exits .* and the model has 4 layers", costs=other, **options)


def test_costs_of_rounds_without_drafts_are_refused() -> None:
    refused("knows no round with drafts", costs=CostTable((2,), (0.1,), ((1.0,),), 1.0, 0.1, 0.1), exit_layer="auto")


@pytest.mark.parametrize("exits_and_stops", [("auto", None), (2, "adaptive"), ("auto", "adaptive"), (2, None)])
def test_exits_by_cost_stops_by_cost_and_copies_go_together(exits_and_stops: tuple[int | str, str | None]) -> None:
    exit_layer, draft_stop = exits_and_stops
    found = plan(exit_layer=exit_layer, draft_stop=draft_stop, copy_ngrams="checked")
    assert (found.exit_layer, found.draft_stop, found.copy_ngrams) == (exit_layer, draft_stop or "static", "checked")


# What is refused


@pytest.mark.parametrize(
    ("options", "name"),
    [({"exit_layer": "auto"}, "exit_layer='auto'"), ({"exit_layer": 2, "draft_stop": "adaptive"}, "draft_stop='adapt")],
    ids=str,
)
def test_decisions_by_cost_need_costs(options: dict[str, Any], name: str) -> None:
    refused(
        re.escape(name) + r".*needs to know what rounds cost.*compare_exits\.py.*or pass a cost_table",
        **options,
        costs=None,
    )
    refused(re.escape(name), engine=options, costs=None)


def test_an_adaptive_stop_needs_costs_of_its_exit() -> None:
    refused(r"draft_stop='adaptive' with exit_layer=3.*has exits \[1, 2\]", exit_layer=3, draft_stop="adaptive")


@pytest.mark.parametrize("options", [{"exit_layer": "auto"}, {"exit_layer": 2, "draft_stop": "adaptive"}], ids=str)
def test_a_length_beyond_the_costs_is_refused(options: dict[str, Any]) -> None:
    assert plan(**options, num_draft_tokens=5).num_draft_tokens == 5
    refused(r"num_draft_tokens=6 with .* ends at 5; take no more", **options, num_draft_tokens=6)


@pytest.mark.parametrize("level", ["call", "engine"])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"draft_stop": "greedy"}, ValueError, r"draft_stop='greedy' is unknown; allowed are static, adaptive"),
        ({"draft_stop": True}, ValueError, r"draft_stop=True is unknown"),
        ({"copy_ngrams": True}, ValueError, r"copy_ngrams=True is unknown; allowed are off, checked, trusted"),
        ({"copy_ngrams": "on"}, ValueError, r"copy_ngrams='on' is unknown; allowed are off, checked, trusted"),
        ({"compile": 0}, TypeError, r"compile=0 is a int; pass True or False"),
        ({"tree_nodes": 0}, ValueError, rf"tree_nodes=0 is out of range; allowed are 1 to {MAX_TREE_NODES}"),
        ({"tree_nodes": MAX_TREE_NODES + 1}, ValueError, rf"tree_nodes={MAX_TREE_NODES + 1} is out of range"),
        ({"tree_nodes": True}, TypeError, r"tree_nodes=True is a bool, not an integer"),
        ({"tree_nodes": 2.0}, TypeError, r"tree_nodes=2.0 is a float, not an integer"),
        ({"exit_layer": "best"}, TypeError, r"exit_layer='best' is a str, not an integer; allowed are 1 to 3"),
        ({"exit_layer": 4}, ValueError, r"exit_layer=4 is out of range; allowed are 1 to 3"),
    ],
    ids=str,
)
def test_unknown_words_and_wrong_types_are_refused(
    wrong: dict[str, Any], error: type[Exception], message: str, level: str
) -> None:
    options = {"exit_layer": 2, **wrong}
    if level == "call":
        refused(message, error, **options)
    else:
        refused(message, error, engine=options)


def test_all_numbers_of_nodes_in_range_are_planned() -> None:
    for nodes in (1, 8, MAX_TREE_NODES):
        assert plan(exit_layer=2, tree_nodes=nodes).tree_nodes == nodes


TOGETHER = {
    "exit_layer": ({"exit_layer": "auto"}, "exit_layer='auto'"),
    "draft_stop": ({"draft_stop": "adaptive"}, "draft_stop='adaptive'"),
    "copy_ngrams": ({"copy_ngrams": "checked"}, "copy_ngrams='checked'"),
    "trusted copies": ({"copy_ngrams": "trusted"}, "copy_ngrams='trusted'"),
    "compile": ({"compile": True}, "compile=True"),
}


@pytest.mark.parametrize("other", TOGETHER)
def test_a_tree_goes_with_no_other_option(other: str) -> None:
    options, name = TOGETHER[other]
    refused(rf"tree_nodes=8 does not go with {re.escape(name)}", **{"exit_layer": 2, "tree_nodes": 8, **options})


@pytest.mark.parametrize("other", [name for name in TOGETHER if name != "compile"])
def test_compiled_rounds_go_with_no_other_option(other: str) -> None:
    options, name = TOGETHER[other]
    refused(rf"compile=True does not go with {re.escape(name)}", **{"exit_layer": 2, "compile": True, **options})


def test_options_of_the_engine_count_as_well_as_those_of_the_call() -> None:
    refused(
        r"tree_nodes=8 does not go with copy_ngrams='checked'",
        engine={"copy_ngrams": "checked"},
        exit_layer=2,
        tree_nodes=8,
    )
    assert plan(engine={"copy_ngrams": "checked"}, exit_layer=2, tree_nodes=8, copy_ngrams="off").tree_nodes == 8


@pytest.mark.parametrize("strategy", ["autoregressive", "early_exit"])
@pytest.mark.parametrize("name", ["draft_stop", "copy_ngrams", "tree_nodes"])
def test_strategies_that_draft_nothing_have_no_use_for_options_of_drafts(strategy: str, name: str) -> None:
    exits = {"exit_layer": 2} if strategy == "early_exit" else {}
    value = NEW_OPTIONS[name]
    refused(rf"{name}={value} has no meaning with strategy='{strategy}'", strategy=strategy, **exits, **{name: value})
    # The engine's are for its other calls.
    assert plan(strategy, engine={"exit_layer": 2, name: value}).strategy == strategy


def test_every_strategy_can_be_compiled() -> None:
    assert plan("autoregressive", compile=True) == Plan("autoregressive", compile=True)
    assert plan("early_exit", exit_layer=2, compile=True) == Plan("early_exit", 2, compile=True)
    assert plan(exit_layer=2, compile=True).compile


def test_an_answer_from_the_early_layers_needs_an_exit_by_number() -> None:
    refused(r"exit_layer='auto' has no meaning with strategy='early_exit'", strategy="early_exit", exit_layer="auto")
    refused(r"exit_layer=auto has no meaning with strategy='autoreg", strategy="autoregressive", exit_layer="auto")


@pytest.mark.parametrize(
    ("options", "name"), [({"tree_nodes": 8}, "tree_nodes=8"), ({"compile": True}, "compile=True")], ids=str
)
def test_trees_and_compiled_rounds_choose_greedily_without_processors(options: dict[str, Any], name: str) -> None:
    found = plan(exit_layer=2, **options)
    fit = {"is_sampled": False, "has_processors": False, "keeps_scores": False, "rows": 1}
    found.check_choice(**fit)
    with pytest.raises(ValueError, match=f"{name} does not go with do_sample=True; leave one of them out"):
        found.check_choice(**{**fit, "is_sampled": True})
    with pytest.raises(ValueError, match=f"{name} does not go with logits processors"):
        found.check_choice(**{**fit, "has_processors": True})


def test_compiled_rounds_have_one_row_and_keep_no_scores() -> None:
    fit = {"is_sampled": False, "has_processors": False, "keeps_scores": False, "rows": 1}
    compiled, tree = plan(exit_layer=2, compile=True), plan(exit_layer=2, tree_nodes=8)
    with pytest.raises(ValueError, match="compile=True does not go with a batch of 3 rows"):
        compiled.check_choice(**{**fit, "rows": 3})
    with pytest.raises(ValueError, match="compile=True does not go with output_scores or output_logits"):
        compiled.check_choice(**{**fit, "keeps_scores": True})
    tree.check_choice(**{**fit, "rows": 3, "keeps_scores": True})


# Through the engine


ASKED = {
    "auto without costs": ({"exit_layer": "auto"}, r"exit_layer='auto' needs to know what rounds cost"),
    "adaptive without costs": ({"draft_stop": "adaptive"}, r"draft_stop='adaptive' needs to know what rounds cost"),
    "tree, sampled": ({"tree_nodes": 8, "do_sample": True}, r"tree_nodes=8 does not go with do_sample=True"),
    "tree, processed": ({"tree_nodes": 8, "repetition_penalty": 1.5}, r"tree_nodes=8 does not go with logits proc"),
    "compiled, sampled": ({"compile": True, "do_sample": True}, r"compile=True does not go with do_sample=True"),
    "compiled, processed": ({"compile": True, "bad_words_ids": [[5]]}, r"compile=True does not go with logits proc"),
    "compiled, three rows": ({"compile": True}, r"compile=True does not go with a batch of 3 rows"),
    "unknown stop": ({"draft_stop": "soon"}, r"draft_stop='soon' is unknown"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_call_is_refused_before_any_layer_runs(asked: str) -> None:
    options, message = ASKED[asked]
    model = kit.mixed()
    ids, mask = padded([kit.PROMPT, kit.PROMPT[:6], kit.PROMPT[:3]])
    if asked != "compiled, three rows":
        ids, mask = ids[:1], mask[:1]
    with kit.counted_layers(model) as counts, pytest.raises(ValueError, match=message):
        Engine(model, exit_layer=2).generate(ids, attention_mask=mask, max_new_tokens=8, **options)
    assert counts == [0] * kit.NUM_LAYERS


def test_an_engine_that_is_made_with_wrong_options_is_refused_at_once() -> None:
    model = kit.mixed()
    with pytest.raises(ValueError, match="draft_stop='soon' is unknown"):
        Engine(model, draft_stop="soon")
    with pytest.raises(ValueError, match="copy_ngrams=True is unknown"):
        Engine(model, copy_ngrams=True)  # type: ignore[arg-type]


def test_a_table_that_is_passed_goes_before_the_checkpoints() -> None:
    model = kit.mixed()
    stored = CostTable((1, 2, 3), (0.1,) * 3, ((1.0, 1.0, 1.0),) * 3, 1.0, 0.1, 0.1)
    assert Engine(model, exit_layer="auto", cost_table=COSTS).cost_table is COSTS
    model.config.layerskip = {"format": 1, "cost_table": stored.to_dict()}
    assert Engine(model, exit_layer="auto").cost_table == stored
    assert Engine(model, exit_layer="auto", cost_table=COSTS).plan("self_speculative", Wishes()).num_draft_tokens == 5
    assert Engine(model, exit_layer="auto").plan("self_speculative", Wishes()).num_draft_tokens == 2
