/** What happened in the last minutes: the router's points for the whole fleet, and this page's own for each worker. */

/** @typedef {import("./fleet_view").HistoryPoint} HistoryPoint @typedef {import("./fleet_view").WorkerView} WorkerView */

export class History {
  keepsS = 600;
  /** @type {HistoryPoint[]} */
  points = [];
  /** @type {Map<string, HistoryPoint[]>} */
  workers = new Map();

  clear() {
    this.points = [];
    this.workers.clear();
  }

  /** @param {import("./fleet_view").FleetView} view @param {boolean} isSnapshot */
  take(view, isSnapshot) {
    this.keepsS = view.history.keeps_s;
    if (isSnapshot) this.points = [];
    const last = this.points.at(-1)?.at_unix_ms ?? 0;
    this.points.push(...view.history.points.filter((point) => point.at_unix_ms > last));
    this.points = this.#recent(this.points, view.at_unix_ms);
    for (const [name, points] of this.workers) {
      const recent = this.#recent(points, view.at_unix_ms);
      if (recent.length === 0) this.workers.delete(name);
    }
    for (const worker of view.workers) {
      const name = worker.worker_id || worker.address;
      if (!name || worker.running === null) continue;
      const points = this.workers.get(name) ?? [];
      points.push(pointOf(worker, view.at_unix_ms));
      this.workers.set(name, this.#recent(points, view.at_unix_ms));
    }
  }

  /** @param {string} worker  "" for the whole fleet */
  of(worker) {
    return worker === "" ? this.points : (this.workers.get(worker) ?? []);
  }

  /** @param {HistoryPoint[]} points @param {number} nowMs */
  #recent(points, nowMs) {
    const first = points.findIndex((point) => point.at_unix_ms >= nowMs - this.keepsS * 1000);
    return first < 0 ? [] : points.slice(first);
  }
}

/** @param {WorkerView} worker @param {number} atMs @returns {HistoryPoint} */
function pointOf(worker, atMs) {
  return {
    at_unix_ms: atMs,
    running: worker.running,
    waiting: worker.waiting,
    prefill_tokens_per_s: worker.batch?.prefill_tokens_per_s ?? null,
    decode_tokens_per_s: worker.batch?.decode_tokens_per_s ?? null,
    padding_tokens_per_s: worker.batch?.padding_tokens_per_s ?? null,
    kv_live_blocks: worker.kv?.live_blocks ?? null,
    kv_cached_blocks: worker.kv?.cached_blocks ?? null,
    kv_free_blocks: worker.kv?.free_blocks ?? null,
    output_tokens_per_s: worker.output_tokens_per_s,
    ttft_p50_s: worker.ttft_p50_s,
    hit_rate: worker.hit_rate,
  };
}
