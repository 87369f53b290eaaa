/** The table of recent requests. */

import { missCounts, shortMiss } from "./cache_miss.js";
import { h, KeyedList, setAttribute, setText } from "./dom.js";
import { count, duration, percent, timeOfDay } from "./format.js";
import { requestsScope } from "./scope.js";
import { isRefusedAtOnce } from "./refusal.js";
import { CAUSES } from "./ttft_parts.js";

/** @typedef {import("./fleet_view").FleetView} FleetView @typedef {import("./fleet_view").RequestSummary} RequestSummary */

const NOTABLE_EVERY_MS = 5_000;
/** What an empty list says. @type {Record<string, string>} */
const NONE = {
  newest: "No request has ended yet.",
  running: "No request runs now.",
  notable: "No request was slow, failed or ran on several workers.",
};

export class RequestsPanel {
  /**
   * @param {{rows: any, none: any, note: Element, scope: Element, filter: any}} elements
   * @param {import("./api.js").Api} api
   * @param {(request: RequestSummary) => void} open  opens a timeline
   */
  constructor({ rows, none, note, scope, filter }, api, open) {
    this.rows = rows;
    this.none = none;
    this.note = note;
    this.scope = scope;
    this.filter = filter;
    this.api = api;
    /** @type {FleetView | null} */
    this.view = null;
    this.shownMs = 0;
    this.list = new KeyedList(
      rows,
      (/** @type {RequestSummary} */ request) => `${request.tenant} ${request.request_id} ${request.started_unix_ms}`,
      () => new Row(open),
      (row, request) => row.show(request),
    );
    // Rows do not move away under a pointer.
    rows.addEventListener("pointerenter", () => this.#hold(true));
    rows.addEventListener("pointerleave", () => this.#hold(false));
    filter.addEventListener("change", () => this.#choose());
  }

  /** @param {FleetView} view */
  show(view) {
    this.view = view;
    if (this.isHeld) return;
    if (this.filter.value === "newest") this.#draw(view.requests);
    else if (this.filter.value === "running") this.#draw(view.running);
    else if (performance.now() - this.shownMs > NOTABLE_EVERY_MS) this.#fetchNotable();
  }

  clear() {
    this.view = null;
    this.list.show([]);
    setText(this.scope, "");
  }

  #choose() {
    this.isHeld = false;
    this.shownMs = 0;
    if (this.view !== null) this.show(this.view);
  }

  /** @param {boolean} isHeld */
  #hold(isHeld) {
    this.isHeld = isHeld;
    setText(this.note, isHeld ? "The list waits while the pointer is on it." : "");
    if (!isHeld && this.view !== null) this.show(this.view);
  }

  async #fetchNotable() {
    this.shownMs = performance.now();
    try {
      const response = await this.api.get("fleet/requests?limit=200&only=notable");
      const { requests } = await response.json();
      if (this.filter.value === "notable") this.#draw(requests);
    } catch (error) {
      if (!(error instanceof Error)) throw error;
      setText(this.note, `Not loaded: ${error.message}`);
    }
  }

  /** @param {RequestSummary[]} requests */
  #draw(requests) {
    this.list.show(requests);
    if (this.view !== null) setText(this.scope, `${requestsScope(this.view.router)} ${missCounts(requests)}`.trim());
    this.none.hidden = requests.length > 0;
    setText(this.none, NONE[this.filter.value]);
  }
}

class Row {
  /** @param {(request: RequestSummary) => void} open */
  constructor(open) {
    /** @type {any} */
    this.request = null;
    this.id = h("button", { type: "button", class: "link mono", onclick: () => open(this.request) });
    this.started = h("td");
    this.tenant = h("td");
    this.worker = h("td", { class: "mono" });
    const number = () => h("td", { class: "number" });
    this.prompt = number();
    this.cached = number();
    this.output = number();
    this.first = number();
    this.total = number();
    this.cause = h("td");
    this.miss = h("td");
    this.outcome = h("td");
    const id = h("th", { scope: "row" }, this.id);
    this.element = h(
      "tr",
      {},
      ...[this.started, id, this.first, this.cause, this.total, this.outcome],
      ...[this.worker, this.tenant, this.prompt, this.cached, this.miss, this.output],
    );
  }

  /** @param {RequestSummary} request */
  show(request) {
    this.request = request;
    setText(this.started, timeOfDay(request.started_unix_ms / 1000));
    setText(this.id, shortId(request.request_id));
    setAttribute(this.id, "title", request.request_id);
    setText(this.tenant, request.tenant || "none");
    const others = request.attempts > 1 ? ` (${request.attempts} attempts)` : "";
    setText(this.worker, (request.worker_id ?? "–") + others);
    setText(this.prompt, count(request.prompt_tokens || null)); // 0: it was refused before it was tokenized
    setText(this.cached, percent(request.cached_tokens === null ? null : request.cached_tokens / request.prompt_tokens));
    setText(this.miss, shortMiss(request));
    setText(this.output, count(request.completion_tokens));
    setText(this.first, duration(request.ttft_s));
    setText(this.cause, isRefusedAtOnce(request) ? "" : (CAUSES[request.cause]?.short ?? request.cause));
    setText(this.total, duration(request.e2e_s));
    setText(this.outcome, outcomeOf(request));
    setAttribute(this.outcome, "class", request.is_failed ? "bad" : request.is_running ? "quiet" : null);
  }
}

/** @param {RequestSummary} request */
export function outcomeOf(request) {
  if (request.is_running) return "running";
  return request.is_failed ? `✕ ${request.outcome}` : request.outcome;
}

/** The start of an id, which is enough to tell requests apart. @param {string} id */
export function shortId(id) {
  return id.length > 14 ? `${id.slice(0, 12)}…` : id;
}
