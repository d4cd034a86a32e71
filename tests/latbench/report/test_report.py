"""The report as a file: whole, offline, safe against hostile names, small for large tables; and its command."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import report_example
import typer
from typer.testing import CliRunner

from latbench.base.bundled_data import format_place
from latbench.cli.commands.report import report
from latbench.errors import BadData, EnvironmentUnusable, LatbenchError, UsageError
from latbench.report import figures, paper_figures, point_frames, report_data, report_inputs, summary
from latbench.report.pages import common_sections, html_page
from latbench.report.report_inputs import ReportFiles
from latbench.tables.storage import parse_place
from latbench.tables.table import read_table
from latbench.tables.writer import write_part

OPTIONS = {"cost_model": "cost-model"}  # where an option has another name than the field of ReportFiles
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{7*7}}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return report_example.write(tmp_path_factory.mktemp("example"), np.random.default_rng(7))


@pytest.fixture(scope="module")
def page(files: Any) -> str:
    return html_page.render(
        report_inputs.read_inputs(files.table, ReportFiles(**files.every)), command=["latbench", "report"]
    )


class Structure(HTMLParser):
    """The tags of a page with their attributes, the texts of scripts, and all other text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data


def test_the_page_says_what_was_promised_and_measured(page: str) -> None:
    text = Structure(page).text
    for expected in (
        "digits runs 2.17× faster, as promised", "promise kept", "97.50%", "535 µs", "Use vector:32",
        "It uses vector:32 at 60% to 75% in 2 layers, shflbw:32 at 85% in 1 layer, unstructured at 90% in 1",
        "all of them, packed; 2 MiB allowed, 6.5 MiB dense",
        "packed weights take 1.8 MiB of 2 MiB allowed; dense weights take 6.5 MiB.",
    ):  # fmt: skip
        assert expected in text
    anchors = [attributes.get("id") for tag, attributes in Structure(page).tags if tag == "section"]
    assert anchors == [
        "promise", "profile", "frontier", "pruned", "accuracy", "pays", "map", "shapes", "roofline", "model", "noise",
        "environment", "provenance",
    ]  # fmt: skip


def test_bytes_of_weights_are_shown_only_where_they_had_a_budget(files: Any) -> None:
    read = report_inputs.read_inputs(files.table, ReportFiles(**files.files))
    assert read.profile
    free = replace(read, profile=replace(read.profile, most_bytes=None))
    assert "MiB dense" not in Structure(html_page.render(free, command=[])).text


def test_every_file_that_a_report_is_made_from_is_named_with_its_hash(files: Any) -> None:
    read = report_inputs.read_inputs(files.table, ReportFiles(**files.every))
    assert [source.role for source in read.sources] == [
        "table", "cost model", "profile", "pruned model", "verification", "layer database", "workload", "accuracies",
    ]  # fmt: skip
    text = Structure(html_page.render(read, command=[])).text
    assert all(source.digest[:16] in text for source in read.sources)


def test_a_missed_promise_is_said(files: Any) -> None:
    read = report_inputs.read_inputs(files.table, ReportFiles(**files.files))
    assert read.verdict
    missed = replace(read, verdict=replace(read.verdict, outcome="missed"))
    text = Structure(html_page.render(missed, command=[])).text
    assert "promise missed" in text
    assert "not 2.00× as promised" in text


def test_a_table_alone_is_a_report(files: Any) -> None:
    text = Structure(html_page.render(report_inputs.read_inputs(files.table), command=[])).text
    assert "At 75% sparsity, layers run " in text
    assert "On amd-epyc-example: use vector:32 at " in text
    assert "of 9 layer shapes" in text


def test_the_page_loads_nothing_and_runs_only_its_own_scripts(page: str) -> None:
    found = Structure(page)
    loading = [attributes for _, attributes in found.tags if {"src", "srcset", "data"} & attributes.keys()]
    links = [attributes["href"] for _, attributes in found.tags if attributes.get("href")]
    assert not loading
    assert all(link.startswith(("#", "data:")) for link in links if link)
    policy = next(a["content"] for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.split(";")[1]
    charts, *scripts = found.scripts
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts} == allowed
    assert json.loads(charts).keys() == {
        "promise", "profile", "frontier", "accuracy", "map", "shapes", "roofline", "predictions", "model", "noise",
    }  # fmt: skip
    assert page.count("plotly.js v") == 1
    assert "\r" not in page  # a parser would read another text than was hashed


