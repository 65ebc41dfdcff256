"""Processes of contenders: what is told of one that breaks or hangs."""

import pytest

from benchmarks.cases import CASES
from benchmarks.process import ContenderFailed, ContenderProcess


def failure(name, limit):
    case = CASES["overhead_digits"]
    process = ContenderProcess(name, case.workload, case.ends, limit=limit)
    try:
        with pytest.raises(ContenderFailed) as error:
            process.start_up()
    finally:
        process.close()
    return str(error.value)


def test_a_contender_that_breaks_is_told_with_its_code_and_the_end_of_its_errors():
    message = failure("no_such_contender", limit=60.0)
    assert "contender no_such_contender ended with code 1" in message
    assert "No module named 'benchmarks.no_such_contender'" in message


def test_a_contender_that_gives_no_answer_is_killed():
    assert "contender bare gave no answer in 0.05 s" in failure("bare", limit=0.05)
