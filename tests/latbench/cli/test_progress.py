"""Progress: lines where there is no terminal, few of them."""

import io

from rich.console import Console

from latbench.cli.progress_bar import live


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
