"""A rehearsal ends where work begins, and nobody notices it outside of one."""

import pytest

from hotloop.rehearsal import begin_work, is_on, rehearse


def test_work_begins_as_ever_outside_of_a_rehearsal():
    begin_work("anything")
    assert not is_on()


def test_a_rehearsal_ends_where_work_begins_and_what_handles_errors_lets_it():
    done = []

    def command():
        assert is_on()
        try:
            done.append("checks")
            begin_work("writing")
            done.append("work")
        except Exception:
            done.append("mistaken for an error")

    assert rehearse(command) == "writing"
    assert done == ["checks"]
    assert not is_on()


def test_errors_of_the_command_come_out_and_the_rehearsal_is_over():
    with pytest.raises(ValueError, match="no"):
        rehearse(lambda: int("no"))
    assert not is_on()


def test_a_command_that_has_no_work_just_ends():
    assert rehearse(lambda: None) == ""
