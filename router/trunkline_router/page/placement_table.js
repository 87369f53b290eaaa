/** The workers that the router weighed for a request, with the terms of their costs. */

import { h } from "./dom.js";
import { count, duration } from "./format.js";

/** @typedef {import("./fleet_view").Placement} Placement @typedef {import("./fleet_view").Candidate} Candidate */

/** @type {[string, (candidate: Candidate) => string][]} */
const COLUMNS = [
  ["Cost", (candidate) => duration(candidate.cost_s)],
  ["Cached tokens", (candidate) => count(candidate.matched_tokens)],
  ["Queued tokens", (candidate) => count(candidate.queued_tokens)],
  ["Running", (candidate) => count(candidate.running)],
  ["Queue", (candidate) => duration(candidate.queue_s)],
  ["Prefill", (candidate) => duration(candidate.prefill_s)],
  ["Decodes", (candidate) => duration(candidate.decode_s)],
  ["KV wait", (candidate) => duration(candidate.kv_wait_s)],
  ["KV penalty", (candidate) => duration(candidate.kv_penalty_s)],
  ["Slow start", (candidate) => duration(candidate.slow_start_s)],
  ["Others' delay", (candidate) => duration(candidate.others_s)],
];

/** @param {Placement} placement @param {number} index @param {number} placements */
export function placementView(placement, index, placements) {
  const which = placements > 1 ? `${index + 1}. ` : "";
  const chosen = placement.worker_id ? `Chose ${placement.worker_id}` : "Chose a worker";
  const predicted = placement.predicted_ttft_s === null ? "" : `, predicted first token after ${duration(placement.predicted_ttft_s)}`;
  const reason = placement.reason && `: ${placement.reason}`; // operators alone are told it
  const sentence = `${which}${chosen} after ${duration(placement.start_s + placement.duration_s)} by ${placement.policy}${predicted}${reason}`;
  return h("div", {}, h("p", { class: "quiet" }, sentence), placement.candidates.length > 0 && candidatesTable(placement));
}

/** @param {Placement} placement */
function candidatesTable(placement) {
  const heads = COLUMNS.map(([name]) => h("th", { scope: "col", class: "number" }, name));
  const rows = placement.candidates.map((candidate) => {
    const isChosen = candidate.worker_id === placement.worker_id;
    return h(
      "tr",
      { class: isChosen ? "marked" : null },
      h(
        "th",
        { scope: "row" },
        h("span", { class: "mono" }, candidate.worker_id || "a worker"),
        isChosen && h("span", { class: "small" }, " ✓ chosen"),
        candidate.routed_by_load && h("span", { class: "small quiet" }, " by load alone"),
      ),
      ...COLUMNS.map(([, text]) => h("td", { class: "number" }, text(candidate))),
    );
  });
  return h(
    "div",
    { class: "wide", role: "region", "aria-label": "Workers weighed, with their predicted costs", tabindex: "0" },
    h(
      "table",
      { class: "rows small" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Worker"), ...heads)),
      h("tbody", {}, ...rows),
    ),
  );
}
