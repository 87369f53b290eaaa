/** Asks before a worker is drained, and drains it. */

import { Refused } from "./api.js";
import { byId, setText } from "./dom.js";
import { nameOf } from "./workers_panel.js";

/** @typedef {import("./fleet_view").WorkerView} WorkerView */

export class DrainDialog {
  /** @param {import("./api.js").Api} api @param {(message: string) => void} announce */
  constructor(api, announce) {
    this.api = api;
    this.announce = announce;
    this.dialog = byId("drain-dialog");
    this.confirm = byId("drain-confirm");
    this.problem = byId("drain-problem");
    /** @type {WorkerView | null} */
    this.worker = null;
    byId("drain-cancel").addEventListener("click", () => this.dialog.close());
    byId("drain-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#drain();
    });
  }

  /** @param {WorkerView} worker */
  ask(worker) {
    this.worker = worker;
    const name = nameOf(worker);
    const open = worker.open_choices ? ` It has ${worker.open_choices} unfinished choices of this router.` : "";
    setText(byId("drain-title"), `Drain ${name}?`);
    setText(
      byId("drain-text"),
      `${name} finishes its requests and takes no new ones until its process is started again.${open}`,
    );
    setText(this.confirm, `Drain ${name}`);
    setText(this.problem, "");
    this.confirm.disabled = false;
    this.dialog.showModal();
    byId("drain-cancel").focus();
  }

  /** Closes without draining, and forgets the worker. */
  clear() {
    this.dialog.close();
    this.worker = null;
    for (const id of ["drain-title", "drain-text", "drain-problem", "drain-confirm"]) setText(byId(id), "");
  }

  async #drain() {
    if (this.worker === null) return;
    const name = nameOf(this.worker);
    this.confirm.disabled = true;
    try {
      await this.api.post(`fleet/workers/${encodeURIComponent(this.worker.worker_id || this.worker.address)}/drain`, {});
      this.announce(`${name} is being drained`);
      this.dialog.close();
    } catch (error) {
      if (!(error instanceof Refused || error instanceof TypeError)) throw error;
      const why = error instanceof Refused ? error.message : "no connection to the router";
      setText(this.problem, `${name} was not drained: ${why}.`);
      this.confirm.disabled = false;
    }
  }
}
