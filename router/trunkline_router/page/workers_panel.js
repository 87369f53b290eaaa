/** Workers as tiles. */

import { h, fill, KeyedList, setAttribute, setText } from "./dom.js";
import { Facts } from "./facts.js";
import { count, decimal, duration, percent } from "./format.js";
import { ShareBar } from "./share_bar.js";

/** @typedef {import("./fleet_view").WorkerView} WorkerView */

/** State → its mark and the words for it. */
const STATES = {
  ready: ["✓", "Ready"],
  connecting: ["…", "Connecting"],
  draining: ["↓", "Draining"],
  broken: ["✕", "Broken"],
  hung: ["‖", "Hung"],
};

/** @param {WorkerView} worker */
export const nameOf = (worker) => worker.worker_id || worker.address || "a worker";

export class WorkersPanel {
  /**
   * @param {{tiles: Element, none: any}} elements
   * @param {(worker: WorkerView) => void} askDrain
   * @param {(message: string) => void} announce
   */
  constructor({ tiles, none }, askDrain, announce) {
    this.none = none;
    this.announce = announce;
    this.canDrain = false;
    this.nowMs = 0;
    /** @type {Map<string, string>} */
    this.states = new Map();
    this.list = new KeyedList(
      tiles,
      (/** @type {{worker: WorkerView, key: string}} */ item) => item.key,
      () => new Tile(askDrain),
      (tile, item) => tile.show(item.worker, this.canDrain, this.nowMs),
    );
  }

  /** @param {WorkerView[]} workers @param {boolean} canDrain @param {number} nowMs */
  show(workers, canDrain, nowMs) {
    this.canDrain = canDrain;
    this.nowMs = nowMs;
    // A user sees workers without names: their places tell them apart.
    this.list.show(workers.map((worker, place) => ({ worker, key: worker.worker_id || worker.address || `#${place}` })));
    this.none.hidden = workers.length > 0;
    this.#announceChanges(workers);
  }

  /** @param {WorkerView[]} workers */
  #announceChanges(workers) {
    const named = workers.filter((worker) => worker.worker_id || worker.address);
    for (const worker of named) {
      const before = this.states.get(nameOf(worker));
      if (before !== undefined && before !== worker.state) {
        this.announce(`Worker ${nameOf(worker)} is ${worker.state}${worker.reason ? `: ${worker.reason}` : ""}`);
      }
    }
    this.states = new Map(named.map((worker) => [nameOf(worker), worker.state]));
  }
}

class Tile {
  /** @param {(worker: WorkerView) => void} askDrain */
  constructor(askDrain) {
    this.name = h("h3", { class: "mono" });
    this.mark = h("span", { class: "mark", "aria-hidden": "true" });
    this.state = h("span");
    this.badge = h("p", { class: "state" }, this.mark, " ", this.state);
    this.model = h("p", { class: "quiet" });
    this.reason = h("p", { class: "reason" });
    this.kv = new ShareBar(["live", "cached", "free"]);
    this.kvText = h("p", { class: "quiet small" });
    this.facts = new Facts();
    this.numbers = h("div", { class: "numbers" }, this.kv.element, this.kvText, this.facts.element);
    this.lanes = h("tbody");
    this.more = h(
      "details",
      {},
      h("summary", {}, "Lanes"),
      h(
        "table",
        { class: "rows small" },
        h(
          "thead",
          {},
          h("tr", {}, ...["Lane", "Running", "Waiting", "First token p50", "p99", "Between tokens"].map(heading)),
        ),
        this.lanes,
      ),
    );
    this.drain = h("button", { type: "button", "aria-haspopup": "dialog", onclick: () => askDrain(this.worker) }, "Drain …");
    /** @type {any} */
    this.worker = null;
    this.element = h(
      "li",
      { class: "tile" },
      h("div", { class: "tile-head" }, this.name, this.badge),
      this.model,
      this.reason,
      this.numbers,
      h("div", { class: "tile-foot" }, this.more, this.drain),
    );
  }

