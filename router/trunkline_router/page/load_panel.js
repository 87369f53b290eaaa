/** Plots of the last minutes: what the batches were made of, and what the KV blocks held. */

import { fill, h, setText } from "./dom.js";
import { decimal } from "./format.js";
import { loadScope } from "./scope.js";
import { StackedPlot } from "./stacked_plot.js";

/** @typedef {import("./fleet_view").HistoryPoint} HistoryPoint */

/** @type {((point: HistoryPoint) => (number | null))[]} */
const BATCH = [
  (point) => point.prefill_tokens_per_s,
  (point) => point.decode_tokens_per_s,
  (point) => point.padding_tokens_per_s,
];
/** @type {((point: HistoryPoint) => (number | null))[]} */
const KV = [(point) => point.kv_live_blocks, (point) => point.kv_cached_blocks, (point) => point.kv_free_blocks];
/** @type {((point: HistoryPoint) => (number | null))[]} */
const QUEUE = [(point) => point.running, (point) => point.waiting];

export class LoadPanel {
  /** @param {{section: any, plots: Element, choice: any, scope: Element}} elements @param {import("./history.js").History} history */
  constructor({ section, plots, choice, scope }, history) {
    this.section = section;
    this.choice = choice;
    this.scope = scope;
    this.history = history;
    this.nowMs = 0;
    /** @type {string[]} */
    this.names = [];
    this.plots = [
      {
        plot: new StackedPlot(
          "Batch composition",
          [
            { label: "prefill", name: "prefill" },
            { label: "decode", name: "decode" },
            { label: "padding", name: "padding", isHatched: true },
          ],
          decimal,
          "tokens computed per second",
        ),
        of: BATCH,
      },
      {
        plot: new StackedPlot(
          "KV blocks",
          [
            { label: "live", name: "live" },
            { label: "cached", name: "cached", isHatched: true },
            { label: "free", name: "free" },
          ],
          decimal,
          "blocks",
        ),
        of: KV,
      },
      {
        plot: new StackedPlot(
          "Choices",
          [
            { label: "running", name: "running" },
            { label: "waiting", name: "waiting", isHatched: true },
          ],
          decimal,
          "running and waiting",
        ),
        of: QUEUE,
      },
    ];
    fill(plots, ...this.plots.map(({ plot }) => plot.element));
    choice.addEventListener("change", () => this.#draw());
    this.#showChoice([]);
  }

  /** @param {import("./fleet_view").FleetView} view */
  show(view) {
    this.section.hidden = this.history.points.length === 0 && !view.you.is_operator;
    this.nowMs = view.at_unix_ms;
    this.#showChoice(view.workers.map((worker) => worker.worker_id || worker.address).filter(Boolean));
    this.#draw();
  }

  clear() {
    this.#showChoice([]);
    this.#draw();
  }

  /** @param {string[]} names */
  #showChoice(names) {
    if (this.choice.options.length > 0 && names.join("\n") === this.names.join("\n")) return;
    this.names = names;
    const chosen = names.includes(this.choice.value) ? this.choice.value : "";
    const options = names.map((name) => h("option", { value: name }, name));
    fill(this.choice, h("option", { value: "" }, "all workers"), ...options);
    this.choice.value = chosen;
  }

  #draw() {
    if (this.section.hidden) return;
    setText(this.scope, loadScope(this.choice.value, this.history.keepsS));
    const points = this.history.of(this.choice.value);
    for (const { plot, of } of this.plots) {
      const shown = points.map((point) => ({ at: point.at_unix_ms / 1000, values: of.map((take) => take(point)) }));
      plot.show(shown, this.nowMs / 1000);
    }
  }
}
