/** A table of intervals, each with a bar at its place in time. */

import { h } from "./dom.js";
import { duration, percent } from "./format.js";

/** @typedef {{name: string, note: string, startS: number | null, durationS: number, isMarked?: boolean}} Interval */

/** @param {Interval[]} intervals @param {number} wholeS */
export function waterfall(intervals, wholeS) {
  const rows = intervals.map((interval) =>
    h(
      "tr",
      { class: interval.isMarked ? "marked" : null },
      h("th", { scope: "row" }, interval.name, interval.isMarked && h("span", { class: "small" }, " ◂ longest")),
      h("td", { class: "bar-cell" }, interval.startS !== null && timeBar(interval.startS, interval.durationS, wholeS)),
      h("td", { class: "number" }, duration(interval.durationS)),
      h("td", { class: "number" }, percent(wholeS > 0 ? interval.durationS / wholeS : 0)),
      h("td", { class: "number" }, duration(interval.startS)),
      h("td", { class: "quiet" }, interval.note),
    ),
  );
  return h(
    "div",
    { class: "wide", role: "region", "aria-label": "Parts of the time to first token", tabindex: "0" },
    h(
      "table",
      { class: "rows waterfall" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "Part"),
          h("th", { scope: "col", class: "bar-cell" }, h("span", { class: "visually-hidden" }, "Place in time")),
          ...["Took", "Share", "Began after"].map((name) => h("th", { scope: "col", class: "number" }, name)),
          h("th", { scope: "col" }, "Note"),
        ),
      ),
      h("tbody", {}, ...rows),
    ),
  );
}

/**
 * A bar from a start to an end on a line of time.
 * @param {number} startS
 * @param {number} durationS
 * @param {number} wholeS
 */
export function timeBar(startS, durationS, wholeS) {
  const bar = h("span", { class: "time-bar" });
  const whole = wholeS > 0 ? wholeS : 1;
  // The shortest bar has two pixels, and is seen at the end, too.
  bar.style.marginLeft = `min(${(Math.min(1, startS / whole) * 100).toFixed(2)}%, 100% - 2px)`;
  bar.style.width = `${(Math.min(1, durationS / whole) * 100).toFixed(2)}%`;
  return h("div", { class: "time-line", "aria-hidden": "true" }, bar);
}
