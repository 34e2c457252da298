"""The mutants of the deciders are made as they say, and one of them is noticed."""

from __future__ import annotations

from tests import mutants
from torchelastic.rendezvous import majority


def test_operators_all_find_mutants():
    every = list(mutants.all_mutants())
    assert {one.operator for one in every} == {one.__name__ for one in mutants.OPERATORS}
    assert {one.module for one in every} == set(mutants.modules())
    assert len(set(every)) == len(every)


def the_mutant(function: str, operator: str) -> mutants.Mutant:
    made = [one for one in mutants.all_mutants() if one.function == function]
    return next(one for one in made if one.operator == operator)


def test_mutant_is_applied_to_imported_function():
    must_step_down = majority.must_step_down
    code = must_step_down.__code__
    assert not must_step_down(3, 3)
    mutants.apply(the_mutant("must_step_down", "compare"))
    try:
        assert must_step_down(3, 3)
    finally:
        must_step_down.__code__ = code


def test_mutant_is_noticed_in_its_own_process():
    assert mutants.tried(the_mutant("_begin", "field"), 40) == mutants.BY_SIMULATION
