"""Progress: lines where there is no terminal, few of them."""

import io

from rich.console import Console

from latbench.cli.progress_bar import estimate_left, live


def test_a_line_when_something_new_begins_and_now_and_then() -> None:
    now = 0.0
    out = io.StringIO()
    with live(Console(file=out, force_terminal=False), clock=lambda: now) as tell:
        for step, seconds in enumerate([0.0, 1.0, 2.0, 16.0, 17.0]):
            now = seconds
            tell(f"searching: loss {step}", step, 5)
        tell("timing [red]", None, None)  # a name that a user chose
    assert out.getvalue().splitlines() == ["0/5 searching: loss 0", "3/5 searching: loss 3", "timing [red]"]


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind() -> None:
    out = io.StringIO()
    with live(Console(file=out, force_terminal=True, width=100)) as tell:
        tell("searching", 1, 2)
    assert "searching" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_a_count_without_a_total_is_not_shown() -> None:
    out = io.StringIO()
    with live(Console(file=out)) as tell:
        tell("waiting", 0, None)
    assert out.getvalue() == "waiting\n"


def test_the_time_left_follows_from_the_steps_of_the_same_kind() -> None:
    """The first step told may be any: a training that goes on begins in the middle."""
    told: list[tuple[str, int | None, int | None]] = []
    tell = estimate_left(lambda *what: told.append(what), iter([0.0, 100.0, 101.0, 110.0, 120.0]).__next__)
    tell("pruning", None, None)
    for done in (40, 41, 50):
        tell("training", done, 100)
    tell("other", 3, 4)
    assert told == [
        ("pruning", None, None), ("training", 40, 100), ("training: about 59 s left", 41, 100),
        ("training: about 50 s left", 50, 100), ("other", 3, 4),
    ]  # fmt: skip