def test_headings_follow_each_other_and_charts_and_tables_have_names(page: str) -> None:
    found = Structure(page)
    levels = [int(tag[1]) for tag, _ in found.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    charts = [attributes for _, attributes in found.tags if "data-chart" in attributes]
    assert charts
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)
    assert all(attributes["aria-label"] for _, attributes in found.tags if attributes.get("role") == "region")


def contrast(one: str, other: str) -> float:
    """Of two colours as #rrggbb: WCAG 2.2, relative luminance."""

    def luminance(colour: str) -> float:
        channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def themes() -> dict[str, dict[str, str]]:
    """The colours of the style sheet by theme and name, those of a theme over the light ones."""
    light, dark, printed = re.findall(r":root \{(.*?)\}", html_page._read_template("report.css"), re.DOTALL)
    named = [re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6});", text) for text in (light, dark, printed)]
    whole = [{name: f"#{c[1] * 2}{c[2] * 2}{c[3] * 2}" if len(c) == 4 else c for name, c in own} for own in named]
    return {"light": whole[0], "dark": whole[0] | whole[1], "print": whole[0] | whole[2]}


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_texts_have_the_contrast_of_wcag_aa(theme: str) -> None:
    colours = themes()[theme]
    for text, ground in itertools.product(("ink", "muted"), ("paper", "panel")):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["accent"], colours["paper"]) >= 4.5
    for end in ("gain-cell", "loss-cell"):  # of maps, whose colours run from here to the panel's
        assert contrast(colours["ink"], colours[end]) >= 4.5, end


def test_texts_on_bars_have_the_contrast_of_wcag_aa() -> None:
    for name, colour in figures.COLOURS.items():
        assert contrast("#ffffff" if name in figures.WHITE_ON else "#000000", colour) >= 4.5, name


def test_hostile_names_stay_text(tmp_path: Path, rng: np.random.Generator) -> None:
    files = report_example.write(tmp_path, rng, task=HOSTILE)
    profile = json.loads(files.profile.read_text())
    profile["layers"] = {HOSTILE: next(iter(profile["layers"].values()))}
    profile["dense_engine"] = HOSTILE
    files.profile.write_text(json.dumps(profile))
    read = report_inputs.read_inputs(files.table, ReportFiles(**files.files))
    hostile = read.table.assign(device=HOSTILE, kernel_used=HOSTILE, backend_version=HOSTILE)
    page = html_page.render(replace(read, table=hostile), command=["latbench", "report", HOSTILE])
    found = Structure(page)
    assert HOSTILE in found.text
    assert len(found.scripts) == 3
    assert "img" not in {tag for tag, _ in found.tags}
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert HOSTILE not in page
    # What plotly gets is escaped too: it reads some HTML in texts.
    assert "<img" not in json.dumps(json.loads(found.scripts[0]))


def test_every_figure_is_one_that_plotly_knows(page: str) -> None:
    import plotly.graph_objects as graph

    colours = {f"@{name}": colour for name, colour in themes()["light"].items()}
    checked = 0

    def themed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: themed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [themed(item) for item in value]
        return colours.get(value, value) if isinstance(value, str) else value

    for entry in json.loads(Structure(page).scripts[0]).values():
        drawn = (
            [entry["figure"]] if "figure" in entry else [f for choice in entry["choices"] for f in choice.values()]
        )
        for figure in drawn:
            graph.Figure(themed(figure))  # raises ValueError for an unknown property or value
            checked += 1
    assert checked > 30


def test_a_hundred_thousand_rows_stay_under_ten_megabytes(files: Any) -> None:
    few = read_table(files.table)
    copies = math.ceil(100_000 / len(few))
    many = pd.concat([few] * copies, ignore_index=True)
    copy = np.repeat(np.arange(copies), len(few))
    many["m"] += copy  # each copy has shapes of its own
    many["point_id"] += copy.astype(str)
    many["c_out"] += copy
    read = report_inputs.ReportInputs(table=many, table_hash="", environments=[])
    page = html_page.render(read, command=[])
    assert len(page.encode()) < 10_000_000
    assert "Only the 400 layer shapes with the longest dense time" in page


def test_a_missing_plotly_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(EnvironmentUnusable, match=r"pip install 'latbench\[report\]'"):
        html_page.read_plotly()


def run(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"NO_COLOR": "1", "COLUMNS": "120"})


