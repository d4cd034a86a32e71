"""The report in a browser (headless Chromium): no error, no request, tooltips, sorting, phone width, dark, print.

Needs /usr/bin/chromium: apt-get update && apt-get install -y --no-install-recommends chromium
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_example
from playwright.sync_api import Browser, Page, sync_playwright

from latbench.report import report_inputs
from latbench.report.pages import comparison, html_page
from latbench.report.report_inputs import ReportFiles
from latbench.tables.writer import write_part

pytestmark = pytest.mark.slow

CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PRINTED = 688  # CSS pixels of A4, less usual margins


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    files = report_example.write(folder, np.random.default_rng(7))
    profile = json.loads(files.profile.read_text())
    profile["layers"][HOSTILE] = next(iter(profile["layers"].values()))
    files.profile.write_text(json.dumps(profile))
    path = folder / "report.html"
    path.write_text(
        html_page.render(
            report_inputs.read_inputs(files.table, ReportFiles(**files.files, accuracy=files.accuracy)),
            command=["latbench", HOSTILE],
        ),
        "utf-8",
    )
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything: the hostile layer of the other is in no database."""
    folder = tmp_path_factory.mktemp("whole")
    files = report_example.write(folder, np.random.default_rng(7))
    path = folder / "report.html"
    path.write_text(
        html_page.render(
            report_inputs.read_inputs(files.table, ReportFiles(**files.every)), command=["latbench", "report"]
        ),
        "utf-8",
    )
    return path


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a table that comes with latbench: eighteen patterns, so wide tables."""
    path = tmp_path_factory.mktemp("bundled") / "report.html"
    path.write_text(
        html_page.render(report_inputs.read_inputs("bundled://amd-epyc-zen4-2-threads"), command=["latbench"]),
        "utf-8",
    )
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two devices, one half as fast, under a hostile name."""
    folder = tmp_path_factory.mktemp("compared")
    for name, device, factor in (("one", HOSTILE, 1.0), ("two", "nvidia-example", 2.0)):
        rows = [row for row in report_example.rows(np.random.default_rng(7)) if row.get("samples_seconds")]
        for row in rows:
            row |= {"device": device, "samples_seconds": [factor * taken for taken in row["samples_seconds"]]}
        write_part(folder / name, rows)
    first, second = comparison.build_sides(
        report_inputs.read_inputs(folder / "one"), report_inputs.read_inputs(folder / "two")
    )
    path = folder / "report.html"
    path.write_text(html_page.build_html(comparison.build_page(first, second, None, ["latbench", "report"])), "utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.fail(f"no {CHROMIUM}: apt-get update && apt-get install -y --no-install-recommends chromium")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-quic", *quiet]
        )
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser, report: Path) -> Iterator[Callable[..., Page]]:
    """Opens the report in a fresh context; at the end nothing may have been logged, thrown, asked or requested."""
    complaints: list[str] = []
    contexts = []

    def open_page(path: Path = report, **settings: Any) -> Page:
        context = browser.new_context(**{"viewport": DESKTOP, **settings})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"page error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: _note_request(request.url, path))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]", timeout=60_000)
        return page

    def _note_request(url: str, path: Path) -> None:
        if url != path.as_uri() and not url.startswith(("data:", "blob:")):
            complaints.append(f"request: {url}")

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def test_all_charts_are_drawn(opened: Callable[..., Page], whole: Path, compared: Path) -> None:
    for page, charts in ((opened(whole), 12), (opened(compared), 2)):
        drawn = page.locator("[data-chart]:has(.xtick)").count()
        assert drawn == page.locator("[data-chart]").count() == charts


@pytest.mark.parametrize(
    ("chart", "mark", "said"),
    [
        ("map", ".scatterlayer .js-line", r"linear|conv"),
        ("roofline", ".scatterlayer .points path", r"FLOP/s, [\d.]+% of its roof"),
        ("predictions", ".scatterlayer .points path", r"measured .*predicted .*side the interval"),
        ("frontier", ".scatterlayer .points path", r"total error"),
        ("accuracy", ".scatterlayer .points path", r"%.*3 seeds"),
        ("profile", ".barlayer .point path", r"s$"),
    ],
)
def test_every_kind_of_chart_tells_more_on_hover(
    opened: Callable[..., Page], whole: Path, chart: str, mark: str, said: str
) -> None:
    page = opened(whole)
    place = page.locator(f'[data-chart="{chart}"]').first
    place.scroll_into_view_if_needed()
    box = place.locator(mark).first.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2 - 1, box["y"] + box["height"] / 2)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tooltip = place.locator(".hoverlayer .hovertext")
    tooltip.first.wait_for(timeout=10_000)
    assert re.search(said, tooltip.first.text_content() or "")


