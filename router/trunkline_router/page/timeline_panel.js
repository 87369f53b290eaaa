/** One request: where its time went, which workers the router weighed, and what became of each attempt. */

import { Refused } from "./api.js";
import { attemptsTable, chunksTable, failures } from "./attempts_table.js";
import { missSentence } from "./cache_miss.js";
import { fill, h } from "./dom.js";
import { count, duration, percent, timeOfDay } from "./format.js";
import { placementView } from "./placement_table.js";
import { outcomeOf } from "./requests_panel.js";
import { advice, blamed, CAUSES, coveredS, shownParts, verdict } from "./ttft_parts.js";
import { waterfall } from "./waterfall.js";

/** @typedef {import("./fleet_view").RequestDetail} RequestDetail */

const AGAIN_MS = 1_000;

export class TimelinePanel {
  /** @param {any} element @param {import("./api.js").Api} api */
  constructor(element, api) {
    this.element = element;
    this.api = api;
    this.openId = "";
    this.again = 0;
    /** @type {HTMLElement | null} */
    this.cameFrom = null;
    element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && this.close());
  }

  /**
   * Fetches a request and shows it. A running one is fetched again until it has ended.
   * @param {string} id
   * @param {string} [tenant]  tells requests apart that have one id
   */
  async open(id, tenant = "") {
    clearTimeout(this.again);
    const isNew = this.openId !== id;
    if (isNew) this.cameFrom = /** @type {HTMLElement | null} */ (document.activeElement);
    this.openId = id;
    history.replaceState(null, "", `#request=${encodeURIComponent(id)}`);
    const query = tenant === "" ? "" : `?tenant=${encodeURIComponent(tenant)}`;
    try {
      const response = await this.api.get(`fleet/requests/${encodeURIComponent(id)}${query}`);
      const request = /** @type {RequestDetail} */ (await response.json());
      if (this.openId !== id) return;
      this.#show(request);
      if (request.is_running) this.again = setTimeout(() => this.open(id, tenant), AGAIN_MS);
    } catch (error) {
      if (this.openId !== id) return;
      if (!(error instanceof Refused || error instanceof TypeError)) throw error;
      this.#showProblem(id, error);
    }
    if (isNew) this.#focus();
  }

  close() {
    clearTimeout(this.again);
    if (this.openId === "") return;
    this.openId = "";
    this.element.hidden = true;
    fill(this.element);
    history.replaceState(null, "", "#requests");
    if (this.cameFrom?.isConnected) this.cameFrom.focus();
  }

  #focus() {
    this.element.hidden = false;
    this.element.focus({ preventScroll: true });
    this.element.scrollIntoView({ block: "nearest" });
  }

  /** @param {string} id @param {Error} error */
  #showProblem(id, error) {
    const isUnknown = error instanceof Refused && error.status === 404;
    const message = isUnknown
      ? `The request was not found: ${error.message}. It may be too old: the oldest ones are forgotten. Calls that were refused before they were read are in the log alone.`
      : `The request was not loaded: ${error instanceof Refused ? error.message : "no connection to the router"}.`;
    fill(this.element, this.#head(id, ""), h("p", {}, message));
    this.element.hidden = false;
  }

  /** @param {RequestDetail} request */
  #show(request) {
    const whole = Math.max(request.e2e_s ?? 0, coveredS(request), ...request.attempts_made.map((made) => made.end_s ?? 0));
    // What is open, and focused, stays so when a running request is shown again.
    const open = new Set([...this.element.querySelectorAll("details[open]")].map((details) => details.dataset.name));
    const hadFocus = this.element.contains(document.activeElement);
    fill(
      this.element,
      this.#head(request.request_id, outcomeOf(request)),
      h("p", { class: "verdict" }, h("strong", {}, verdict(request)), " ", advice(request)),
      request.cache_miss !== "" && h("p", { class: "cache-miss" }, h("strong", {}, "Cache: "), missSentence(request)),
      facts(request),
      h("h4", {}, request.ttft_s === null && !request.is_running ? "Until its end" : "Until the first token"),
      waterfall(partRows(request), coveredS(request)),
      request.placements.length > 0 && h("h4", {}, "Workers that the router weighed"),
      ...request.placements.map((placement, index) => placementView(placement, index, request.placements.length)),
      request.attempts_made.length > 0 && h("h4", {}, "Attempts"),
      request.attempts_made.length > 0 && attemptsTable(request.attempts_made, whole),
      ...failures(request.attempts_made),
      ...chunksTable(request.attempts_made),
    );
    for (const details of this.element.querySelectorAll("details")) details.open = open.has(details.dataset.name);
    this.element.hidden = false;
    if (hadFocus) this.element.focus({ preventScroll: true });
  }

  /** @param {string} id @param {string} outcome */
  #head(id, outcome) {
    const close = h("button", { type: "button", onclick: () => this.close() }, "Close");
    return h(
      "div",
      { class: "timeline-head" },
      h("h3", {}, "Request ", h("span", { class: "mono" }, id)),
      outcome !== "" && h("span", { class: outcome.startsWith("✕") ? "bad" : "quiet" }, outcome),
      close,
    );
  }
}

/** @param {RequestDetail} request */
function partRows(request) {
  const longest = blamed(request);
  return shownParts(request).map(({ part, start_s, duration_s, note }) => ({
    name: CAUSES[part]?.short ?? part,
    note,
    startS: start_s,
    durationS: duration_s,
    isMarked: part === longest,
  }));
}

/** @param {RequestDetail} request */
function facts(request) {
  const cached =
    request.cached_tokens === null
      ? ""
      : `, ${count(request.cached_tokens)} cached (${percent(request.cached_tokens / (request.prompt_tokens || 1))})`;
  const after = (request.e2e_s ?? 0) - (request.ttft_s ?? 0);
  const speed = request.ttft_s !== null && after > 0 ? ` at ${count(request.completion_tokens / after)} tok/s` : "";
  const reasoning = request.reasoning_tokens ? `, ${count(request.reasoning_tokens)} of reasoning` : "";
  /** @type {[string, string][]} */
  const shown = [
    ["Started", timeOfDay(request.started_unix_ms / 1000)],
    ["Tenant", request.tenant || "none"],
    ["Lane", request.lane],
    ["Model", request.model],
    ["Endpoint", `${request.endpoint} (${request.protocol === "http" ? "HTTP" : "gRPC"})`],
    ["Prompt", request.prompt_tokens === 0 ? "–" : `${count(request.prompt_tokens)} tokens${cached}`],
    request.inputs ? ["Inputs", count(request.inputs)] : ["Output", `${count(request.completion_tokens)} tokens${request.choices > 1 ? ` in ${request.choices} choices` : ""}${speed}${reasoning}`],
    ["Tool calls", request.tool_calls ? count(request.tool_calls) : ""],
    ["Router", request.router],
    ["Total", duration(request.e2e_s)],
    ["Client stalled for", duration(request.stalled_s)],
    ["Trace id", request.trace_id],
    ["Cost", request.cost === null ? "" : String(Number(request.cost.toPrecision(3)))],
  ];
  const items = shown.filter(([, value]) => value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  return h("dl", { class: "request-facts" }, ...items);
}
