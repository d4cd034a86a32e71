"""The progress of a job: one display, and an estimate that follows the pace of the steps so far."""

import pytest

from latbench.cli.job.job_progress import JobProgress

ESTIMATES = {"one": 10.0, "two": 20.0, "three": 30.0}


class Display:
    def __init__(self) -> None:
        self.now, self.lines = 0.0, list[str]()
        self.progress = JobProgress(self.tell, lambda: ESTIMATES, clock=lambda: self.now)

    def tell(self, what: str, done: int | None, total: int | None) -> None:
        self.lines.append(what)


def test_each_line_names_the_step_and_the_time_left() -> None:
    display = Display()
    report = display.progress.start("one")
    display.now = 4.0
    report("half of it", 1, 2)
    assert display.lines == ["one (about 60 s left)", "one: half of it (about 56 s left)"]


def test_a_step_that_names_itself_is_named_once() -> None:
    display = Display()
    display.progress.start("one")("one: half of it", 1, 2)
    assert display.lines[-1] == "one: half of it (about 60 s left)"


@pytest.mark.parametrize(("spent", "left"), [(10.0, 50.0), (20.0, 100.0), (1.0, 25.0), (500.0, 200.0)])
def test_later_steps_are_expected_at_the_pace_of_the_earlier_ones(spent: float, left: float) -> None:
    display = Display()
    display.progress.start("one")
    display.now = spent
    display.progress.start("two")
    assert display.progress.estimate_seconds_left() == pytest.approx(left)  # within a factor of 0.5 to 4


def test_a_step_that_takes_longer_does_not_count_backwards() -> None:
    display = Display()
    display.progress.start("one")
    display.now = 1000.0
    assert display.progress.estimate_seconds_left() == 200.0 + 50.0  # the longer it takes, the longer it will take
