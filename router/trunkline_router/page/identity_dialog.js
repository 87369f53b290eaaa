/** Asks for the API key. */

import { byId, setText } from "./dom.js";

export class IdentityDialog {
  /** @param {import("./identity.js").Identity} identity @param {() => void} changed  called with another key */
  constructor(identity, changed) {
    this.identity = identity;
    this.changed = changed;
    this.dialog = byId("identity-dialog");
    this.field = byId("api-key");
    this.problem = byId("api-key-problem");
    byId("identity-cancel").addEventListener("click", () => this.dialog.close());
    byId("identity-forget").addEventListener("click", () => this.#use(""));
    byId("identity-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#submit();
    });
    // The key does not stay in the document.
    this.dialog.addEventListener("close", () => (this.field.value = ""));
  }

  ask() {
    setText(this.problem, "");
    byId("identity-forget").hidden = this.identity.key === "";
    this.dialog.showModal();
    this.field.focus();
  }

  #submit() {
    const key = this.field.value.trim();
    // Headers carry visible ASCII; fetch would throw on most other characters.
    if (!/^[\x21-\x7e]+$/.test(key)) {
      setText(this.problem, key === "" ? "The field is empty." : "A key has letters, digits and punctuation only.");
      this.field.focus();
      return;
    }
    this.#use(key);
  }

  /** @param {string} key */
  #use(key) {
    if (key === "") this.identity.forget();
    else this.identity.keep(key);
    this.dialog.close();
    this.changed();
  }
}
