"""The page of one table, and the HTML file of any page: sections, styles, script, data and plotly in one text.

A content security policy forbids the network. Template, styles and script are files in `report/templates`; the
template escapes texts.
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
from latbench.report import point_frames, report_data
from latbench.report.elements import Chart, Section
from latbench.report.pages import common_sections as sections
from latbench.report.pages import overview, speedup_map
from latbench.report.report_data import ReportData
from latbench.report.report_inputs import ReportInputs
from latbench.report.sections import accuracy, target_costs, trade_off
from latbench.report.sections import roofline_chart as roofline

SHAPES = 400  # shown in tables and charts, 4 to 10 kB each


def render(inputs: ReportInputs, *, command: Sequence[str], now: datetime | None = None) -> str:
    """Build the whole report as one HTML text.

    Raises BadData if the table holds no time to show, EnvironmentUnusable if plotly is not installed.
    """
    return build_html(build_page(inputs, report_data.build_report_data(inputs), command), now)


def build_html(page: Mapping[str, Any], now: datetime | None = None) -> str:
    """Build the HTML text of a page: headline, subtitle, warnings and sections, as `build_page` returns them."""
    plotly, script = read_plotly(), _read_template("report.js")
    figures = json.dumps(build_charts(page["sections"]), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _environment().get_template("report.html.j2").render(
        **page,
        made=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        policy=_build_policy([plotly, script]),
        style=_read_template("report.css"),
        plotly=plotly,
        script=script,
        # No string of JSON may end the script element around it.
        figures=figures.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    )  # fmt: skip


def build_page(inputs: ReportInputs, content: ReportData, command: Sequence[str]) -> dict[str, Any]:
    """Build the page as values for the template: headline, subtitle, warnings and sections."""
    places = content.places[:SHAPES]
    settings = point_frames.summarise_settings(inputs.table)
    verdict, chosen = inputs.verdict, inputs.profile
    pays = overview.build_table_headline(content, settings["device"])
    headline = overview.build_promise_headline(verdict, chosen) if verdict else pays
    parts = [
        sections.build_promise(verdict, chosen, content.times) if verdict and content.times is not None else None,
        sections.build_profile(chosen, content.layers) if chosen and content.layers is not None else None,
        trade_off.build_section(content.trade_offs, chosen, verdict)
        if chosen and content.trade_offs is not None
        else None,
        sections.build_pruned(inputs.manifest) if inputs.manifest else None,
        target_costs.build_section(inputs.milder) if inputs.milder else None,
        accuracy.build_section(content.accuracy, content.accuracy_pairs) if content.accuracy is not None else None,
        overview.build_section(content, places, pays if verdict else None),
        speedup_map.build_section(content, places),
        sections.build_shapes(content, places),
        roofline.build_section(content.roofline),
        sections.build_cost_model(inputs.model, content.held_out) if inputs.model else None,
        sections.build_noise(inputs, content),
        sections.build_environment(inputs),
        sections.build_provenance(inputs, command),
    ]
    apart, shapes = ({place[part] for place in content.places} for part in (0, 1))
    ways = f" in {len(apart)} settings" if len(apart) > 1 else ""
    facts = [settings["device"], settings["threads"] and format_threads(settings["threads"]), settings["dtype_w"],
             f"{len(shapes)} layer shapes{ways}", f"{inputs.table['point_id'].nunique()} points"]  # fmt: skip
    warnings = [sentence for sentence, belongs in sections.check_sources(inputs) if not belongs]
    if ways:
        warnings.append(
            f"This table holds {len(apart)} settings ({'; '.join(sorted(apart))}). Times are compared within a "
            "setting. Figures over all shapes count a shape once per setting: for a single setting, report on a "
            "table of it."
        )
    measured = set(inputs.table["dtype_a"].dropna())
    for dtype, wider in point_frames.WIDER.items():
        if dtype in measured and (known := [each for each in wider if each in measured]):
            warnings.append(
                f"Layers in {dtype} are compared with the fastest dense layer in {', '.join([*known, dtype])}."
            )
    if len(content.places) > SHAPES:
        warnings.append(
            f"Only the {SHAPES} layer shapes with the longest dense time are listed and drawn, of "
            f"{len(content.places)}; figures over all shapes count every shape."
        )
    return {
        "headline": headline,
        "subtitle": " · ".join(filter(None, facts)),
        "warnings": warnings,
        "sections": [part for part in parts if part is not None],
    }


def build_charts(parts: Sequence[Section]) -> dict[str, Any]:
    """Build the figures by the name of their chart, as report.js reads them."""
    found: list[Chart] = [chart for part in parts for chart in part.charts]
    return {
        chart.name: {"figure": chart.figure}
        if chart.figure
        else {"choices": [dict(parts) for _, parts in chart.choices]}
        for chart in found
    }


def read_plotly() -> str:
    """Read the text of plotly.js from the plotly package. Raises EnvironmentUnusable if that is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise EnvironmentUnusable(
            "the report needs plotly, which is not installed: pip install 'latbench[report]'"
        ) from error
    return str(get_plotlyjs())


def _build_policy(scripts: Sequence[str]) -> str:
    """Build a content security policy that loads nothing and runs only these scripts."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'; base-uri 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def _read_template(name: str) -> str:
    """Read a file of `report/templates`."""
    return resources.files("latbench.report").joinpath("templates", name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