def test_a_cell_of_the_map_says_what_was_measured(opened: Callable[..., Page], whole: Path) -> None:
    page = opened(whole)
    place = page.locator('[data-chart="map"]')
    place.scroll_into_view_if_needed()
    box = place.locator(".heatmaplayer image").bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 5)
    tooltip = place.locator(".hoverlayer .hovertext")
    tooltip.first.wait_for(timeout=10_000)
    assert re.search(r"at \d+%.*× \(.*\) dense.* instead of ", tooltip.first.text_content() or "")


def test_hovering_a_point_shows_its_time_and_kernel(opened: Callable[..., Page]) -> None:
    page = opened()
    chart = page.locator('[data-chart="shapes"][data-part="lines"]')
    chart.scroll_into_view_if_needed()
    box = chart.locator(".scatterlayer .trace .points path").nth(3).bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tooltip = chart.locator(".hoverlayer .hovertext")
    tooltip.wait_for(timeout=10_000)
    assert re.search(r"% ?.*× dense.*s \(.*numba\.", tooltip.first.text_content() or "")


def test_choosing_a_shape_redraws_its_charts(opened: Callable[..., Page]) -> None:
    page = opened()
    chart = page.locator('[data-chart="shapes"][data-part="lines"]')
    before = chart.locator(".annotation-text").first.text_content()
    page.select_option('select[data-choose="shapes"]', index=8)
    page.wait_for_function(
        "([element, before]) => element.querySelector('.annotation-text').textContent !== before",
        arg=[chart.element_handle(), before],
    )


def test_every_table_with_a_heading_sorts(opened: Callable[..., Page], whole: Path, compared: Path) -> None:
    for path in (whole, compared):
        page = opened(path)
        tables = page.locator("table[data-sortable]")
        assert tables.count() >= 3
        for index in range(tables.count()):
            button = tables.nth(index).locator("th button").last
            button.click()
            head = tables.nth(index).locator("th").last
            assert head.get_attribute("aria-sort") == "ascending"
            values = (
                tables.nth(index)
                .locator("tbody tr td:last-child")
                .evaluate_all("(cells) => cells.map((cell) => cell.dataset.value ?? cell.textContent)")
            )
            numbers = [float(value) for value in values if re.fullmatch(r"-?[\d.]+(e-?\d+)?", value)]
            assert numbers == sorted(numbers)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE])
def test_a_heading_sorts_its_table_both_ways(opened: Callable[..., Page], viewport: Any) -> None:
    page = opened(viewport=viewport)
    table = page.locator("#pays table")

    def dense_seconds() -> list[float]:
        cells = table.locator("tbody tr td:last-child")
        return [float(cell.get_attribute("data-value") or "nan") for cell in cells.all()]

    button = table.locator("th button", has_text="fastest dense")
    button.click()
    assert dense_seconds() == sorted(dense_seconds())
    button.click()
    assert dense_seconds() == sorted(dense_seconds(), reverse=True)
    assert table.locator("th").last.get_attribute("aria-sort") == "descending"


def test_the_keyboard_sorts_and_stops_at_tables_only_where_they_scroll(opened: Callable[..., Page]) -> None:
    page = opened()
    scrolling = page.evaluate(
        "[...document.querySelectorAll('.scroll')].map((region) => ["
        "region.scrollWidth > region.clientWidth || region.scrollHeight > region.clientHeight, region.tabIndex])"
    )
    assert {stops for scrolls, stops in scrolling if not scrolls} == {-1}
    assert {stops for scrolls, stops in scrolling if scrolls} == {0}
    heading = page.locator("#pays th button").first
    page.locator("nav a").last.focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        if heading.evaluate("(button) => button === document.activeElement"):
            break
    page.keyboard.press("Enter")
    assert page.locator("#pays th").first.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Space")
    assert page.locator("#pays th").first.get_attribute("aria-sort") == "descending"


