"""A predicate says the same to the API server, in CEL, as to a program's spec, in Python."""

from types import SimpleNamespace
from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel
from pydantic.alias_generators import to_camel

from pipetransformer_contract.api.job import ElasticPolicy
from pipetransformer_contract.cel import Predicate, exactly_one, field, given, not_both, size
from pipetransformer_contract.spec import Cache, Checkpoint, Data, Evaluation, Freeze, Model, Output, Training
from pipetransformer_contract.spec_model import SpecModel

A, B = field("first_field"), field("other")


def by_cel(condition: Predicate, fields: dict[str, Any]) -> bool:
    """As the API server answers: it does not see a field that is None."""
    environment = celpy.Environment()
    seen = {to_camel(name): value for name, value in fields.items() if value is not None}
    program = environment.program(environment.compile(condition.cel))
    return bool(program.evaluate({"self": json_to_cel(seen)}))


@pytest.mark.parametrize(
    ("condition", "holds", "fails"),
    [
        (A.is_("x"), {"first_field": "x"}, {"first_field": "y"}),
        (A.is_not("x"), {"first_field": "y"}, {"first_field": "x"}),
        (A.above(0), {"first_field": 1}, {"first_field": 0}),
        (A.at_most(B), {"first_field": 2, "other": 2}, {"first_field": 3, "other": 2}),
        ((A % B).is_(0), {"first_field": 6, "other": 3}, {"first_field": 7, "other": 3}),
        (A.is_among(["x", "y"]), {"first_field": "y"}, {"first_field": "z"}),
        (A.starts_with("/"), {"first_field": "/a"}, {"first_field": "a/"}),
        (A.matches("^[a-z]+$"), {"first_field": "ab"}, {"first_field": "ab\n"}),
        (given("other"), {"other": 1}, {"other": None}),
        (size("other").above(1), {"other": [1, 2]}, {"other": [1]}),
        (exactly_one("first_field", "other"), {"first_field": 1, "other": None}, {"first_field": 1, "other": 2}),
        (exactly_one("first_field", "other"), {"first_field": None, "other": 1}, {"first_field": None, "other": None}),
        (not_both("first_field", "other"), {"first_field": None, "other": None}, {"first_field": 1, "other": 1}),
        (~(A.is_(1) & B.is_(1)), {"first_field": 1, "other": 2}, {"first_field": 1, "other": 1}),
        ((A.is_(1) | B.is_(1)) & A.is_not(2), {"first_field": 3, "other": 1}, {"first_field": 2, "other": 1}),
        (A.is_(1) | (B.is_(1) & A.is_(2)), {"first_field": 1, "other": 5}, {"first_field": 2, "other": 5}),
    ],
    ids=lambda value: value.cel if isinstance(value, Predicate) else "",
)
def test_cel_and_python_agree(condition: Predicate, holds: dict[str, Any], fails: dict[str, Any]) -> None:
    assert (by_cel(condition, holds), condition.holds(SimpleNamespace(**holds))) == (True, True)
    assert (by_cel(condition, fails), condition.holds(SimpleNamespace(**fails))) == (False, False)


@pytest.mark.parametrize("kind", [Model, Data, Training, Freeze, Cache, Checkpoint, Output, Evaluation, ElasticPolicy])
def test_each_rule_of_a_type_can_be_checked_without_an_api_server(kind: type[SpecModel]) -> None:
    assert kind.rules
    assert all(rule.holds is not None for rule in kind.rules)