def test_the_command_writes_page_and_summary_and_prints_both(files: Any, tmp_path: Path) -> None:
    output, brief = tmp_path / "new" / "report.html", tmp_path / "summary.json"
    options = [f"--{OPTIONS.get(name, name)}={path}" for name, path in files.files.items()]
    result = run(files.table, *options, "-o", output, "--summary", brief)
    assert result.exit_code == 0, result.output
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(brief.read_text()) == {
        "target": 2.0, "outcome": "kept", "predicted_seconds": 5.35e-4, "predicted_low": 5.1e-4,
        "predicted_high": 5.6e-4, "measured_seconds": 5.2e-4, "measured_speedup": 2.17,
        "aimed": pytest.approx(2.0935, abs=1e-4),
        "measured_speedup_low": 2.14, "measured_speedup_high": 2.2, "score_dense": 0.9806, "score_pruned": 0.975,
        "weight_bytes": 1.75 * 2**20, "most_bytes": 2.0 * 2**20, "dense_bytes": 6.5 * 2**20,
    }  # fmt: skip
    lines = dict(re.split(r"\s{2,}", line.rstrip(), maxsplit=1) for line in result.stdout.splitlines())
    assert lines == {
        "task": "digits", "target": "2.00×", "accuracy": "98.06% dense, 97.50% pruned",
        "predicted": "535 µs (510–560)", "weights": "1.8 MiB of 2 MiB allowed, 6.5 MiB dense",
        "measured": "2.17× (2.14–2.20) faster, 520 µs", "aimed at": "2.09×", "promise": "kept", "report": str(output),
    }  # fmt: skip


def test_a_table_alone_has_a_summary_of_nothing(files: Any, tmp_path: Path) -> None:
    brief = tmp_path / "summary.json"
    assert run(files.table, "-o", tmp_path / "report.html", "--summary", brief).exit_code == 0
    assert json.loads(brief.read_text()) == dict.fromkeys([*summary.KEYS, *summary.PROFILE_KEYS])


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("cost_model", None, "cost_model.json: no such cost model; make it with latbench fit"),
        ("cost_model", "{", "cost_model.json: not a cost model"),
        ("cost_model", "[]", "cost_model.json: not a cost model"),
        ("profile", "{}", "not a profile, which"),
        ("profile", None, "profile.json does not exist"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, rng: np.random.Generator, name: str, content: str | None, expected: str
) -> None:
    files = report_example.write(tmp_path, rng)
    path = files.files[name]
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(BadData, match=expected):
        report_inputs.read_inputs(files.table, ReportFiles(**files.files))


def test_a_bad_folder_is_named(files: Any, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"verify\.json does not exist: run latbench verify first"):
        report_inputs.read_inputs(files.table, ReportFiles(verify=tmp_path))
    (tmp_path / "verify.json").write_text("{}")
    with pytest.raises(BadData, match=r"verify\.json is not what latbench verify writes"):
        report_inputs.read_inputs(files.table, ReportFiles(verify=tmp_path))
    with pytest.raises(BadData, match="is no pruned model"):
        report_inputs.read_inputs(files.table, ReportFiles(pruned=tmp_path))


def test_a_table_without_sparse_times_is_refused(files: Any) -> None:
    rows = read_table(files.table)
    dense = report_inputs.ReportInputs(table=rows[rows["pattern"] == "dense"], table_hash="", environments=[])
    with pytest.raises(BadData, match="both a dense and a sparse time"):
        html_page.render(dense, command=[])
    failed = report_inputs.ReportInputs(table=rows[rows["status"] == "unsupported"], table_hash="", environments=[])
    with pytest.raises(BadData, match="no timed layer"):
        html_page.render(failed, command=[])


def test_a_failure_of_the_command_writes_nothing(tmp_path: Path) -> None:
    result = run(tmp_path / "none", "-o", tmp_path / "report.html")
    assert isinstance(result.exception, LatbenchError)
    assert not (tmp_path / "report.html").exists()


def test_files_from_another_table_are_pointed_out(files: Any) -> None:
    read = report_inputs.read_inputs(files.table, ReportFiles(**files.files))
    assert read.profile
    assert "The pruned model follows this very profile." in Structure(html_page.render(read, command=[])).text
    other = replace(read, profile=replace(read.profile, table_hash="other"), manifest_hash="other")
    text = Structure(html_page.render(other, command=[])).text
    assert "The profile was made from another table." in text
    assert "The verification is of another pruned model." in text
    assert read.verdict
    foreign = replace(read, verdict=replace(read.verdict, device="elsewhere", target=7.0))
    warned = [sentence for sentence, belongs in common_sections.check_sources(foreign) if not belongs]
    [device] = set(read.table["device"])
    assert f"The verification is of device elsewhere, the table of device {device}." in warned
    assert f"The verification is of target 7.0, the profile of target {read.profile.target}." in warned
    assert not [line for line, belongs in common_sections.check_sources(read) if not belongs and "device" in line]


