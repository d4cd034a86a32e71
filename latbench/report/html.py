"""One HTML file without any request: sections, styles, script, data and plotly in one text, under a policy that
forbids the network. The template, the styles and the script are files beside this module; autoescape is on.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import jinja2

from latbench.errors import BadData, EnvironmentUnusable
from latbench.report import data, overview, sections
from latbench.report.inputs import Inputs
from latbench.report.views import Chart, Section

SHAPES = 500  # that the tables and the chart show: more than anybody reads, and some 4 kB each


def render(inputs: Inputs, *, command: Sequence[str], now: datetime | None = None) -> str:
    """The whole report as one HTML text.

    Raises BadData if the table holds no time to show, EnvironmentUnusable if plotly is not installed.
    """
    plotly, script = plotly_script(), _asset("report.js")
    page = build(inputs, command)
    figures = json.dumps(charts(page["sections"]), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _environment().get_template("report.html.j2").render(
        **page,
        made=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        policy=_policy([plotly, script]),
        style=_asset("report.css"),
        plotly=plotly,
        script=script,
        # Nothing in a string of JSON may end the script element it lies in.
        figures=figures.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    )  # fmt: skip


def build(inputs: Inputs, command: Sequence[str]) -> dict[str, Any]:
    """The page as values, ready for the template: headline, verdicts, warnings and sections."""
    points = data.points(inputs.table)
    if points.empty:
        raise BadData("the table holds no timed layer: its rows are failures or whole models; sweep layers first")
    speedups = data.speedup(points)
    if speedups.empty:
        raise BadData(
            "the table has no shape with both a dense and a sparse time, so no speedup can be told: "
            "sweep a dense engine and a pattern at the same shapes"
        )
    starts = data.break_even(speedups)
    places = data.places(speedups)
    settings = data.settings(inputs.table)
    pays = overview.what_pays(speedups, starts, data.noise(inputs.table), settings["device"])
    parts = [
        sections.promise(inputs.verdict, inputs.profile) if inputs.verdict else None,
        sections.profile(inputs.profile) if inputs.profile else None,
        sections.pruned(inputs.manifest) if inputs.manifest else None,
        sections.shapes(speedups, starts, places[:SHAPES], data.without_dense(points)),
        sections.cost_model(inputs.model) if inputs.model else None,
        sections.noise(inputs),
        sections.environment(inputs),
        sections.provenance(inputs, command),
    ]
    facts = [settings["device"], f"{settings['threads']} threads", settings["dtype_w"],
             f"{len(places)} layer shapes", f"{inputs.table['point_id'].nunique()} points"]  # fmt: skip
    warnings = [sentence for sentence, belongs in sections.belonging(inputs) if not belongs]
    if len(places) > SHAPES:
        warnings.append(
            f"Of {len(places)} layer shapes the {SHAPES} with the longest dense time are listed and drawn; "
            "the figures over all shapes count every one."
        )
    return {
        "headline": overview.promise(inputs.verdict, inputs.profile) if inputs.verdict else pays,
        "pays": pays if inputs.verdict else None,
        "subtitle": " · ".join(facts),
        "warnings": warnings,
        "verdicts": overview.verdicts(speedups, starts, places[:SHAPES]),
        "sections": [part for part in parts if part is not None],
    }


def charts(parts: Sequence[Section]) -> dict[str, Any]:
    """The figures by the name of their chart, as report.js reads them."""
    found: list[Chart] = [chart for part in parts for chart in part.charts]
    return {
        chart.name: {"figure": chart.figure} if chart.figure else {"choices": [figure for _, figure in chart.choices]}
        for chart in found
    }


def plotly_script() -> str:
    """The text of plotly.js as it lies in the plotly package. Raises EnvironmentUnusable if that is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise EnvironmentUnusable(
            "the report needs plotly, which is not installed: pip install 'latbench[report]'"
        ) from error
    return str(get_plotlyjs())


def _policy(scripts: Sequence[str]) -> str:
    """Content-Security-Policy: nothing is loaded from anywhere, and only these very scripts run."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'; base-uri 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def _asset(name: str) -> str:
    return resources.files("latbench.report").joinpath(name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
