/** Asks before a worker is drained, or before its drain ends, and does it. */

import { Refused } from "./api.js";
import { byId, setText } from "./dom.js";
import { nameOf } from "./workers_panel.js";

/** @typedef {import("./fleet_view").WorkerView} WorkerView */

/**
 * What can be asked for: the endpoint, the words of the dialog, and what is announced.
 * @typedef {{endpoint: string, title: string, text: string, confirm: string, done: string, failed: string}} Action
 */

/** @param {WorkerView} worker @returns {Action} */
function actionFor(worker) {
  const name = nameOf(worker);
  if (worker.state === "draining") {
    return {
      endpoint: "undrain",
      title: `End the drain of ${name}?`,
      text: `${name} takes new requests again, from all routers.`,
      confirm: `Undrain ${name}`,
      done: `The drain of ${name} has ended`,
      failed: `The drain of ${name} has not ended`,
    };
  }
  const open = worker.open_choices ? ` It has ${worker.open_choices} unfinished choices of this router.` : "";
  return {
    endpoint: "drain",
    title: `Drain ${name}?`,
    text: `${name} finishes its requests and takes no new ones, until its drain is ended here or its process is started again.${open}`,
    confirm: `Drain ${name}`,
    done: `${name} is being drained`,
    failed: `${name} was not drained`,
  };
}

export class DrainDialog {
  /** @param {import("./api.js").Api} api @param {(message: string) => void} announce */
  constructor(api, announce) {
    this.api = api;
    this.announce = announce;
    this.dialog = byId("drain-dialog");
    this.confirm = byId("drain-confirm");
    this.problem = byId("drain-problem");
    /** @type {{worker: WorkerView, action: Action} | null} */
    this.asked = null;
    byId("drain-cancel").addEventListener("click", () => this.dialog.close());
    byId("drain-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#act();
    });
  }

  /** @param {WorkerView} worker */
  ask(worker) {
    const action = actionFor(worker);
    this.asked = { worker, action };
    setText(byId("drain-title"), action.title);
    setText(byId("drain-text"), action.text);
    setText(this.confirm, action.confirm);
    setText(this.problem, "");
    this.confirm.disabled = false;
    this.dialog.showModal();
    byId("drain-cancel").focus();
  }

  /** Closes without doing anything, and forgets the worker. */
  clear() {
    this.dialog.close();
    this.asked = null;
    for (const id of ["drain-title", "drain-text", "drain-problem", "drain-confirm"]) setText(byId(id), "");
  }

  async #act() {
    if (this.asked === null) return;
    const { worker, action } = this.asked;
    this.confirm.disabled = true;
    try {
      await this.api.post(`fleet/workers/${encodeURIComponent(worker.worker_id || worker.address)}/${action.endpoint}`, {});
      this.announce(action.done);
      this.dialog.close();
    } catch (error) {
      if (!(error instanceof Refused || error instanceof TypeError)) throw error;
      const why = error instanceof Refused ? error.message : "no connection to the router";
      setText(this.problem, `${action.failed}: ${why}.`);
      this.confirm.disabled = false;
    }
  }
}