  /** @param {WorkerView} worker @param {boolean} canDrain @param {number} nowMs */
  show(worker, canDrain, nowMs) {
    this.worker = worker;
    const [mark, word] = STATES[/** @type {keyof typeof STATES} */ (worker.state)] ?? ["?", worker.state];
    setText(this.name, nameOf(worker));
    setText(this.mark, mark);
    setText(this.state, word + lastsFor(worker, nowMs));
    setAttribute(this.element, "data-state", worker.state);
    const address = worker.address && worker.address !== worker.worker_id ? ` · ${worker.address}` : "";
    setText(this.model, worker.model + address);
    const reasons = [worker.reason, worker.routed_by_load ? "routed by load alone: its cache is not known well" : ""];
    setText(this.reason, reasons.filter(Boolean).join(" · "));
    this.reason.hidden = this.reason.textContent === "";
    this.numbers.hidden = worker.running === null;
    if (worker.running !== null) this.#showNumbers(worker);
    this.#showLanes(worker);
    this.drain.hidden = !canDrain;
    this.drain.disabled = worker.state === "connecting";
    const action = worker.state === "draining" ? "Undrain" : "Drain";
    setText(this.drain, `${action} …`);
    setAttribute(this.drain, "aria-label", `${action} ${nameOf(worker)} …`);
  }

  /** @param {WorkerView} worker */
  #showNumbers(worker) {
    const kv = worker.kv;
    const sizes = [kv?.live_blocks ?? null, kv?.cached_blocks ?? null, kv?.free_blocks ?? null];
    const whole = sizes.reduce((/** @type {number} */ sum, blocks) => sum + (blocks ?? 0), 0);
    this.kv.show(sizes);
    const shares = sizes.map((blocks) => percent(blocks === null ? null : blocks / (whole || 1)));
    setText(this.kvText, `KV: live ${shares[0]} · cached ${shares[1]} · free ${shares[2]}`);
    const predicted = worker.predicted_ttft?.predicted_p50_s ?? null;
    const accuracy = worker.index_accuracy_requests ? percent(worker.index_accuracy) : percent(null);
    const cost = worker.cost_per_million_output_tokens;
    const imbalance = worker.expert_imbalance;
    /** @type {[string, string, string][]} */
    const facts = [
      ["Running", count(worker.running), worker.most_running ? `of ${count(worker.most_running)}` : ""],
      ["Waiting", count(worker.waiting), ""],
      ["Output", count(worker.output_tokens_per_s), "tok/s"],
      ["First token", duration(worker.ttft_p50_s), predicted === null ? "p50" : `predicted ${duration(predicted)}`],
      ["Prefix hits", percent(worker.hit_rate), "of tokens"],
      ["Index accuracy", accuracy, worker.index_accuracy_requests ? `of ${count(worker.index_accuracy_requests)}` : ""],
      ["Busy", percent(worker.batch?.busy_share ?? null), `${decimal(worker.batch?.steps_per_s ?? null)} steps/s`],
      ["Preemptions", decimal(worker.preemptions_per_s), "per s"],
      ["KV room", count(kv === null ? null : whole * kv.block_tokens), "tokens"],
    ];
    if (cost !== null) facts.push(["Cost", String(Number(cost.toPrecision(3))), "per M tokens"]);
    if (imbalance !== null) facts.push(["Busiest expert", `${decimal(imbalance)} ×`, "the mean"]);
    this.facts.show(facts);
  }

  /** @param {WorkerView} worker */
  #showLanes(worker) {
    this.more.hidden = !worker.lanes?.length;
    if (!this.more.open || worker.lanes === null) return;
    const rows = worker.lanes.map((lane) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, lane.lane),
        ...[
          count(lane.running),
          count(lane.waiting),
          duration(lane.ttft_p50_s),
          duration(lane.ttft_p99_s),
          duration(lane.itl_p50_s),
        ].map((text) => h("td", { class: "number" }, text)),
      ),
    );
    fill(this.lanes, ...rows);
  }
}

/** For how long a worker takes no requests. @param {WorkerView} worker @param {number} nowMs */
function lastsFor({ state, state_since_unix_ms: sinceMs }, nowMs) {
  if (state === "ready" || sinceMs === null) return "";
  const age = Math.max(1, (nowMs - sinceMs) / 1000);
  return ` for ${age < 100 ? `${Math.round(age)} s` : duration(age)}`;
}

/** @param {string} name @param {number} place */
function heading(name, place) {
  return h("th", { scope: "col", class: place > 0 ? "number" : null }, name);
}
