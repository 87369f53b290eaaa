/** A plot of quantities over time, stacked on each other, with a legend that shows their values and a table of them. */

import { fill, h, setText, svg } from "./dom.js";
import { timeOfDay } from "./format.js";

/**
 * @typedef {{at: number, values: (number | null)[]}} Point  `at` in seconds since 1970, one value for each series
 * @typedef {{label: string, name: string, isHatched?: boolean}} Series  `name`: its class, which gives the colour
 */

const WIDTH = 600;
const HEIGHT = 150;
/** Points further apart than this are not joined: nothing was sampled between them. */
const LONGEST_JOIN_S = 12;
const TABLE_ROWS = 12;
/** A plot shows one of these spans: the shortest that has all points. */
const SPANS_S = [120, 300, 600, 1800, 3600];

export class StackedPlot {
  /**
   * @param {string} title
   * @param {Series[]} series  the first one is drawn at the bottom
   * @param {(value: number | null) => string} format
   * @param {string} unit
   */
  constructor(title, series, format, unit) {
    this.series = series;
    this.format = format;
    /** @type {Point[]} */
    this.points = [];
    this.spanS = SPANS_S[0];
    this.now = 0;
    this.hovered = false;
    const name = `plot-${series[0].name}`;
    const patterns = series.filter((one) => one.isHatched).map((one) => hatch(`${name}-${one.name}`, one.name));
    this.areas = series.map((one) =>
      svg("path", { class: `area ${one.name}`, fill: one.isHatched ? `url(#${name}-${one.name})` : null }),
    );
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, "vector-effect": "non-scaling-stroke" });
    const grid = [0, 0.5].map((share) =>
      svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: share * HEIGHT, y2: share * HEIGHT, "vector-effect": "non-scaling-stroke" }),
    );
    this.drawing = svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        "aria-hidden": "true",
        onpointermove: (/** @type {PointerEvent} */ event) => this.#point(event),
        onpointerleave: () => this.#leave(),
      },
      svg("defs", {}, ...patterns),
      ...this.areas,
      ...grid,
      this.cursor,
    );
    this.top = h("span", { class: "tick top" });
    this.middle = h("span", { class: "tick middle" });
    this.start = h("span");
    this.when = h("span", { class: "when" });
    this.values = series.map(() => h("span", { class: "value" }));
    this.total = h("span", { class: "value" });
    this.table = h("div", { class: "wide", role: "region", "aria-label": `${title}, as a table`, tabindex: "0" });
    this.details = h(
      "details",
      { ontoggle: () => this.#showTable() },
      h("summary", {}, "As a table"),
      this.table,
    );
    this.tableFrom = 0;
    this.element = h(
      "figure",
      { class: "panel plot" },
      h("figcaption", {}, h("h3", {}, title), h("span", { class: "quiet" }, unit)),
      h(
        "ul",
        { class: "legend" },
        ...series.map((one, index) =>
          h("li", {}, h("span", { class: `swatch ${one.name}${one.isHatched ? " hatched" : ""}` }), one.label, " ", this.values[index]),
        ),
        h("li", {}, "total ", this.total),
        h("li", {}, this.when),
      ),
      h("div", { class: "drawing" }, this.drawing, this.top, this.middle),
      h("div", { class: "times quiet small", "aria-hidden": "true" }, this.start, h("span", {}, "now")),
      this.details,
    );
  }

  /** @param {Point[]} points  in order of time  @param {number} now */
  show(points, now) {
    this.points = points;
    this.now = now;
    const needed = now - (points[0]?.at ?? now);
    this.spanS = SPANS_S.find((span) => span >= needed) ?? needed;
    const top = niceAbove(Math.max(0, ...this.points.map((point) => total(point.values))));
    setText(this.top, this.format(top));
    setText(this.middle, this.format(top / 2));
    setText(this.start, `${Math.round(this.spanS / 60)} min ago`);
    const runs = runsOf(this.points);
    this.areas.forEach((area, index) => area.setAttribute("d", runs.map((run) => this.#area(run, index, top)).join("")));
    if (!this.hovered) this.#showValues(this.points.at(-1) ?? null, "");
    this.#showTable();
  }

  /** @param {Point[]} run @param {number} index @param {number} top */
  #area(run, index, top) {
    const upper = run.map((point) => this.#place(point.at, total(point.values.slice(0, index + 1)), top));
    const lower = run.map((point) => this.#place(point.at, total(point.values.slice(0, index)), top)).reverse();
    return `M${[...upper, ...lower].join("L")}Z`;
  }

  /** @param {number} at @param {number} value @param {number} top */
  #place(at, value, top) {
    return `${this.#across(at).toFixed(1)},${(HEIGHT * (1 - value / top)).toFixed(1)}`;
  }

  /** @param {number} at */
  #across(at) {
    return WIDTH * (1 - (this.now - at) / this.spanS);
  }

  /** @param {PointerEvent} event */
  #point(event) {
    const box = this.drawing.getBoundingClientRect();
    const at = this.now - this.spanS * (1 - (event.clientX - box.left) / box.width);
    const nearest = this.points.reduce(
      (/** @type {Point | null} */ best, point) =>
        best === null || Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best,
      null,
    );
    if (nearest === null) return;
    this.hovered = true;
    this.cursor.setAttribute("x1", this.#across(nearest.at));
    this.cursor.setAttribute("x2", this.#across(nearest.at));
    this.cursor.classList.add("shown");
    this.#showValues(nearest, `at ${timeOfDay(nearest.at)}`);
  }

  #leave() {
    this.hovered = false;
    this.cursor.classList.remove("shown");
    this.#showValues(this.points.at(-1) ?? null, "");
  }

  /** @param {Point | null} point @param {string} when */
  #showValues(point, when) {
    this.values.forEach((value, index) => setText(value, this.format(point?.values[index] ?? null)));
    setText(this.total, this.format(point === null ? null : total(point.values)));
    setText(this.when, when);
  }

  /** The table has one row for each of a dozen spans, and changes only when a span ends: it can be read in peace. */
  #showTable() {
    if (!this.details.open) {
      this.tableFrom = 0;
      return;
    }
    const step = this.spanS / TABLE_ROWS;
    const last = this.points.at(-1);
    if (last === undefined || last.at - this.tableFrom < step) return;
    this.tableFrom = last.at;
    const rows = [];
    for (let index = this.points.length - 1, before = Infinity; index >= 0; index -= 1) {
      const point = this.points[index];
      if (before - point.at < step) continue;
      before = point.at;
      const cells = [...point.values, total(point.values)].map((value) => h("td", { class: "number" }, this.format(value)));
      rows.push(h("tr", {}, h("th", { scope: "row" }, timeOfDay(point.at)), ...cells));
    }
    const heads = [...this.series.map((one) => one.label), "total"].map((label) => h("th", { scope: "col", class: "number" }, label));
    fill(
      this.table,
      h("table", { class: "rows small" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Time"), ...heads)), h("tbody", {}, ...rows)),
    );
  }
}

/** @param {(number | null)[]} values @returns {number} */
function total(values) {
  return values.reduce((/** @type {number} */ sum, value) => sum + (value ?? 0), 0);
}

/** Points without a long gap between them. @param {Point[]} points */
export function runsOf(points) {
  /** @type {Point[][]} */
  const runs = [];
  let before = -Infinity;
  for (const point of points) {
    if (point.values.every((value) => value === null)) continue;
    if (point.at - before > LONGEST_JOIN_S) runs.push([]);
    runs[runs.length - 1].push(point);
    before = point.at;
  }
  return runs;
}

/** The next round number, of which the half is round too. @param {number} value */
export function niceAbove(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.6, 2, 3, 4, 6, 8, 10].map((factor) => factor * power).find((nice) => nice >= value) ?? 10 * power;
}

/** @param {string} id @param {string} name */
function hatch(id, name) {
  return svg(
    "pattern",
    { id, width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { class: `hatch-ground ${name}`, width: 8, height: 8 }),
    svg("rect", { class: `hatch-line ${name}`, width: 3, height: 8 }),
  );
}
