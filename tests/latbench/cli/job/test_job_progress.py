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


@pytest.mark.parametrize(("spent", "pace"), [(10.0, 1.0), (20.0, 1.4), (35.0, 2.0), (0.1, 0.604)])
def test_later_steps_are_expected_at_the_pace_of_the_earlier_ones(spent: float, pace: float) -> None:
    """The estimates of a quarter of all 60 s count as if they had been right: (15 + spent) / (15 + 10)."""
    display = Display()
    display.progress.start("one")
    display.now = spent
    display.progress.start("two")
    assert display.progress.estimate_seconds_left() == pytest.approx(50.0 * pace)


def test_steps_that_were_done_before_do_not_make_later_ones_free() -> None:
    estimates, now = {"timing": 90.0, "searching": 10.0}, 0.0
    progress = JobProgress(lambda what, done, total: None, lambda: estimates, clock=lambda: now)
    progress.start("timing")
    progress.start("searching")
    assert progress.estimate_seconds_left() == 5.0


def test_one_slow_short_step_says_little() -> None:
    estimates = {"reading": 1.0, "timing": 99.0}
    now = 0.0
    progress = JobProgress(lambda what, done, total: None, lambda: estimates, clock=lambda: now)
    progress.start("reading")
    now = 20.0  # 20 times as long as estimated: imports are compiled in a new environment
    progress.start("timing")
    assert 99.0 < progress.estimate_seconds_left() < 2 * 99.0


def test_a_step_that_takes_longer_does_not_count_backwards_and_later_ones_are_expected_to() -> None:
    display = Display()
    display.progress.start("one")
    display.now = 85.0
    pace = (15.0 + 85.0) / (15.0 + 10.0)
    assert display.progress.estimate_seconds_left() == 0.2 * 85.0 + 50.0 * pace
