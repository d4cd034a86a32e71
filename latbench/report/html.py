"""One HTML file without any request: sections, styles, script, data and plotly in one text, under a policy that
forbids the network. The template, the styles and the script are files beside this module; autoescape is on.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import jinja2

from latbench.base.number_format import format_threads
from latbench.errors import EnvironmentUnusable
from latbench.report import accuracy, overview, roofline, sections, trade_off
from latbench.report import frames as data
from latbench.report import report_data as contents
from latbench.report import speedup_map as maps
from latbench.report.elements import Chart, Section
from latbench.report.inputs import Inputs
from latbench.report.report_data import Content

SHAPES = 400  # that the tables and the chart show: more than anybody reads, and 4 to 10 kB each


def render(inputs: Inputs, *, command: Sequence[str], now: datetime | None = None) -> str:
    """The whole report as one HTML text.

    Raises BadData if the table holds no time to show, EnvironmentUnusable if plotly is not installed.
    """
    return page_text(build(inputs, contents.of(inputs), command), now)


def page_text(page: Mapping[str, Any], now: datetime | None = None) -> str:
    """One HTML text from a page as values: headline, subtitle, warnings and sections, as `build` gives them."""
    plotly, script = plotly_script(), _asset("report.js")
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


def build(inputs: Inputs, content: Content, command: Sequence[str]) -> dict[str, Any]:
    """The page as values, ready for the template: headline, warnings and sections."""
    places = content.places[:SHAPES]
    settings = data.settings(inputs.table)
    verdict, chosen = inputs.verdict, inputs.profile
    pays = overview.what_pays(content, settings["device"])
    headline = overview.promise(verdict, chosen) if verdict else pays
    parts = [
        sections.promise(verdict, chosen, content.times) if verdict and content.times is not None else None,
        sections.profile(chosen, content.layers) if chosen and content.layers is not None else None,
        trade_off.section(content.trade_offs, chosen, verdict) if chosen and content.trade_offs is not None else None,
        sections.pruned(inputs.manifest) if inputs.manifest else None,
        accuracy.section(content.accuracy) if content.accuracy is not None else None,
        overview.section(content, places, pays if verdict else None),
        maps.section(content, places),
        sections.shapes(content, places),
        roofline.section(content.roofline),
        sections.cost_model(inputs.model, content.held_out) if inputs.model else None,
        sections.noise(inputs, content),
        sections.environment(inputs),
        sections.provenance(inputs, command),
    ]
    apart, shapes = ({place[part] for place in content.places} for part in (0, 1))
    ways = f" in {len(apart)} settings" if len(apart) > 1 else ""
    facts = [settings["device"], settings["threads"] and format_threads(settings["threads"]), settings["dtype_w"],
             f"{len(shapes)} layer shapes{ways}", f"{inputs.table['point_id'].nunique()} points"]  # fmt: skip
    warnings = [sentence for sentence, belongs in sections.belonging(inputs) if not belongs]
    if ways:
        warnings.append(
            f"This table holds {len(apart)} settings ({'; '.join(sorted(apart))}). Each time is compared within its "
            "own, but figures over all shapes count a shape once in each: for one alone, report on a table of it."
        )
    if {"bfloat16", "float32"} <= set(inputs.table["dtype_a"].dropna()):
        warnings.append("What is multiplied in bfloat16 is held against the fastest dense layer in it or in float32.")
    if len(content.places) > SHAPES:
        warnings.append(
            f"Of {len(content.places)} layer shapes the {SHAPES} with the longest dense time are listed and drawn; "
            "the figures over all shapes count every one."
        )
    return {
        "headline": headline,
        "subtitle": " · ".join(filter(None, facts)),
        "warnings": warnings,
        "sections": [part for part in parts if part is not None],
    }


def charts(parts: Sequence[Section]) -> dict[str, Any]:
    """The figures by the name of their chart, as report.js reads them."""
    found: list[Chart] = [chart for part in parts for chart in part.charts]
    return {
        chart.name: {"figure": chart.figure}
        if chart.figure
        else {"choices": [dict(parts) for _, parts in chart.choices]}
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
