"""Graphs that an engine keeps: lent to one call at a time, found again by later ones."""

from __future__ import annotations

from typing import Any

import pytest

from layerskip.decoding import graph_rounds
from layerskip.decoding.graph_rounds import MOST_GRAPHS, GraphPool


class Stub:
    """Graphs that fit what they were made for."""

    def __init__(self, model: Any, settings: Any) -> None:
        self.made_for = (model, settings)

    def fits(self, model: Any, settings: Any) -> bool:
        return (model, settings) == self.made_for


@pytest.fixture(name="pool")
def pool_of_stubs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(graph_rounds, "CompiledRounds", Stub)
    return GraphPool()


def test_graphs_are_lent_to_one_call_at_a_time(pool: Any) -> None:
    one, other = pool.take("model", 1), pool.take("model", 1)
    assert one.graphs is not other.graphs
    graphs = one.graphs
    del one
    again = pool.take("model", 1)
    assert again.graphs is graphs
    assert pool.take("model", 1).graphs not in (graphs, other.graphs)


def test_a_loan_may_end_before_it_is_dropped(pool: Any) -> None:
    loan = pool.take("model", 1)
    loan.is_over = True
    assert pool.take("model", 1).graphs is loan.graphs


def test_the_graphs_that_were_lent_last_are_lent_first(pool: Any) -> None:
    loans = [pool.take("model", 1) for _ in range(3)]
    graphs = [loan.graphs for loan in loans]
    loans.clear()
    assert pool.take("model", 1).graphs is graphs[-1]


def test_graphs_are_lent_only_where_they_fit(pool: Any) -> None:
    graphs = pool.take("model", 1).graphs
    assert pool.take("model", 2).graphs is not graphs
    assert pool.take("other", 1).graphs is not graphs
    assert pool.take("model", 1).graphs is graphs


def test_the_graphs_that_were_longest_of_no_use_go_first(pool: Any) -> None:
    graphs = [pool.take("model", number).graphs for number in range(MOST_GRAPHS + 1)]
    for number in range(1, MOST_GRAPHS + 1):
        assert pool.take("model", number).graphs is graphs[number]
    assert pool.take("model", 0).graphs is not graphs[0]
