/** The fleet in seven figures. */

import { Facts } from "./facts.js";
import { count, duration, percent } from "./format.js";

/** @typedef {import("./fleet_view").FleetView} FleetView @typedef {import("./fleet_view").WorkerView} WorkerView */

export class SummaryPanel {
  /** @param {Element} element */
  constructor(element) {
    this.facts = new Facts();
    this.facts.element.className = "figures";
    element.replaceWith(this.facts.element);
  }

  clear() {
    this.facts.show([]);
  }

  /** @param {FleetView} view @param {import("./fleet_view").HistoryPoint | null} latest */
  show(view, latest) {
    const ready = view.workers.filter((worker) => worker.state === "ready").length;
    /** @type {[string, string, string][]} */
    const figures = [["Workers", `${ready}`, `of ${view.workers.length} ready`]];
    if (view.workers.some((worker) => worker.running !== null)) {
      const live = sum(view.workers, (worker) => worker.kv?.live_blocks ?? null);
      const cached = sum(view.workers, (worker) => worker.kv?.cached_blocks ?? null);
      const free = sum(view.workers, (worker) => worker.kv?.free_blocks ?? null);
      const blocks = (live ?? 0) + (cached ?? 0) + (free ?? 0);
      figures.push(
        ["Running", count(sum(view.workers, (worker) => worker.running)), "choices"],
        ["Waiting", count(sum(view.workers, (worker) => worker.waiting)), "choices"],
        ["Output", count(sum(view.workers, (worker) => worker.output_tokens_per_s)), "tok/s"],
        ["First token", duration(latest?.ttft_p50_s ?? null), "p50"],
        ["KV live", percent(live === null || blocks === 0 ? null : live / blocks), `of ${count(blocks)} blocks`],
        ["Prefix hits", percent(latest?.hit_rate ?? null), "of tokens"],
      );
    }
    this.facts.show(figures);
  }
}

/** @param {WorkerView[]} workers @param {(worker: WorkerView) => number | null} of  @returns {number | null} */
function sum(workers, of) {
  const known = workers.map(of).filter((value) => value !== null);
  return known.length === 0 ? null : known.reduce((total, value) => total + value, 0);
}
