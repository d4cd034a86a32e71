// Draws the charts in the reader's theme, lets a select choose a figure and a heading sort its table. No request, no state.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const printing = matchMedia("print");
  const narrow = matchMedia("(max-width: 640px)");

  // A figure names colours that depend on the theme as "@ink"; the style sheet knows them.
  const themed = (value, style) => {
    if (typeof value === "string") return value[0] === "@" ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
    if (Array.isArray(value)) return value.map((item) => themed(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, style)]));
    }
    return value;
  };

  const axis = (given = {}) => ({
    gridcolor: "@grid", linecolor: "@line", zeroline: false, automargin: true, fixedrange: narrow.matches, ...given,
    title: { font: { size: 13 }, standoff: 10, ...given.title },
  });

  // The numbers in the cells of a map are left to the tooltip where they would run into each other.
  const longest = (texts) => Math.max(...texts.flatMap((text) => String(text).split("<br>")).map((line) => line.length));
  const fitting = (trace, width, labels) => {
    if (!trace.texttemplate) return trace;
    const room = (width - 40 - 7 * longest(labels ?? trace.y)) / trace.x.length;
    return room < 7 * longest(trace.text.flat()) + 4 ? { ...trace, texttemplate: "" } : trace;
  };

  // A long label is broken in two at the comma nearest to its middle.
  const broken = (label) => {
    const commas = [...label.matchAll(/, /g)].map((match) => match.index);
    if (label.length < 16 || !commas.length) return label;
    const middle = label.length / 2;
    const at = commas.reduce((best, one) => (Math.abs(one - middle) < Math.abs(best - middle) ? one : best));
    return label.slice(0, at + 1) + "<br>" + label.slice(at + 2);
  };

  // Where room is short, a long layer name keeps its end: that is where layers differ; labels take two lines.
  const shortened = (figure) => {
    if (!narrow.matches) return {};
    if (figure.layout.yaxis.categoryarray) {
      const names = [...new Set(figure.data.flatMap((trace) => trace.y))];
      return { tickvals: names, ticktext: names.map((name) => (name.length > 18 ? "…" + name.slice(-17) : name)) };
    }
    const labels = figure.layout.yaxis.ticktext;
    return labels ? { ticktext: labels.map(broken), tickfont: { size: 11 } } : {};
  };

  const draw = (place) => {
    const entry = figures[place.dataset.chart];
    const select = document.querySelector(`select[data-choose="${place.dataset.chart}"]`);
    const figure = entry.choices ? entry.choices[select.value][place.dataset.part] : entry.figure;
    const style = getComputedStyle(document.documentElement);
    const layout = {
      ...figure.layout,
      xaxis: axis(figure.layout.xaxis),
      yaxis: axis({ ...figure.layout.yaxis, ...shortened(figure) }),
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: "@ink" },
      hoverlabel: { bgcolor: "@panel", bordercolor: "@line", font: { color: "@ink", size: 13 }, align: "left" },
      hovermode: "closest",
      legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom", ...figure.layout.legend },
      margin: { l: 56, r: 16, t: 28, b: 48, ...figure.layout.margin },
      width: printing.matches ? 640 : undefined, // A4 less its margins and the frame
      height: figure.layout.height * (narrow.matches && figure.layout.yaxis.ticktext?.some((l) => l.includes(", ")) ? 1.25 : 1),
    };
    const data = figure.data.map((trace) => fitting(trace, layout.width ?? place.clientWidth, layout.yaxis.ticktext));
    const config = { responsive: true, displaylogo: false, displayModeBar: narrow.matches ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
    return Plotly.react(place, themed(data, style), themed(layout, style), config);
  };

  const places = [...document.querySelectorAll("[data-chart]")];
  const drawAll = () => Promise.all(places.map(draw));

  // The keyboard stops at a table only where it scrolls.
  const regions = [...document.querySelectorAll(".scroll")];
  const fit = () => regions.forEach((region) => {
    region.tabIndex = region.scrollWidth > region.clientWidth || region.scrollHeight > region.clientHeight ? 0 : -1;
  });
  fit();
  addEventListener("resize", fit);
  for (const select of document.querySelectorAll("select[data-choose]")) {
    select.addEventListener("change", () => places.filter((p) => p.dataset.chart === select.dataset.choose).forEach(draw));
  }
  for (const query of [dark, printing, narrow]) query.addEventListener("change", drawAll);
  drawAll().then(() => document.documentElement.setAttribute("data-drawn", ""));

  // A cell sorts by its data-value as a number, or by its text; empty cells come last either way.
  const key = (row, column) => {
    const cell = row.cells[column];
    const given = cell.dataset.value ?? cell.textContent;
    const number = Number(given);
    return given === "" || given === "–" ? null : Number.isNaN(number) ? given : number;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
  for (const table of document.querySelectorAll("table[data-sortable]")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = [...table.tBodies[0].rows].map((row) => [key(row, column), row]);
      keyed.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : (down ? -1 : 1) * compare(a, b)));
      table.tBodies[0].append(...keyed.map(([, row]) => row));
    }));
  }
})();