@pytest.mark.parametrize("how", [{}, {"viewport": PHONE}, {"print": True}])
def test_numbers_in_a_map_never_run_into_each_other(opened: Callable[..., Page], whole: Path, how: Any) -> None:
    page = opened(whole, **{name: value for name, value in how.items() if name != "print"})
    if "print" in how:
        page.emulate_media(media="print")
        page.wait_for_function("() => document.querySelector('[data-chart=map] .main-svg').clientWidth === 640")
    page.wait_for_timeout(300)  # drawing texts in cells takes plotly another frame
    boxes = page.evaluate(
        "[...document.querySelectorAll('[data-chart=map] .heatmap-label text')].map((text) => {"
        "const box = text.getBoundingClientRect(); return [Math.round(box.top), box.left, box.right]; })"
    )
    assert boxes or how
    for (top, _, right), (below, left, _) in itertools.pairwise(sorted(boxes)):
        assert top != below or right <= left


def test_hostile_names_are_shown_and_never_run(opened: Callable[..., Page], compared: Path) -> None:
    page = opened()
    assert HOSTILE in (page.locator("#profile").text_content() or "")
    assert page.locator("img").count() == 0
    assert HOSTILE in (opened(compared).locator("h1").text_content() or "")
    ticks = page.locator('[data-chart="profile"] .ytick').all_text_contents()
    assert any("<img" in tick for tick in ticks)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["report", "whole", "compared"])
def test_a_phone_scrolls_in_one_direction_only(
    opened: Callable[..., Page], scheme: str, which: str, request: pytest.FixtureRequest
) -> None:
    page = opened(request.getfixturevalue(which), viewport=PHONE, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    widths = page.evaluate("[...document.querySelectorAll('[data-chart] .main-svg')].map((svg) => svg.clientWidth)")
    assert max(widths) <= PHONE["width"]


@pytest.mark.parametrize("which", ["report", "whole", "compared"])
def test_titles_of_axes_are_whole_on_a_phone(
    opened: Callable[..., Page], which: str, request: pytest.FixtureRequest
) -> None:
    page = opened(request.getfixturevalue(which), viewport=PHONE)
    cut = page.evaluate(
        "[...document.querySelectorAll('[data-chart] .xtitle, [data-chart] .ytitle')].filter((title) => {"
        "const [own, all] = [title, title.closest('.main-svg')].map((one) => one.getBoundingClientRect());"
        "return own.left < all.left - 1 || own.right > all.right + 1"
        " || own.top < all.top - 1 || own.bottom > all.bottom + 1;"
        "}).map((title) => title.textContent)"
    )
    assert cut == []


@pytest.mark.parametrize("which", ["report", "whole", "compared", "bundled"])
def test_no_table_is_wider_than_a_printed_page(
    opened: Callable[..., Page], which: str, request: pytest.FixtureRequest
) -> None:
    page = opened(request.getfixturevalue(which), viewport={"width": PRINTED, "height": 1000})
    page.emulate_media(media="print")
    wide = page.evaluate(
        "(most) => [...document.querySelectorAll('table')]"
        ".filter((table) => table.getBoundingClientRect().right > most)"
        ".map((table) => table.closest('section').id + ': ' + table.scrollWidth)",
        PRINTED,
    )
    assert wide == []


def test_the_dark_theme_reaches_page_and_charts_and_can_change(opened: Callable[..., Page]) -> None:
    page = opened(color_scheme="dark")

    def brightness(selector: str, what: str) -> float:
        colour = page.eval_on_selector(selector, f"(element) => getComputedStyle(element).{what}")
        return sum(float(value) for value in re.findall(r"[\d.]+", colour)[:3]) / 3

    tick = '[data-chart="noise"] .xtick text'
    assert brightness("body", "backgroundColor") < 60
    assert brightness(tick, "fill") > 180
    page.emulate_media(color_scheme="light")
    page.wait_for_function(
        "(tick) => getComputedStyle(document.querySelector(tick)).fill !== 'rgb(231, 234, 236)'", arg=tick
    )
    assert brightness("body", "backgroundColor") > 240
    assert brightness(tick, "fill") < 100


def test_print_is_light_and_whole(opened: Callable[..., Page]) -> None:
    page = opened(color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function("() => document.querySelector('[data-chart=noise] .main-svg').clientWidth === 640")
    assert page.eval_on_selector("body", "(body) => getComputedStyle(body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf(format="A4").startswith(b"%PDF")