@pytest.mark.parametrize(
    "damage",
    [
        {"layers": []},
        {"layers": {"fc": {"weights": 4}}},
        {"stages": [{"name": "dense", "loss": None, "score": 0.9}]},
        {"stages": [{"loss": 0.1, "score": 0.9}]},
        {"method": None},
    ],
)
def test_a_damaged_manifest_is_one_line(files: Any, damage: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(report_inputs.read_inputs(files.table, ReportFiles(**files.files)).manifest or {})
    monkeypatch.setattr("search.pruning.storage.model_folder.read_manifest", lambda folder: whole | damage)
    with pytest.raises(BadData, match="is not a manifest that latbench prune wrote"):
        report_inputs.read_inputs(files.table, ReportFiles(**files.files))


def test_the_command_loads_nothing_heavy_before_it_runs() -> None:
    code = "import sys, latbench.cli.commands.report; "
    code += "print({'pandas', 'plotly', 'jinja2', 'torch', 'matplotlib'} & set(sys.modules));"
    code += "import latbench.report.pages.html_page, latbench.report.report_inputs;"
    code += "print({'scipy', 'sklearn', 'torch', 'matplotlib'} & set(sys.modules))"  # nor for a table alone
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["set()", "set()"]


def test_a_database_without_its_workload_is_refused(files: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--database .* needs the --profile of its search and the --workload"):
        report_inputs.read_inputs(files.table, ReportFiles(profile=files.profile, database=files.database))
    with pytest.raises(UsageError, match="--workload names the layers of a --database"):
        report_inputs.read_inputs(files.table, ReportFiles(profile=files.profile, workload=str(files.workload)))
    with pytest.raises(BadData, match=r"database holds no pruned layer of the profile"):
        report_inputs.read_inputs(
            files.table,
            ReportFiles(profile=files.profile, workload=str(files.workload), database=tmp_path / "database"),
        )
    with pytest.raises(BadData, match=r"bert-base has no layer blocks\.0\.linear"):
        report_inputs.read_inputs(
            files.table, ReportFiles(profile=files.profile, workload="bert-base", database=files.database)
        )


def test_a_comparison_is_one_page_with_both_sides(files: Any, tmp_path: Path) -> None:
    slower = [
        {**row, "device": "nvidia-example", "samples_seconds": [2 * s for s in row["samples_seconds"]]}
        for row in report_example.rows(np.random.default_rng(7)) if row.get("samples_seconds")
    ]  # fmt: skip
    write_part(tmp_path / "other", slower)
    output = tmp_path / "report.html"
    result = run(files.table, "--against", tmp_path / "other", "-o", output)
    assert result.exit_code == 0, result.output
    text = Structure(output.read_text(encoding="utf-8")).text
    assert "amd-epyc-example is 2.00× as fast as nvidia-example" in text
    assert "9 shared layer shapes" in text
    assert "What became slower" not in text  # of unlike devices there is no before and after


def test_a_comparison_of_one_device_says_what_became_slower(files: Any, tmp_path: Path) -> None:
    changed = []
    for row in report_example.rows(np.random.default_rng(7)):
        factor = 1.5 if row["pattern"] == "unstructured" else 1.0
        samples = row.get("samples_seconds")
        changed.append({**row, "samples_seconds": [factor * s for s in samples]} if samples else row)
    write_part(tmp_path / "other", changed)
    output = tmp_path / "report.html"
    assert run(tmp_path / "other", "--against", files.table, "-o", output).exit_code == 0
    text = Structure(output.read_text(encoding="utf-8")).text
    count = len(report_example.SHAPES) * len(report_example.SPARSITIES)
    assert re.search(rf"{count} of \d+ points became slower, 0 faster", text)
    assert f"{count} SLOWER" in text


def test_a_table_that_came_with_latbench_is_named_as_it_is_asked_for(tmp_path: Path) -> None:
    two, one = "bundled://amd-epyc-zen4-2-threads", "bundled://amd-epyc-zen4-1-thread"
    assert format_place(parse_place(two)) == two
    assert format_place(tmp_path) == str(tmp_path)
    result = run(two, "--against", one, "-o", tmp_path / "report.html")
    assert isinstance(result.exception, UsageError)
    assert str(result.exception).startswith(f"unlike modes: threads is 1 in {one}, and 2 in {two}")


def test_a_comparison_takes_nothing_else(files: Any, tmp_path: Path) -> None:
    result = run(files.table, "--against", files.table, "--cost-model", files.model, "-o", tmp_path / "report.html")
    assert isinstance(result.exception, UsageError)
    assert "goes with --output and --figures alone" in str(result.exception)


def test_a_comparison_has_figures_of_its_ratios(files: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    slower = [
        {**row, "device": "nvidia-example", "samples_seconds": [2 * s for s in row["samples_seconds"]]}
        for row in report_example.rows(np.random.default_rng(7)) if row.get("samples_seconds")
    ]  # fmt: skip
    write_part(tmp_path / "other", slower)
    asked = ("--against", tmp_path / "other", "-o", tmp_path / "report.html", "--figures", tmp_path / "figures")
    result = run(files.table, *asked)
    assert result.exit_code == 0, result.output
    assert f"report.html is written, and the figures in {tmp_path / 'figures'}" in result.output.replace("\n", "")
    assert (tmp_path / "report.html").exists()
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{name}.{kind}" for name in ("ratio_map", "ratios") for kind in ("pdf", "svg", "csv")}
    ratios = pd.read_csv(tmp_path / "figures" / "ratios.csv")["ratio"]
    np.testing.assert_allclose(ratios, 2.0)  # every time of the other table is doubled
    svg = (tmp_path / "figures" / "ratio_map.svg").read_text()
    assert "times as fast on amd-epyc-example" in svg and "as on nvidia-example" in svg
    (tmp_path / "report.html").unlink()
    assert run(files.table, *asked).exit_code == 0
    assert (tmp_path / "figures" / "ratio_map.svg").read_text() == svg  # the same every time


@pytest.mark.slow
def test_figures_for_papers_are_the_same_every_time(files: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = [f"--{OPTIONS.get(name, name)}={path}" for name, path in files.every.items()]
    for folder in ("one", "two"):
        result = run(files.table, *options, "-o", tmp_path / "report.html", "--figures", tmp_path / folder)
        assert result.exit_code == 0, result.output
    written = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert {name.partition(".")[0] for name in written} == {
        "promise", "profile", "frontier", "accuracy", "speedup", "map", "roofline", "predictions", "noise",
    }  # fmt: skip
    for name, content in written.items():
        assert content == (tmp_path / "two" / name).read_bytes(), name
        assert content.startswith({"pdf": b"%PDF", "svg": b"<?xml"}.get(name[-3:], b""))
    drawn = pd.read_csv(tmp_path / "one" / "speedup.csv")
    assert {"pattern", "sparsity", "speedup", "speedup_low", "speedup_high"} <= set(drawn.columns)


def test_a_figure_for_papers_draws_no_more_points_than_one_can_see(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    read = report_inputs.read_inputs(files.table)
    rows = report_data.build_report_data(read).roofline
    monkeypatch.setattr(paper_figures.roofline, "POINTS", 10)
    paper_figures._roofline(figure := Figure(), rows)
    [axes] = figure.axes
    roof, *kernels = axes.lines
    assert len(rows) > 10 == len(roof.get_xdata()) == sum(len(line.get_xdata()) for line in kernels)


def test_nothing_of_a_figure_for_papers_is_cut_off(files: Any) -> None:
    mpl = pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    read = report_inputs.read_inputs(files.table, ReportFiles(profile=files.profile, verify=files.verify))
    for name, drawing in paper_figures.list_drawings(report_data.build_report_data(read), read).items():
        with mpl.rc_context(paper_figures.STYLE):
            figure = Figure(figsize=(drawing.width, drawing.height))
            FigureCanvasAgg(figure)
            drawing.draw(figure, drawing.rows)
            figure.draw_without_rendering()
            box = figure.get_tightbbox()  # inches
        assert box.x0 >= 0 and box.y0 >= 0, name
        assert box.x1 <= drawing.width and box.y1 <= drawing.height, name


def test_a_missing_matplotlib_is_said_before_anything_is_written(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(files.table, "-o", tmp_path / "report.html", "--figures", tmp_path / "figures")
    assert isinstance(result.exception, EnvironmentUnusable)
    assert "pip install 'latbench[figures]'" in str(result.exception)
    assert not (tmp_path / "report.html").exists()


def test_example_has_what_the_page_must_show(files: Any) -> None:
    table = read_table(files.table)
    assert {"ok", "noisy", "unsupported"} <= set(table["status"])
    assert (
        point_frames.build_break_evens(point_frames.build_speedups(point_frames.build_points(table)))["break_even"]
        .isna()
        .any()
    )
